"""A pipeline computes the unsplit model's losses and gradients, for any schedule."""

import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commgrid
from commgrid import GridMismatchError, SpecError
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.parameters import mark_parameters
from commgrid.pipeline import (
    Backward,
    Forward,
    Pipeline,
    Schedule,
    StageLinks,
    make_schedule,
    simulate,
)
from commgrid.testing import run_on_ranks

# Sums of the same products in the same order; only sums over microbatches and ranks may differ.
TOLERANCE = 1e-12
WIDTH, ROWS = 6, 3


class Part(nn.Module):
    """Part of a model whose parts pass on three tensors: states, a mask, and a sum so far."""

    def __init__(self, part: int, num_parts: int) -> None:
        super().__init__()
        torch.manual_seed(part)
        self.first, self.last = part == 0, part == num_parts - 1
        self.mix = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.ones(()))
        self.double()

    def forward(self, x: Tensor, *passed: Tensor, shift: Tensor) -> Any:
        mask, total = passed if passed else (x.abs() > 0.5, x.new_zeros(()))
        y = self.norm(x + self.mix(x)).masked_fill(mask, 0.0) * self.scale + shift
        total = total + y.square().mean() * self.scale
        return (y, total) if self.last else (y, mask, total)


def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    y, total = output
    return (y - target).square().sum() + total


def data(microbatches: int) -> tuple[list[Tensor], list[Tensor], list[dict[str, Tensor]]]:
    torch.manual_seed(1)
    shape = (microbatches, ROWS, WIDTH)
    inputs, targets = torch.randn(shape).double(), torch.randn(shape).double()
    return (
        list(inputs),
        list(targets),
        [{"shift": torch.tensor(i / 8)} for i in range(microbatches)],
    )


