"""The layer on many ranks, against a loop over tokens and experts on one process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby, product
from typing import Any

import pytest
import torch
from torch import Tensor

import commgrid
from commgrid.data_parallel import GradientReducer
from commgrid.expert import MoELayer
from commgrid.parameters import placements
from commgrid.testing import run_on_ranks
from tests.expert.dense import Case, balance, mixture
from tests.sizes import some

# Sums of some 10 products of numbers around 1, in another order than the loop's: 1e-12 leaves
# 1,000 times fp64's rounding.
CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def full_weights(case: Case) -> dict[str, Tensor]:
    halves = (2,) if case.get("gated") else ()
    shapes = {
        "router.weight": (case.num_experts, case.hidden),
        "experts.up": (case.num_experts, *halves, case.ffn, case.hidden),
        "experts.down": (case.num_experts, case.hidden, case.ffn),
    }
    return {
        name: draw(*shape, seed=seed).requires_grad_()
        for seed, (name, shape) in enumerate(shapes.items())
    }


def own_slice(full: Tensor, shards: Any) -> Tensor:
    for dim, group in shards:
        full = full.chunk(group.size, dim)[group.rank]
    return full


@dataclass(frozen=True)
class Expected:
    """Results of the loop: tokens by dp rank, weights by name."""

    inputs: list[Tensor]
    upstream: list[Tensor]
    outputs: list[Tensor]
    input_gradients: list[Tensor]
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]


def tp_slices(case: Case, x: Tensor) -> list[Tensor]:
    return list(x.tensor_split(case.tp))


def loop_over_all(case: Case, lengths: list[int]) -> Expected:
    """One forward and backward over tokens and experts; `lengths` are of each dp rank's sequence.

    Made once, before ranks are forked.
    """
    full = full_weights(case)
    inputs = [draw(n, case.hidden, seed=10 + i).requires_grad_() for i, n in enumerate(lengths)]
    upstream = [draw(n, case.hidden, seed=20 + i) for i, n in enumerate(lengths)]
    outputs = [torch.cat([mixture(s, full, case) for s in tp_slices(case, x)]) for x in inputs]
    loss = torch.stack([(y * u).sum() for y, u in zip(outputs, upstream, strict=True)]).sum()
    for x in inputs:
        if len(x):
            loss = loss + balance(x, full, case)
    of_all = torch.autograd.grad(loss, [*inputs, *full.values()])
    return Expected(
        inputs=[x.detach() for x in inputs],
        upstream=upstream,
        outputs=[y.detach() for y in outputs],
        input_gradients=list(of_all[: len(inputs)]),
        weights={name: weight.detach() for name, weight in full.items()},
        gradients=dict(zip(full, of_all[len(inputs) :], strict=True)),
    )


def compare(case: Case, expected: Expected) -> None:
    """One forward and backward of the layer, on the grid that is there."""
    grid = commgrid.get_grid()
    tp, dp = grid.get_local_rank("tp"), grid.get_local_rank("dp")
    layer = MoELayer(
        case.hidden, case.ffn, case.num_experts, case.top_k,
        sequence_parallel=case.sequence_parallel, dtype=torch.float64, summed_loss=False,
        **dict(case.options),
    )  # fmt: skip
    with torch.no_grad():
        for placement in placements(layer):
            whole = expected.weights[placement.name]
            placement.parameter.copy_(own_slice(whole, placement.shards))
    reducer = GradientReducer(layer)
    x, y, u, dx = (
        of_all[dp]
        for of_all in (
            expected.inputs, expected.outputs, expected.upstream, expected.input_gradients,
        )
    )  # fmt: skip
    if case.sequence_parallel:
        x, y, u, dx = (tp_slices(case, whole)[tp] for whole in (x, y, u, dx))
    x = x.clone().requires_grad_()
    found = layer(x)
    torch.testing.assert_close(found, y, **CLOSE)
    found.backward(u)
    reducer.finish(count=1 / grid.size("dp"))  # which leaves the sum
    torch.testing.assert_close(x.grad, dx, **CLOSE)
    for placement in placements(layer):
        gradient = own_slice(expected.gradients[placement.name], placement.shards)
        torch.testing.assert_close(
            placement.parameter.grad, gradient, **CLOSE,
            msg=lambda text, name=placement.name: f"{name} of {case}: {text}",
        )  # fmt: skip


KINDS: dict[str, dict[str, Any]] = {
    "dropless": {},
    "capacity": {"capacity_factor": 1.0},
    "padded": {"capacity_factor": 0.75, "pad": True},
}


def every_kind(cases: list[Case], world: int) -> None:
    """Each case; every other one in all kinds."""
    expected = []
    for number, case in enumerate(cases):
        kinds = list(KINDS) if number % 4 in (0, 3) else some(list(KINDS), 1)
        for index, kind in enumerate(kinds):
            options = tuple({**KINDS[kind], "aux_loss": 0.1, "z_loss": 0.01}.items())
            sequence = (number + index) % 2 == 0
            one = replace(case, options=options, sequence_parallel=sequence)
            lengths = [6 + 2 * (rank % 3) for rank in range(world // case.tp)]
            expected.append((one, loop_over_all(one, lengths)))
    run_on_ranks(on_its_grids, world, expected)


def on_its_grids(expected: list[tuple[Case, Expected]]) -> None:
    """Cases of one cut have one grid."""
    cuts = groupby(expected, key=lambda pair: (pair[0].tp, pair[0].ep, pair[0].etp))
    for (tp, ep, etp), of_cut in cuts:
        commgrid.initialize(tp=tp, ep=ep, etp=etp)
        for case, found in of_cut:
            compare(case, found)
        commgrid.destroy()


def sequences_over_cp() -> None:
    """Losses of whole sequences, of which each rank of tp and cp has a part."""
    case = Case(options=(("aux_loss", 0.3), ("z_loss", 0.2)))
    full = full_weights(case)
    for tp, summed in ((1, False), (1, True), (2, False), (2, True)):
        grid = commgrid.initialize(tp=tp, cp=2, ep=2, etp=1)
        num_data, parts = grid.size("dp"), 2 * tp
        sequences = draw(num_data, 8, case.hidden, seed=9)
        loss = torch.stack([
            (mixture(x, full, case).square().sum() / 8 + balance(x, full, case)) / num_data
            for x in sequences
        ]).sum()  # fmt: skip
        wanted = torch.autograd.grad(loss, list(full.values()))
        layer = MoELayer(
            case.hidden, case.ffn, case.num_experts, case.top_k, sequence_parallel=True,
            dtype=torch.float64, summed_loss=summed, **dict(case.options),
        )  # fmt: skip
        with torch.no_grad():
            for placement in placements(layer):
                placement.parameter.copy_(own_slice(full[placement.name], placement.shards))
        reducer = GradientReducer(layer)
        place = tp * grid.get_local_rank("cp") + grid.get_local_rank("tp")
        x = sequences[grid.get_local_rank("dp")].chunk(parts)[place]
        square = layer(x).square().sum()
        # A rank of cp has 4 tokens, of which each rank of tp has a part.
        (square if summed else square / 4).backward()
        reducer.finish(count=4 if summed else None)
        for placement, gradient in zip(placements(layer), wanted, strict=True):
            torch.testing.assert_close(
                placement.parameter.grad, own_slice(gradient, placement.shards), **CLOSE,
                msg=lambda text, at=(placement.name, tp, summed): f"{at}: {text}",
            )  # fmt: skip
        commgrid.destroy()


def test_losses_are_of_whole_sequences_under_context_parallelism() -> None:
    run_on_ranks(sequences_over_cp, 4)


CUTS = [
    Case(ep=ep, etp=etp, tp=tp) for ep, etp, tp in product((1, 2, 4, 8), (1, 2), (1, 2))
]  # fmt: skip


@pytest.mark.full("1", "2", "8")
@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_as_a_loop_over_experts(ep: int) -> None:
    cases = some([case for case in CUTS if case.ep == ep and ep * case.etp <= 8], 2)
    every_kind(cases, 8)


@pytest.mark.full
def test_experts_on_more_ranks_than_eight() -> None:
    every_kind([case for case in CUTS if case.ep * case.etp > 8], 16)
