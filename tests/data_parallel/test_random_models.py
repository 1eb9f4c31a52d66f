"""Randomly drawn models, cuts and trainings against one process that sees all the data.

A third of the draws misuses commgrid once, in its second step, and is right, or refused on every
rank.

Each draw follows from its seed alone. A failure names it; one draw is run again with

    RANDOM_MODELS=17 pytest tests/data_parallel/test_random_models.py

and several with RANDOM_MODELS=17,23. A nightly run has all of them, a full run 30, and a short run
ten that have every feature among them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from commgrid.testing import run_on_ranks
from tests.data_parallel.random_draws import Draw, draw, features
from tests.data_parallel.random_models import slice_of
from tests.data_parallel.random_oracle import Expected, train_whole
from tests.data_parallel.random_training import Found, misuse_of, train_all
from tests.sizes import pick

ALL = range(200)
SHORT = (37, 49, 88, 92, 121, 135, 146, 165, 175, 197)
FULL = sorted({*SHORT, *ALL[::10]})
AT_ONCE = 20  # draws that the same ranks run one after the other

# Everything that a draw may have, as `features` names it.
FEATURES = """
    Adam, AdamW, RMSprop, SGD, a block used twice, a rank without microbatches, another order,
    apart groups, aux_loss, average: copy, average: ema, average: none, counting equal,
    counting tokens, cp, dp, ep, etp, evaluate model, evaluate part,
    evaluate read, experts beside tp, frozen embedding, frozen experts,
    frozen slices, gated, gathered, given up: accumulated, given up: none, given up: summed,
    gradient norm: clip, gradient norm: function, gradient norm: none, gradient norm: reducer,
    linear, masters, microbatches that vary by rank, microbatches that vary by step, mlp, moe,
    no bias, no overlap, norm, one groups, other frozen, overlap, pair, partial gradients, plain,
    plain embedding, pp, read after overlap, recomputed, resume: none, resume: rebuild,
    resume: rewind, schedule: cycle, schedule: decay, schedule: none, sequence parallel,
    shared_ffn_hidden, skipped bias, softmax_over all, softmax_over chosen, subset groups,
    tied head, tied over stages, tp 1, tp 2, tp 4, two groups, used always,
    used first microbatch, used never, used some steps, z_loss, zero1, zero_grad model,
    zero_grad never, zero_grad optimizer
"""

# fp64 rounds at 1e-16. A gradient is a sum of some 1,000 products of numbers around 1, added up in
# another order on every cut, and six updates carry the difference on: 1e-14 is what is seen. A
# wrong gradient, norm or count changes the fifth digit or an earlier one.
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The draws of each number of ranks, some at a time."""
    if "seeds" not in metafunc.fixturenames:
        return
    chosen: Iterable[int] = pick(SHORT, FULL, ALL)
    if os.environ.get("RANDOM_MODELS"):
        chosen = [int(seed) for seed in os.environ["RANDOM_MODELS"].split(",")]
    by_world: dict[int, list[int]] = {}
    for seed in chosen:
        by_world.setdefault(draw(seed).cut.world, []).append(seed)
    runs = [
        pytest.param(
            world, seeds[i : i + AT_ONCE],
            id=f"{world} ranks, draws {','.join(map(str, seeds[i : i + AT_ONCE]))}",
        )
        for world, seeds in sorted(by_world.items()) for i in range(0, len(seeds), AT_ONCE)
    ]  # fmt: skip
    metafunc.parametrize(("world", "seeds"), runs)


@pytest.mark.parametrize("seeds_drawn", [SHORT, ALL], ids=["short", "full"])
def test_every_feature_is_drawn(seeds_drawn: Iterable[int]) -> None:
    drawn = frozenset[str]().union(*(features(draw(seed)) for seed in seeds_drawn))
    assert drawn == {name.strip() for name in FEATURES.split(",")}


def test_a_draw_follows_from_its_seed() -> None:
    assert [draw(seed) for seed in SHORT] == [draw(seed) for seed in SHORT]
    assert len({repr(draw(seed)) for seed in ALL}) == len(ALL)


def test_trains_as_one_process_does(world: int, seeds: list[int]) -> None:
    found = run_on_ranks(train_all, world, seeds, timeout=300 + 10 * len(seeds))
    wrong = []
    for number, seed in enumerate(seeds):
        this = draw(seed)
        expected = train_whole(this)
        refused = [theirs[number].refused for theirs in found]
        if all(refused):
            continue
        if any(refused):
            wrong.append(f"draw {seed} ({misuse_of(this)}) is refused on some ranks: {refused}")
            continue
        differences = [
            f"  rank {rank}: {difference}"
            for rank, theirs in enumerate(found)
            for difference in compare(this, theirs[number], expected)
        ]
        if differences:
            told = f"draw {seed} ({misuse_of(this)}): {this}"
            wrong.append("\n".join([told, *differences[:12]]))
    assert not wrong, "\n".join(wrong)


def compare(this: Draw, found: Found, expected: Expected) -> list[str]:
    """The differences between a rank and the single process, in the order of the run."""
    differing: list[str] = []

    def same(what: str, mine: Tensor | float, theirs: Tensor | float) -> None:
        one, other = (torch.as_tensor(x, dtype=torch.float64) for x in (mine, theirs))
        if one.shape != other.shape:
            differing.append(f"{what}: shapes {tuple(one.shape)} and {tuple(other.shape)}")
        elif not torch.allclose(one, other, **CLOSE):
            far = (one - other).abs().max().item()
            differing.append(f"{what}: up to {far:.3g} apart")

    for step, loss in enumerate(found.losses):
        if loss is not None:
            same(f"loss of step {step}", loss, expected.losses[step][found.data_rank])
    assert len(found.norms) == (len(expected.norms) if this.training.norm else 0)
    for step, norm in enumerate(found.norms):
        same(f"norm of step {step}", norm, expected.norms[step])
    for step, what, numbers, cuts in found.evaluations:
        same(f"{what} after step {step}", numbers, slice_of(expected.evaluations[step, what], cuts))
    for step, average in enumerate(found.averages):
        assert average.keys() == found.cuts.keys()
        for name, numbers in average.items():
            full = expected.averages[step][name]
            same(f"average of {name}, step {step}", numbers, slice_of(full, found.cuts[name]))
    for name, numbers in found.parameters.items():
        same(f"{name} at the end", numbers, slice_of(expected.parameters[name], found.cuts[name]))
    return differing