def unsplit(num_parts: int, microbatches: int) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Each microbatch's loss, and each part's gradients."""
    parts = [Part(i, num_parts) for i in range(num_parts)]
    losses = []
    for x, target, kwargs in zip(*data(microbatches), strict=True):
        passed: Any = (x,)
        for part in parts:
            passed = part(*passed, **kwargs)
        found = loss(passed, target)
        found.backward()
        losses.append(found.detach())
    return losses, [gradients(part) for part in parts]


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def same(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> int:
    assert found.keys() == expected.keys(), what
    for name, gradient in expected.items():
        worst = (found[name] - gradient).abs().max()
        assert worst <= TOLERANCE * gradient.abs().max(), f"{what}, {name}: off by {worst}"
    return len(found)


# Schedule, stages, chunks, microbatches: fewer than stages, not a multiple, and many.
CASES = [
    ("gpipe", 1, 1, 3), ("interleaved", 1, 2, 3), ("gpipe", 2, 1, 3), ("gpipe", 2, 2, 3),
    ("1f1b", 2, 1, 5), ("zb-h1", 2, 1, 5), ("interleaved", 2, 2, 2), ("interleaved", 2, 3, 6),
    ("gpipe", 3, 2, 2), ("1f1b", 3, 1, 2), ("zb-h1", 3, 1, 7), ("interleaved", 3, 2, 6),
    ("gpipe", 4, 1, 6), ("1f1b", 4, 1, 1), ("1f1b", 4, 1, 9), ("zb-h1", 4, 1, 2),
    ("zb-h1", 4, 1, 9), ("interleaved", 4, 2, 8), ("interleaved", 4, 3, 4),
]  # fmt: skip


def trained(cases: list[tuple[str, int, int, int]]) -> int:
    compared = 0
    grid = commgrid.initialize(pp=cases[0][1])
    for name, stages, num_chunks, microbatches in cases:
        parts = range(grid.get_local_rank("pp"), stages * num_chunks, stages)
        chunks = [Part(part, stages * num_chunks) for part in parts]
        pipeline = Pipeline(chunks, name, num_microbatches=microbatches, loss=loss)
        expected_losses, expected = unsplit(stages * num_chunks, microbatches)
        inputs, targets, kwargs = data(microbatches)
        for step in range(2):  # the second finds declared shapes
            for chunk in chunks:
                chunk.zero_grad()
            losses = pipeline.step(inputs, targets, kwargs=kwargs)
            assert (losses is not None) == pipeline.is_last
            what = f"{name}, {stages} stages, {num_chunks} chunks, {microbatches}, step {step}"
            if losses is not None:
                torch.testing.assert_close(losses, torch.stack(expected_losses), rtol=1e-12, atol=0)
            for part, chunk in zip(parts, chunks, strict=True):
                compared += same(gradients(chunk), expected[part], f"{what}, part {part}")
        evaluated = pipeline.evaluate(inputs[:2], targets[:2], kwargs=kwargs[:2])
        outputs = pipeline.forward(inputs[:1], kwargs=kwargs[:1])
        if pipeline.is_last:
            assert evaluated is not None
            assert outputs is not None
            assert not evaluated.requires_grad
            torch.testing.assert_close(
                evaluated, torch.stack(expected_losses[:2]), rtol=1e-12, atol=0
            )
            again = loss(outputs[0], targets[0])
            torch.testing.assert_close(again, expected_losses[0], rtol=1e-12, atol=0)
        else:
            assert evaluated is None
            assert outputs is None
    commgrid.destroy()
    return compared


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_losses_and_gradients_are_the_unsplit_models(stages: int) -> None:
    cases = [case for case in CASES if case[1] == stages]
    counts = run_on_ranks(trained, stages, cases)
    per_part = len(list(Part(0, 1).parameters()))
    expected = sum(2 * per_part * chunks for _, _, chunks, _ in cases)
    assert counts == [expected] * stages


# -- what is kept alive ------------------------------------------------------------------


class Kept:
    """A saved tensor, and how many of them there are."""

    alive = 0

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        Kept.alive += 1
        weakref.finalize(self, Kept.forget)

    @staticmethod
    def forget() -> None:
        Kept.alive -= 1


def most_alive(name: str, microbatches: int) -> int:
    """How many microbatches a stage's graph holds something of, at most."""
    commgrid.initialize(pp=4)
    seen = []

    class Stage(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
                y = super().forward(x)  # which saves its input and its weight
            seen.append(Kept.alive)
            return y.square().sum() if pipeline.is_last else y

    stage = Stage(4, 4)
    pipeline = Pipeline(stage, name, num_microbatches=microbatches)
    pipeline.step([torch.randn(2, 4, requires_grad=True) for _ in range(microbatches)])
    assert Kept.alive == 0
    return max(seen)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_no_more_is_alive_than_the_simulator_says(name: str) -> None:
    found = run_on_ranks(most_alive, 4, name, 6)
    expected = simulate(make_schedule(name, 4, 6)).peak_live
    assert found == [2 * live for live in expected]


# -- with data parallelism, and what stages share ------------------------------------------


class Tied(nn.Module):
    """The first and last part of a model use one table, for other things."""

    def __init__(
        self, part: int, num_parts: int, table: nn.Embedding | None = None, *, mark: bool = True
    ) -> None:
        super().__init__()
        self.first, self.last = part == 0, part == num_parts - 1
        torch.manual_seed(99)
        if self.first or self.last:
            self.table = table or nn.Embedding(7, WIDTH, dtype=torch.float64)
            if mark:
                mark_parameters(self.table, shared="embedding")
        torch.manual_seed(part)
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x) if self.first else x
        x = torch.tanh(self.layer(x))
        return x @ self.table.weight.t() if self.last else x


def cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), tokens.flatten(), reduction="sum")


def tied(
    stages: int, num_chunks: int, name: str, shard: bool
) -> tuple[int, list[float], dict[str, Tensor]]:
    """Steps over pp and dp; gradients of the last, and each step's norm."""
    groups = {"embedding": {"of": "pp", "pick": ["first", "last"]}}
    grid = commgrid.initialize(pp=stages, groups=groups)
    num_parts, stage = stages * num_chunks, grid.get_local_rank("pp")
    chunks: list[Tied] = []
    for part in range(stage, num_parts, stages):
        chunks.append(Tied(part, num_parts, chunks[0].table if chunks and stages == 1 else None))
    model = nn.ModuleList(chunks)
    reducer = GradientReducer(model, shard=shard, bucket_bytes=256)
    keeper = ShardedOptimizer(reducer, torch.optim.SGD) if shard else None
    pipeline = Pipeline(chunks, name, num_microbatches=4, loss=cross_entropy, reducer=reducer)
    norms = []
    for step in range(2):
        torch.manual_seed(step)
        tokens = torch.randint(7, (8, 2, 5)).chunk(grid.size("dp"))[grid.get_local_rank("dp")]
        microbatches = list(tokens.chunk(4))
        model.zero_grad()
        pipeline.step(microbatches, microbatches)
        reducer.finish(count=tokens.numel())
        norms.append(reducer.gradient_norm().item())
    found = {
        f"{stage + stages * i}.{name}": gradient
        for i, chunk in enumerate(chunks) if keeper is None
        for name, gradient in gradients(chunk).items()
    }  # fmt: skip
    assert shard or len(found) == len(list(model.parameters())) + (stages == 1 and num_chunks > 1)
    commgrid.destroy()
    return grid.rank, norms, found


def unused() -> list[float] | None:
    """The table's gradient where the last stage does not use its copy in this step."""
    groups = {"embedding": {"of": "pp", "pick": ["first", "last"]}}
    grid = commgrid.initialize(pp=2, groups=groups)
    part = Tied(grid.get_local_rank("pp"), 2)
    part.last = False
    reducer = GradientReducer(part)
    pipeline = Pipeline(
        part, num_microbatches=1, loss=lambda y, target: y.square().sum(), reducer=reducer
    )  # fmt: skip
    tokens = torch.arange(6).view(2, 3)
    pipeline.step([tokens], [tokens])
    reducer.finish()
    gradient = part.table.weight.grad
    return None if gradient is None else gradient.flatten().tolist()


def test_copies_of_which_one_is_not_used_stay_equal() -> None:
    first, second = run_on_ranks(unused, 2)
    assert first == second
    assert first is not None
    assert any(first)


def given_up() -> list[float] | None:
    """A step that is given up after its backward, where one stage has a parameter it never uses."""
    groups = {"embedding": {"of": "pp", "pick": ["first", "last"]}}
    grid = commgrid.initialize(pp=2, groups=groups)
    part = Tied(grid.get_local_rank("pp"), 2)
    if part.last:
        part.unused = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    reducer = GradientReducer(part)
    pipeline = Pipeline(part, num_microbatches=1, loss=cross_entropy, reducer=reducer)
    tokens = torch.arange(6).view(2, 3)
    pipeline.step([tokens], [tokens])
    reducer.zero_grad()
    pipeline.step([tokens], [tokens])
    reducer.finish()
    gradient = part.table.weight.grad
    return None if gradient is None else gradient.flatten().tolist()


def test_a_step_is_given_up_where_only_one_stage_has_sent_the_tied_weight() -> None:
    first, second = run_on_ranks(given_up, 2, timeout=300)
    assert first == second
    assert first == pytest.approx(accumulated_once(), rel=1e-12)


def accumulated_once() -> list[float]:
    """The table's gradient of one step, by one process."""
    first = Tied(0, 2, mark=False)
    tokens = torch.arange(6).view(2, 3)
    cross_entropy(Tied(1, 2, first.table, mark=False)(first(tokens)), tokens).backward()
    assert first.table.weight.grad is not None
    return first.table.weight.grad.flatten().tolist()


def whole(num_parts: int) -> tuple[list[float], dict[str, Tensor]]:
    first = Tied(0, num_parts, mark=False)
    parts = [first, *(Tied(p, num_parts, first.table, mark=False) for p in range(1, num_parts))]
    model, norms = nn.ModuleList(parts), []
    for step in range(2):
        torch.manual_seed(step)
        tokens = torch.randint(7, (8, 2, 5))
        model.zero_grad()
        x = tokens.flatten(0, 1)
        for part in parts:
            x = part(x)
        (cross_entropy(x, tokens.flatten(0, 1)) / tokens.numel()).backward()
        norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item())  # type: ignore[union-attr]
    found = {f"{i}.{n}": g for i, part in enumerate(parts) for n, g in gradients(part).items()}
    return norms, found


@pytest.mark.parametrize(
    ("world", "stages", "num_chunks", "name", "shard"),
    [
        (2, 1, 2, "interleaved", False),
        (2, 2, 1, "1f1b", False),
        (4, 2, 2, "interleaved", False),
        (4, 2, 1, "zb-h1", True),
        (4, 4, 1, "1f1b", False),
        (6, 3, 1, "zb-h1", False),
    ],
)
def test_tied_embeddings_with_data_parallelism(
    world: int, stages: int, num_chunks: int, name: str, shard: bool
) -> None:
    expected_norms, expected = whole(stages * num_chunks)
    for _, norms, found in run_on_ranks(tied, world, stages, num_chunks, name, shard):
        assert norms == pytest.approx(expected_norms, rel=1e-12)
        same(found, {key: expected[key] for key in found}, name)


def launches(name: str, num_chunks: int) -> bool:
    """Reduction over dp starts within a chunk's last backward, neither earlier nor in finish()."""
    grid = commgrid.initialize(pp=2)
    parts = range(grid.get_local_rank("pp"), 2 * num_chunks, 2)
    chunks = [Part(part, 2 * num_chunks) for part in parts]
    model = nn.ModuleList(chunks)
    reducer = GradientReducer(model, bucket_bytes=1)  # a bucket for each parameter
    started: list[float] = []
    start = reducer.reductions._start

    def noted(bucket: Any) -> Any:
        started.append(time.perf_counter())
        return start(bucket)

    reducer.reductions._start = noted  # type: ignore[method-assign]
    pipeline = Pipeline(chunks, name, num_microbatches=4, loss=loss, reducer=reducer)
    inputs, targets, kwargs = data(4)
    for _ in range(2):
        started.clear()
        model.zero_grad()
        pipeline.step(inputs, targets, kwargs=kwargs)
        last = [
            span for action, span in pipeline.spans.items()
            if action.microbatch == 3 and not isinstance(action, Forward)
        ]  # fmt: skip
        assert len(started) == len(list(model.parameters()))
        assert all(any(begin <= at <= end for begin, end in last) for at in started)
        reducer.finish(count=4)
    return True


@pytest.mark.parametrize(
    ("name", "num_chunks"), [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)]
)
def test_data_parallel_reduction_starts_with_the_last_backward(name: str, num_chunks: int) -> None:
    assert run_on_ranks(launches, 4, name, num_chunks) == [True] * 4


def frozen() -> None:
    """A first part without gradients, a part that ignores its input, and the part before it."""
    grid = commgrid.initialize(pp=4)
    stage = grid.get_local_rank("pp")
    for name in ("1f1b", "zb-h1"):
        torch.manual_seed(stage)
        module: nn.Module = nn.Linear(WIDTH, WIDTH)
        if stage == 0:
            module.requires_grad_(False)
        if stage == 2:
            module = Ignoring()
        pipeline = Pipeline(
            module, name, num_microbatches=3, loss=lambda y, target: (y - target).square().sum()
        )
        pipeline.step([torch.randn(2, WIDTH)] * 3, [torch.zeros(2, WIDTH)] * 3)
        given = [p.grad is not None and bool(p.grad.any()) for p in module.parameters()]
        # Nothing reaches the second stage: the third does not use what that sends.
        assert given == {0: [False] * 2, 1: [False] * 2, 2: [True], 3: [True] * 2}[stage]


class Ignoring(nn.Module):
    """Returns its weight, for any input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * 1.0


def test_parts_that_need_no_gradient() -> None:
    run_on_ranks(frozen, 4)


def same_module_twice() -> None:
    """pp 1 with one module as both chunks, and chunks given as an nn.ModuleList."""
    commgrid.initialize()
    module = nn.Linear(4, 4)
    reducer = GradientReducer(module)
    pipeline = Pipeline(
        nn.ModuleList([module, module]), "interleaved", num_microbatches=2,
        loss=lambda y, target: y.square().sum(), reducer=reducer,
    )  # fmt: skip
    x = torch.randn(2, 3, 4)
    pipeline.step(x, x)
    reducer.finish(count=1)
    expected = torch.autograd.grad(module(module(x)).square().sum(), [module.weight])[0]
    torch.testing.assert_close(module.weight.grad, expected, rtol=1e-5, atol=1e-5)


def test_one_module_as_two_chunks() -> None:
    run_on_ranks(same_module_twice, 1, backend=None)


def rebuilt() -> str:
    """A pipeline outlives its grid, and still names who failed."""
    commgrid.initialize(pp=2)
    pipeline = Pipeline(Part(0, 1).mix, num_microbatches=1, loss=lambda y, t: y.sum())
    x = [torch.zeros(2, WIDTH, dtype=torch.float64)]
    pipeline.step(x, x)
    commgrid.destroy()
    try:
        pipeline.step(x, x)
    except commgrid.GridDestroyedError as error:
        assert "'default' was destroyed" in str(error)  # noqa: PT017
    grid = commgrid.initialize(pp=2)
    pipeline.step(x, x)
    loss, said = pipeline.loss, "nothing"
    if grid.rank == 1:
        pipeline.loss = None
    try:
        pipeline.step(x, x)
    except commgrid.CommGridError as error:
        said = str(error)
    assert grid.is_destroyed
    commgrid.initialize(pp=2)
    pipeline.loss = loss
    pipeline.step(x, x)
    return said


def test_a_pipeline_on_a_rebuilt_grid() -> None:
    # A grid that failed leaves keys in the store.
    for said in run_on_ranks(rebuilt, 2, check=False):
        assert "expected one floating-point scalar" in said


def after_half_a_declaration() -> list[float]:
    """The first step fails where one stage has declared its shapes and the other has not heard."""
    rank = commgrid.initialize(pp=2).rank
    pipeline = Pipeline(Part(0, 1).mix, num_microbatches=1, loss=lambda y, t: y.square().sum())
    x = [torch.ones(2, WIDTH, dtype=torch.float64)]
    with pytest.raises(commgrid.CommGridError, match="targets: none given on stage 1 of 2"):
        pipeline.step(x, x if rank == 0 else None)
    commgrid.initialize(pp=2)
    losses = [pipeline.step(x, x) for _ in range(2)]
    return [loss.item() for loss in losses if loss is not None]


def test_a_step_after_one_that_failed() -> None:
    # A grid that failed leaves keys in the store.
    first, last = run_on_ranks(after_half_a_declaration, 2, timeout=300, check=False)
    assert first == []
    assert last == [last[0]] * 2


def own_schedule() -> None:
    """All forwards first, microbatches in another order on each stage: unusual, but it can run."""
    grid = commgrid.initialize(pp=2)
    stage = grid.get_local_rank("pp")
    orders = (
        (Forward(0, 0, 1), Forward(0, 0, 0), Backward(0, 0, 0), Backward(0, 0, 1)),
        (Forward(1, 0, 0), Forward(1, 0, 1), Backward(1, 0, 0), Backward(1, 0, 1)),
    )
    part = Part(stage, 2)
    schedule = Schedule("own", 2, 2, 1, orders)
    inputs, targets, kwargs = data(2)
    Pipeline(part, schedule, num_microbatches=2, loss=loss).step(inputs, targets, kwargs=kwargs)
    same(gradients(part), unsplit(2, 2)[1][stage], "own")


def test_a_schedule_of_ones_own() -> None:
    run_on_ranks(own_schedule, 2)


# -- what is wrong -------------------------------------------------------------------------


def refused(act: Callable[[int], object], kind: type[Exception]) -> str:
    rank = commgrid.initialize(pp=2).rank
    try:
        act(rank)
    except kind as error:
        return str(error)
    return "nothing"


def step_with(
    rank: int, inputs: Any, targets: Any = None, module: nn.Module | None = None
) -> object:
    module = module or nn.Linear(4, 4)
    pipeline = Pipeline(module, num_microbatches=2, loss=lambda y, t: (y - t).sum())
    return pipeline.step(inputs, targets if targets is not None else [torch.zeros(4)] * 2)


def evaluate(rank: int, count: int | None) -> object:
    """After an evaluation of two microbatches, which went well."""
    pipeline = Pipeline(nn.Linear(4, 4), num_microbatches=2)
    pipeline.forward([torch.zeros(1, 4)] * 2)
    return pipeline.forward(None if count is None else [torch.zeros(1, 4)] * count)  # type: ignore[arg-type]


def copies(rank: int) -> nn.Module:
    """Two shared parameters, registered in another order on the second stage."""
    weight, bias = nn.Module(), nn.Module()
    weight.weight, bias.bias = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))
    return mark_parameters(nn.Sequential(*[weight, bias][:: 1 - 2 * rank]), shared="pp")


BAD: dict[str, tuple[Callable[[int], object], type[Exception], dict[int, str]]] = {
    "too few inputs": (
        lambda rank: step_with(rank, [torch.zeros(1, 4)]), commgrid.CommGridError,
        {
            0: "inputs: 1 given on stage 0 of 2; expected 2 microbatches, as schedule '1f1b' for 2",
            1: "rank 0 failed in a step of stage 0: ShapeError: inputs: 1 given",
        },
    ),
    "a changing shape": (
        lambda rank: step_with(rank, [torch.zeros(1, 4), torch.zeros(2, 4)]),
        commgrid.CommGridError,
        {
            0: "the activation of microbatch 1 between parts 0 and 1 is (2, 4) float32, but the "
               "first one over that boundary declared (1, 4) float32; give every microbatch one",
            1: "rank 0 failed in the exchange after the forward of microbatch 1 of stage 0: "
               "ShapeError: the activ",
        },
    ),
    "a vector as loss": (
        lambda rank: Pipeline(nn.Linear(4, 4), num_microbatches=2).step([torch.zeros(1, 4)] * 2),
        commgrid.CommGridError,
        {1: "part 1 of 2 (stage 1, chunk 0): its loss is (1, 4) float32; expected one"},
    ),
    "different microbatches": (
        lambda rank: Pipeline(nn.Linear(4, 4), num_microbatches=2 + rank), GridMismatchError,
        dict.fromkeys((0, 1), "rank 1 was given schedule '1f1b', num_microbatches=3, 1 chunks, but "
                      "others of ranks [0, 1] schedule '1f1b', num_microbatches=2, 1 chunks; give"),
    ),
    "different chunks, of which one does not fit": (
        lambda rank: Pipeline([nn.Linear(4, 4)] * (1 + rank), num_microbatches=2),
        GridMismatchError,
        dict.fromkeys((0, 1), "rank 1 was given schedule '1f1b', num_microbatches=2, 2 chunks"),
    ),
    "another number to evaluate": (
        lambda rank: evaluate(rank, 2 - rank), GridMismatchError,
        dict.fromkeys((0, 1), "rank 1 was given 1 microbatches to evaluate, but others of ranks"),
    ),
    "nothing to evaluate on one stage": (
        lambda rank: evaluate(rank, None if rank else 2), GridMismatchError,
        dict.fromkeys((0, 1), "rank 1 was given 0 microbatches to evaluate"),
    ),
    "no gradients": (
        torch.no_grad()(lambda rank: step_with(rank, [torch.zeros(1, 4)] * 2)),
        commgrid.CommGridError,
        dict.fromkeys((0, 1), "gradients, but they are switched off (torch.no_grad); call"),
    ),
    "copies that are not alike": (
        lambda rank: Pipeline(copies(rank), num_microbatches=1), GridMismatchError,
        dict.fromkeys((0, 1), "rank 0 shares parameters (4, 4) float32, (4,) float32 with ranks "
                      "[0, 1], but rank 1 shares (4,) float32, (4, 4) float32; mark the same ones"),
    ),
    "copies on one stage only": (
        lambda rank: Pipeline(nn.Linear(4, 4) if rank else copies(rank), num_microbatches=1),
        GridMismatchError, dict.fromkeys((0, 1), "but rank 1 shares none; mark the same ones"),
    ),
    "microbatches that do not fit": (
        lambda rank: Pipeline([nn.Linear(4, 4)] * 2, "interleaved", num_microbatches=3), SpecError,
        {0: "num_microbatches=3: the interleaved schedule takes", 1: "expected a multiple of pp=2"},
    ),
    "a schedule of other sizes": (
        lambda rank: Pipeline(nn.Linear(4, 4), make_schedule("1f1b", 4, 2), num_microbatches=2),
        SpecError,
        {0: "schedule '1f1b' for 4 stages and 2 microbatches does not fit group 'pp' of 2 ranks"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("which", BAD)
def test_what_a_pipeline_refuses(which: str) -> None:
    act, kind, said = BAD[which]
    # A grid that failed leaves keys in the store.
    found = run_on_ranks(refused, 2, act, kind, check=False)
    for rank, text in said.items():
        assert text in found[rank]


def forgotten() -> list[int]:
    commgrid.initialize(pp=2)
    pipeline = Pipeline(nn.Linear(4, 4), num_microbatches=2)
    found = []
    for rows in (1, 3):
        outputs = pipeline.forward([torch.zeros(rows, 4)])
        found.append(len(outputs[0]) if outputs else 0)
        pipeline.forget_shapes()
    return found


def test_shapes_may_change_after_forget_shapes() -> None:
    assert run_on_ranks(forgotten, 2)[1] == [1, 3]


def many_tensors(count: int) -> str:
    commgrid.initialize(pp=2)

    class Many(nn.Module):
        def forward(self, *given: Tensor) -> Any:
            return tuple(torch.full((i % 3, 2), float(i)) for i in range(count))

    try:
        outputs = Pipeline(Many(), num_microbatches=1).forward([torch.zeros(1)])
    except commgrid.CommGridError as error:
        return str(error)
    return "" if outputs is None else f"{len(outputs[0])} tensors"


def test_messages_of_many_tensors() -> None:
    # A grid that failed leaves keys in the store.
    assert run_on_ranks(many_tensors, 2, 30, check=False) == [
        "",
        "30 tensors",
    ]  # empty ones among them
    # A grid that failed leaves keys in the store.
    said = run_on_ranks(many_tensors, 2, 40, check=False)
    assert "has 40 tensors, whose dims a header of 128 numbers does not hold" in said[0]
    assert "rank 0 failed" in said[1]


def links_of_a_ring() -> tuple[int, int, tuple[int, ...]]:
    commgrid.initialize(pp=2, order="pp-tp-cp-ep-dp")
    links = StageLinks("pp", device=torch.device("cpu"))
    return links.stage, links.num_stages, tuple(links.ranks)


def test_links_follow_the_grid() -> None:
    assert run_on_ranks(links_of_a_ring, 4) == [
        (0, 2, (0, 1)), (1, 2, (0, 1)), (0, 2, (2, 3)), (1, 2, (2, 3)),
    ]  # fmt: skip
