"""Programs that look right and would train on wrong numbers: right, or an error that says why.

Each test is a program that once trained wrong without an error.
"""

import copy
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel

import commgrid
from commgrid import CommGridError, GridMismatchError, SpecError, checkpoint
from commgrid.collectives.asynchronous import Pending
from commgrid.data_parallel import (
    GradientReducer,
    GradScaler,
    ShardedOptimizer,
    clip_gradients,
    gathers,
)
from commgrid.parameters import mark_parameters
from commgrid.runtime.grid import HyperCommGrid
from commgrid.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    initialize_parameters,
)
from commgrid.testing import run_on_ranks

WIDTH = 8


class Net(nn.Module):
    """Blocks, and a head that may be called, or whose weight may be read."""

    def __init__(self, blocks: int = 3, *, raw: bool = False) -> None:
        super().__init__()
        self.raw = raw
        self.blocks = nn.ModuleList(
            nn.Sequential(
                ColumnParallelLinear(WIDTH, 2 * WIDTH, dtype=torch.float64),
                nn.GELU(),
                RowParallelLinear(2 * WIDTH, WIDTH, dtype=torch.float64),
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(WIDTH, 5, dtype=torch.float64)
        initialize_parameters(self, seed=0)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return F.linear(x, self.head.weight, self.head.bias) if self.raw else self.head(x)


def data(step: int = 0, rows: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, WIDTH, dtype=torch.float64, generator=generator)


def step_of(model: nn.Module, reducer: GradientReducer, optimizer: Any, step: int) -> None:
    """One step, in which one rank comes late to every gather, and ever later."""
    model(data(step)).square().mean().backward()
    reducer.finish()
    start = gathers.start_all_gather_

    def late(*given: Any) -> Any:
        time.sleep(0.02)  # the lateness that is meant
        return start(*given)

    if commgrid.get_grid().rank == 1:
        gathers.start_all_gather_ = late
    optimizer.step()
    gathers.start_all_gather_ = start


def pair(**options: Any) -> tuple[Net, GradientReducer, ShardedOptimizer]:
    """A model with many small buckets, and what trains it."""
    model = Net()
    reducer = GradientReducer(model, shard=True, bucket_bytes=256)
    return model, reducer, ShardedOptimizer(reducer, torch.optim.SGD, lr=0.5, **options)


# -- weights after a step ------------------------------------------------------------------


def saved_at_once(folder: str) -> None:
    """Gathers that take long, as those of large weights do; a thread of their own sends them."""
    commgrid.initialize(tp=2)
    model, reducer, optimizer = pair(overlap=True)
    start, sender = gathers.start_all_gather_, ThreadPoolExecutor(max_workers=1)

    def slow() -> None:
        time.sleep(0.1)  # as large weights do

    class Slow:
        def __init__(self, buffer: Tensor, group: Any) -> None:
            self.sent = sender.submit(lambda: (slow(), start(buffer, group).wait()))

        def wait(self) -> None:
            self.sent.result()

    gathers.start_all_gather_ = lambda *given: Slow(*given)  # type: ignore[assignment,return-value]
    step_of(model, reducer, optimizer, 0)
    checkpoint.save(folder, 1, model, progress=False)
    found = Net()
    checkpoint.load(folder, found, progress=False)
    optimizer.wait()
    sender.shutdown()
    for name, parameter in model.named_parameters():
        assert torch.equal(found.get_parameter(name), parameter), name


def test_a_checkpoint_right_after_step_has_the_new_weights(tmp_path: Path) -> None:
    run_on_ranks(saved_at_once, 4, str(tmp_path))


def averaged_and_copied() -> None:
    commgrid.initialize(tp=2)
    model, reducer, optimizer = pair()  # the default gathers in step
    average = AveragedModel(model, avg_fn=lambda _, new, __: new)
    for step in range(2):
        step_of(model, reducer, optimizer, step)
        average.update_parameters(model)
        twin = copy.deepcopy(model)
        time.sleep(0.3)  # any gather still under way has ended now
        optimizer.wait()
        for name, parameter in model.named_parameters():
            assert torch.equal(twin.get_parameter(name), parameter), name
            assert torch.equal(average.module.get_parameter(name), parameter), name


def test_averages_and_copies_of_a_model_are_never_half_gathered() -> None:
    run_on_ranks(averaged_and_copied, 4)


def read_raw(options: dict[str, Any]) -> list[float]:
    """The head is called in an evaluation once, and read by its parent ever after."""
    commgrid.initialize(tp=2)
    model = Net(raw=True)
    reducer = GradientReducer(model, shard=True, bucket_bytes=256)
    if "units" in options:
        options = {**options, "units": list(model.blocks)}
    optimizer = ShardedOptimizer(reducer, torch.optim.SGD, lr=0.5, **options)
    with torch.no_grad():
        model.head(data())
    losses = []
    for step in range(4):
        with torch.no_grad():
            losses.append(model(data(9)).square().mean().item())
        step_of(model, reducer, optimizer, step)
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    "options", [{"overlap": True}, {"overlap": True, "units": ()}, {}], ids=str
)
def test_a_weight_that_its_parent_reads_is_whole(options: dict[str, Any]) -> None:
    alone = run_on_ranks(read_raw, 2, {})[0]
    for losses in run_on_ranks(read_raw, 4, options):
        assert losses == pytest.approx(alone, rel=1e-12)  # fp64, sums of two equal halves


def waits() -> None:
    grid = commgrid.initialize()
    model, reducer, optimizer = pair(overlap=True)
    for unknown in (nn.Linear(2, 2), nn.ModuleList([Net()])):
        with pytest.raises(SpecError, match="is not a module of the reducer's model"):
            ShardedOptimizer(
                GradientReducer(Net(), shard=True), torch.optim.SGD, overlap=True, units=[unknown]
            )
    with pytest.raises(SpecError, match="units= says what waits for what with overlap=True"):
        ShardedOptimizer(GradientReducer(Net(), shard=True), torch.optim.SGD, units=[model])
    reducer.close()
    model = Net()
    reducer = GradientReducer(model, shard=True, bucket_bytes=256)
    optimizer = ShardedOptimizer(
        reducer, torch.optim.SGD, lr=0.5, overlap=True, units=[*model.blocks, model.head]
    )
    step_of(model, reducer, optimizer, 0)
    left = []
    hooks = [
        block.register_forward_hook(lambda *_: left.append(len(optimizer.gathers.pending)))
        for block in model.blocks
    ]
    model(data())
    for hook in hooks:
        hook.remove()
    assert left == sorted(left, reverse=True)  # each has waited for its own only
    assert left[0] > left[-1] > 0
    assert not optimizer.gathers.pending
    assert grid.size("dp") == 2


def test_units_wait_for_their_own_parameters_only() -> None:
    run_on_ranks(waits, 2)


def read_too_early() -> str:
    """A unit's own weight, read by another module in the next forward."""
    commgrid.initialize()
    model = Net()
    reducer = GradientReducer(model, shard=True, bucket_bytes=256)
    optimizer = ShardedOptimizer(
        reducer, torch.optim.SGD, lr=0.5, overlap=True, units=[*model.blocks, model.head]
    )
    step_of(model, reducer, optimizer, 0)
    with pytest.raises(CommGridError) as caught:
        F.linear(data(), model.head.weight).sum().backward()
    return str(caught.value)


def test_a_gradient_of_a_weight_that_was_read_half_gathered_is_refused() -> None:
    for said in run_on_ranks(read_too_early, 2):
        assert said.startswith("head.weight of shape (5, 8) has a gradient, but was read before it")


def dropped() -> list[float]:
    """A function trains a step, and returns the model alone."""
    if not commgrid.is_initialized():
        commgrid.initialize()

    def trained(overlaps: bool) -> Net:
        model = Net()
        reducer = GradientReducer(model, shard=True, bucket_bytes=256)
        optimizer = ShardedOptimizer(reducer, torch.optim.SGD, lr=0.5, overlap=overlaps)
        start = gathers.start_all_gather_

        def late(tensor: Tensor, group: Any) -> Pending:
            return Pending(None, lambda: start(tensor, group).wait(), group)

        gathers.start_all_gather_ = late
        step_of(model, reducer, optimizer, 0)
        gathers.start_all_gather_ = start
        reducer.close()
        return model

    models = [trained(True), trained(False)]
    return [sum(p.double().sum().item() for p in model.parameters()) for model in models]


def test_a_model_whose_optimizer_is_gone_has_whole_weights() -> None:
    for first, other in run_on_ranks(dropped, 2):
        assert first == other


class Counted(dict[int, Any]):
    """Gathers under way that count how often they are looked at."""

    looked = 0

    def pop(self, *given: Any) -> Any:
        Counted.looked += 1
        return super().pop(*given)


def looked_at(num_blocks: int) -> int:
    if not commgrid.is_initialized():
        commgrid.initialize()
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(num_blocks)))
    initialize_parameters(model, seed=0)
    reducer = GradientReducer(model, shard=True, bucket_bytes=1)
    optimizer = ShardedOptimizer(reducer, torch.optim.SGD, overlap=True, units=list(model))
    model(torch.ones(1, 2)).sum().backward()
    reducer.finish()
    optimizer.step()
    gathers = optimizer.gathers
    gathers.pending, Counted.looked = Counted(gathers.pending), 0
    model(torch.ones(1, 2))
    return Counted.looked


def looks() -> tuple[int, int]:
    return looked_at(8), looked_at(80)


def test_the_first_forward_costs_a_module_the_same_in_a_larger_model() -> None:
    for few, many in run_on_ranks(looks, 2):
        assert many == 10 * few


# -- copies are copies ---------------------------------------------------------------------


def seeded_apart(broadcast: bool) -> str:
    grid = commgrid.initialize(tp=2)
    model = Net()
    if grid.rank == 3:
        nn.init.zeros_(model.blocks[1][0].weight)
    try:
        reducer = GradientReducer(model, broadcast=broadcast)
    except GridMismatchError as error:
        return str(error)
    for step in range(2):
        step_of(model, reducer, torch.optim.SGD(model.parameters(), lr=0.5), step)
    twin = Net()
    reducer.close()
    GradientReducer(twin).close()
    return f"{model.blocks[1][0].weight.abs().sum().item():.12g}"


def test_ranks_seeded_apart_are_named_on_all_ranks() -> None:
    said = run_on_ranks(seeded_apart, 4, False)
    for told in said:
        assert told.startswith(
            "blocks.1.0.weight of shape (8, 8) differs between rank 1 and rank 3 of group 'dp"
        )
        assert "broadcast=True" in told
    # Equal to the first rank's that has one: the slices of tp 1 as they were on rank 1.
    made = run_on_ranks(seeded_apart, 4, True)
    assert made[0] == made[2]
    assert made[1] == made[3] != "0"


class Adapter(nn.Module):
    """A low-rank adapter around a sharded layer, as wide as this rank's slice."""

    def __init__(self, layer: ColumnParallelLinear) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(WIDTH, 2, bias=False, dtype=torch.float64)
        self.up = nn.Linear(2, layer.weight.shape[0], bias=False, dtype=torch.float64)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y + self.up(self.down(x))


def adapted(folder: str) -> tuple[str, str]:
    grid = commgrid.initialize(tp=2)
    torch.manual_seed(grid.get_local_rank("tp"))
    adapter = Adapter(ColumnParallelLinear(WIDTH, 2 * WIDTH, dtype=torch.float64))
    initialize_parameters(adapter.layer, seed=0)
    initialize_parameters(adapter.down, seed=1)
    with pytest.raises(GridMismatchError) as drawn:
        GradientReducer(adapter)
    nn.init.zeros_(adapter.up.weight)  # as adapters begin: equal now, and not after a step
    reducer = GradientReducer(adapter)
    adapter(data()).square().mean().backward()
    with pytest.raises(GridMismatchError, match=r"up.weight .* different gradients .* shard_dims"):
        reducer.finish()
    torch.optim.SGD(adapter.parameters(), lr=0.1).step()
    with pytest.raises(commgrid.CheckpointError) as saved:
        checkpoint.save(folder, 1, adapter, progress=False)
    assert checkpoint.steps(folder) == []
    return str(drawn.value), str(saved.value)


def test_an_adapter_of_local_width_is_refused_before_it_loses_a_slice(tmp_path: Path) -> None:
    for rank, (drawn, saved) in enumerate(run_on_ranks(adapted, 4, str(tmp_path / "runs"))):
        row = (0, 1) if rank < 2 else (2, 3)
        assert "up.weight of shape (8, 2) differs between rank" in drawn
        assert f"rank {row[0]} and rank {row[1]}" in drawn
        assert "a ShardedModule's shard_dims" in drawn
        assert "up.weight" in saved
        assert "rank 0 and rank 1" in saved


def wrapped() -> None:
    commgrid.initialize(tp=2)
    for wrap in (
        lambda layer: nn.utils.parametrizations.weight_norm(layer),
        lambda layer: nn.utils.parametrizations.spectral_norm(layer),
        lambda layer: prune.random_unstructured(layer, "weight", 0.5),
    ):
        for layer in (ColumnParallelLinear(WIDTH, WIDTH), RowParallelLinear(WIDTH, WIDTH)):
            wrap(layer)
            model = nn.Sequential(layer)
            with (
                pytest.raises(
                    SpecError,
                    match=r"0\.weight of \w+RowP|0\.weight of \w*Column\w* is no parameter",
                )
                if isinstance(layer, ColumnParallelLinear)
                else pytest.raises(
                    SpecError,
                    match=r"0\.weight of \w*RowParallelLinear is no parameter of the layer",
                )
            ):
                GradientReducer(model)
    alone = ColumnParallelLinear(WIDTH, WIDTH, group="pp")  # of one rank: nothing is cut
    GradientReducer(nn.utils.parametrizations.weight_norm(alone), broadcast=True).close()
    foreign = nn.Linear(WIDTH, WIDTH)
    foreign.weight.tensor_model_parallel = True  # type: ignore[assignment]
    with pytest.raises(SpecError, match=r"weight of shape \(8, 8\) is a slice of Megatron-core's"):
        GradientReducer(foreign)


def test_parametrized_and_foreign_slices_are_refused() -> None:
    run_on_ranks(wrapped, 2)


# -- the optimizer that belongs ------------------------------------------------------------


def plain_optimizer() -> None:
    commgrid.initialize()
    model = Net()
    reducer = GradientReducer(model, shard=True)
    torch.optim.SGD(model.parameters(), lr=0.1)
    model(data()).sum().backward()
    with pytest.raises(SpecError, match=r"there is none over this reducer: make ShardedOptimizer"):
        reducer.finish()


def test_a_plain_optimizer_over_sharded_gradients_is_refused() -> None:
    run_on_ranks(plain_optimizer, 2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_an_optimizer_beside_the_one_over_a_reducer_is_told_why(
    grid: HyperCommGrid, kind: Any, options: dict[str, bool]
) -> None:
    """A plain one that takes the placeholders by itself, in lists or one by one."""
    model = nn.Linear(4, 1)
    initialize_parameters(model, seed=0)
    reducer = GradientReducer(model, shard=True)
    kept = ShardedOptimizer(reducer, torch.optim.SGD, lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    reducer.finish()
    plain = kind(model.parameters(), lr=0.1, **options)
    with pytest.raises(CommGridError, match=r"on a gradient of shape \(.*keeps in parts for its"):
        plain.step()
    kept.step()


class Sign(torch.optim.Optimizer):
    """Somebody's own element-wise optimizer."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


def own_optimizer() -> None:
    commgrid.initialize()
    ours, theirs = Net(), Net()
    reducer = GradientReducer(ours, shard=True, bucket_bytes=256)
    for kind, said in (
        (Sign, "Sign is not known to update elements one by one"),
        (torch.optim.Muon, "Muon does not update elements one by one"),
        (torch.optim.LBFGS, "LBFGS does not update elements one by one"),
    ):
        with pytest.raises(SpecError, match=said):
            ShardedOptimizer(reducer, kind)
    optimizer = ShardedOptimizer(reducer, Sign, element_wise=True)
    with pytest.raises(SpecError, match=r"groups are given when it is made"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(SpecError, match="another ShardedOptimizer was made over this reducer"):
        ShardedOptimizer(reducer, torch.optim.SGD)
    whole = Sign(theirs.parameters())
    for step in range(3):
        step_of(ours, reducer, optimizer, step)
        theirs.zero_grad()
        theirs(data(step)).square().mean().backward()
        whole.step()
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name), parameter, rtol=1e-12, atol=1e-12)


def test_own_element_wise_optimizers_say_so_and_groups_are_settled() -> None:
    run_on_ranks(own_optimizer, 2)


def clipped() -> None:
    commgrid.initialize()
    model, reducer, optimizer = pair()
    model(data()).square().mean().backward()
    reducer.finish()
    for look in (
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]),
        lambda: clip_gradients(model, 1.0),
    ):
        with pytest.raises(CommGridError, match=r"reducer\.gradient_norm\(\).*reducer\.clip_"):
            look()
    assert reducer.clip_gradients(1e-3) > 1e-3
    torch.testing.assert_close(
        reducer.gradient_norm(), torch.tensor(1e-3, dtype=torch.float64), rtol=1e-3, atol=0
    )
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_clipping_by_torch_of_gradients_that_a_reducer_keeps_is_refused() -> None:
    run_on_ranks(clipped, 2)


def overflows(kind: str, shard: bool) -> list[tuple[float, float]]:
    """fp32 with a loss scale; in step 1 one slice of one tp rank overflows."""
    grid = commgrid.initialize(tp=2)
    layer = ColumnParallelLinear(4, 4, bias=False)
    model = nn.Sequential(layer)
    initialize_parameters(model, seed=0)
    reducer = GradientReducer(model, shard=shard)
    optimizer: torch.optim.Optimizer = (
        ShardedOptimizer(reducer, torch.optim.SGD, lr=0.5)
        if shard
        else torch.optim.SGD(model.parameters(), lr=0.5)
    )
    scaler = (GradScaler if kind == "ours" else torch.amp.GradScaler)("cpu", init_scale=4.0)
    found = []
    for step in range(3):
        y = model(torch.ones(1, 4))
        factor = 1e38 if step == 1 and grid.get_local_rank("tp") == 1 else 1.0
        scaler.scale((y * factor).sum() * factor).backward()
        reducer.finish()
        scaler.unscale_(optimizer)
        if step != 1:
            reducer.clip_gradients(0.25)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append((model[0].weight.sum().item(), scaler.get_scale()))
    return found


@pytest.mark.parametrize("shard", [False, True])
def test_all_ranks_skip_a_step_that_overflows_on_one(shard: bool) -> None:
    for steps in run_on_ranks(overflows, 4, "ours", shard):
        weights, scales = zip(*steps, strict=True)
        assert scales == (4.0, 2.0, 2.0)  # all of them saw it
        assert weights[1] == weights[0]
        # 16 gradients of one, clipped to a norm of 0.25: each is 0.0625, and half of them are here.
        assert weights[0] - weights[2] == pytest.approx(8 * 0.5 * 0.0625, rel=1e-5)


def test_torchs_own_scaler_is_refused_over_kept_gradients() -> None:
    def refused() -> str:
        with pytest.raises(CommGridError) as caught:
            overflows("torch", True)
        return str(caught.value)

    for said in run_on_ranks(refused, 2):
        assert "commgrid.data_parallel.GradScaler" in said


def not_finite(policy: str, shard: bool) -> list[Any]:
    grid = commgrid.initialize(tp=2)
    model = Net(blocks=1)
    reducer = GradientReducer(model, shard=shard, not_finite=policy)
    optimizer: Any = (
        ShardedOptimizer(reducer, torch.optim.AdamW, lr=0.1)
        if shard
        else torch.optim.AdamW(model.parameters(), lr=0.1)
    )
    found: list[Any] = []
    for step in range(3):
        hurt = step == 1 and grid.rank == 2
        with_hook = (
            model.blocks[0][1].register_full_backward_hook(lambda *g: (g[1][0] * float("nan"),))
            if hurt
            else None
        )
        model(data(step)).square().mean().backward()
        if with_hook is not None:
            with_hook.remove()
        try:
            reducer.finish()
            found.append(reducer.is_finite)
        except CommGridError as error:
            found.append(str(error))
        optimizer.step()
        optimizer.zero_grad()
    found.append(all(bool(p.isfinite().all()) for p in model.parameters()))
    return found


@pytest.mark.parametrize("shard", [False, True])
def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks(shard: bool) -> None:
    assert run_on_ranks(not_finite, 4, "skip", shard) == [[True, False, True, True]] * 4
    assert run_on_ranks(not_finite, 4, "keep", shard) == [[True, True, True, False]] * 4


def test_a_gradient_that_is_not_finite_is_named_on_all_ranks() -> None:
    found = run_on_ranks(not_finite, 4, "raise", True)
    for said in found:
        assert "gradients are infinite or NaN: blocks.0.0" in said[1]
        assert said[1] == found[0][1]
    with pytest.raises(SpecError, match="not_finite='drop': expected one of keep, skip, raise"):
        GradientReducer(nn.Linear(1, 1), not_finite="drop")


# -- gradients past autograd -----------------------------------------------------------------


def fuses() -> None:
    commgrid.initialize()
    for flag in ("gradient_accumulation_fusion", "fuse_wgrad_accumulation"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for module in model:
            setattr(module, flag, False)
        GradientReducer(model, broadcast=True).close()
        setattr(model[1], flag, True)
        with pytest.raises(SpecError, match=rf"^1\.weight of shape \(4, 4\) .* with {flag}=False$"):
            GradientReducer(model)
        model[1].requires_grad_(False)  # which has no gradient to add
        GradientReducer(model, broadcast=True).close()


def test_layers_that_add_to_main_grad_are_refused() -> None:
    run_on_ranks(fuses, 1)


def mixed() -> None:
    """One backward reaches a weight through commgrid's layer and past it."""
    commgrid.initialize()
    layer = ColumnParallelLinear(4, 4, bias=False, group="tp")
    twin = copy.deepcopy(layer)
    reducer = GradientReducer(layer)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        layer.zero_grad()
        (layer(x) + layer(2 * x) + F.linear(3 * x, layer.weight)).sum().backward()
        reducer.finish()
    (6 * F.linear(x, twin.weight)).sum().backward()
    torch.testing.assert_close(layer.weight.grad, twin.weight.grad, rtol=1e-6, atol=1e-6)


def test_a_weight_used_by_its_layer_and_raw_has_both_gradients() -> None:
    run_on_ranks(mixed, 1)


def captured() -> None:
    """As if a CUDA graph were being captured."""
    from commgrid.data_parallel import reducer as reducers

    commgrid.initialize()
    layer, plain = ColumnParallelLinear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    both = [GradientReducer(layer), GradientReducer(plain, broadcast=True)]
    reducers.is_capturing = lambda _: True
    with pytest.raises(CommGridError, match=r"backward reached weight .* while a CUDA graph"):
        layer(torch.ones(1, 4)).sum().backward()
    with pytest.raises(CommGridError, match=r"backward reached weight .* while a CUDA graph"):
        plain(torch.ones(1, 4)).sum().backward()
    with pytest.raises(CommGridError, match=r"finish\(\) was called while a CUDA graph"):
        both[0].finish()


def test_a_captured_graph_would_not_repeat_marks_and_is_refused() -> None:
    run_on_ranks(captured, 1)


# -- what is made for CUDA -----------------------------------------------------------------


def rounded() -> None:
    commgrid.initialize()
    table = VocabParallelEmbedding(4, 2, dtype=torch.bfloat16)
    with torch.no_grad():
        table.weight.zero_()
    tokens = torch.zeros(1025, dtype=torch.long)
    scale = torch.full((1025, 1), 2.0**-12, dtype=torch.bfloat16)
    scale[0] = 1.0
    index_add_, into = Tensor.index_add_, []

    def seen(self: Tensor, *given: Any) -> Tensor:
        into.append(self.dtype)
        return index_add_(self, *given)

    Tensor.index_add_ = seen  # type: ignore[method-assign,assignment]
    (table(tokens) * scale).sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad[0].tolist() == [1.25, 1.25]  # in bf16 all of them are lost to the 1
    table.weight.grad = None
    reducer = GradientReducer(table, dtype=torch.bfloat16)
    (table(tokens) * scale).sum().backward()
    reducer.finish()
    assert table.weight.grad[0].tolist() == [1.25, 1.25]
    assert into == [torch.float32, torch.float32]  # on CUDA bf16 would lose them


def test_bf16_embedding_gradients_add_up_in_fp32() -> None:
    run_on_ranks(rounded, 1)


def operations() -> tuple[int, int, int]:
    """Operations for reducing, clipping and updating 288 parameters, and waits of the host."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = func.overloadpacket.__name__
            # AdamW reads its step counters, which are on the CPU, one by one.
            views = ("view", "slice", "detach", "alias", "_unsafe_view", "_local_scalar_dense")
            self.count += name not in views
            return func(*args, **(kwargs or {}))

    commgrid.initialize(tp=2)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(144))).bfloat16()
    initialize_parameters(model, seed=0)
    for layer in model:
        nn.init.eye_(layer.weight)  # type: ignore[arg-type]  # so that no gradient vanishes
    reducer = GradientReducer(model, shard=True)
    optimizer = ShardedOptimizer(reducer, torch.optim.AdamW, lr=0.1, foreach=True)
    reads = 0
    tolist, item = Tensor.tolist, Tensor.item

    def counted(read: Any) -> Any:
        def reading(self: Tensor) -> Any:
            nonlocal reads
            reads += 1
            return read(self)

        return reading

    found = []
    for _ in range(23):
        model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        reads = 0
        Tensor.tolist, Tensor.item = counted(tolist), counted(item)  # type: ignore[method-assign,assignment]
        with Count() as reducing:
            reducer.finish()
        Tensor.tolist, Tensor.item = tolist, item  # type: ignore[method-assign]
        with Count() as updating:
            reducer.clip_gradients(1.0)
            optimizer.step()
            optimizer.zero_grad()
        found.append((reducing.count, updating.count, reads))
    return found[22]  # the first 20, and each fifth, compare numbers among ranks


def test_a_step_of_many_parameters_is_few_operations_and_one_wait() -> None:
    for reducing, updating, reads in run_on_ranks(operations, 4):
        assert reads == 1
        assert reducing < 60
        assert updating < 120


def loaded(num_layers: int) -> int:
    if not commgrid.is_initialized():
        commgrid.initialize()
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(num_layers))).bfloat16()
    initialize_parameters(model, seed=0)
    reducer = GradientReducer(model, shard=True)
    optimizer = ShardedOptimizer(reducer, torch.optim.SGD, lr=0.0)
    copies = 0
    copy_ = Tensor.copy_

    def counted(*given: Any, **more: Any) -> Tensor:
        nonlocal copies
        copies += 1
        return copy_(*given, **more)

    Tensor.copy_ = counted  # type: ignore[method-assign]
    model.load_state_dict({k: torch.full_like(v, 7.0) for k, v in model.state_dict().items()})
    assert all(master.eq(7).all() for _, master, _ in optimizer.parts())
    Tensor.copy_ = copy_  # type: ignore[method-assign]
    return copies


def loads() -> tuple[int, int]:
    return loaded(8), loaded(80)


def test_loading_costs_a_module_the_same_in_a_larger_model() -> None:
    for few, many in run_on_ranks(loads, 1):
        assert many <= 10 * few


def bucket_sizes() -> list[list[int]]:
    commgrid.initialize()
    found = []
    for bucket_bytes in (None, 2**20):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))
        reducer = GradientReducer(model, bucket_bytes=bucket_bytes, broadcast=True)
        found.append([bucket.gradient.nbytes >> 20 for bucket in reducer.buckets])
    return found


def test_buckets_are_as_large_as_megatrons_where_many_ranks_share_them() -> None:
    # 4 MiB layers: 25 MiB are reached with the seventh; at 8 ranks 32 MB with the eighth.
    assert run_on_ranks(bucket_sizes, 2)[0] == [[28, 28, 8], [4] * 16]
    assert run_on_ranks(bucket_sizes, 8)[0][0] == [32, 32]


def marked_partial() -> None:
    """A norm under sequence parallelism: its copies over tp are compared as well."""
    grid = commgrid.initialize(tp=2)
    norm = mark_parameters(nn.LayerNorm(4), partial="tp")
    with torch.no_grad():
        norm.weight.add_(grid.get_local_rank("tp"))
    with pytest.raises(GridMismatchError, match=r"weight of shape \(4,\) differs between rank 0 "):
        GradientReducer(norm)


def test_partial_parameters_are_compared_over_their_group() -> None:
    run_on_ranks(marked_partial, 2)


def sent_in_backward() -> list[int]:
    """Number of sums under way when the gradient of the first layer's input is known, and later."""
    commgrid.initialize(tp=2)
    model = nn.Sequential(*(ColumnParallelLinear(4, 8, gather_output=True) for _ in range(1)))
    for _ in range(3):
        model.append(ColumnParallelLinear(8, 8, gather_output=True))
    initialize_parameters(model, seed=0)
    reducer = GradientReducer(model, bucket_bytes=1)
    x = torch.ones(2, 4, requires_grad=True)
    begun: list[int] = []
    x.register_hook(lambda _: begun.append(sum(slot.is_in_flight for slot in reducer.slots)))
    model(x).sum().backward()
    begun.append(sum(slot.is_in_flight for slot in reducer.slots))
    reducer.finish()
    return begun


def test_buckets_start_in_backward_though_layers_write_their_gradients_themselves() -> None:
    for early, late in run_on_ranks(sent_in_backward, 4):
        assert early >= 5  # of the three layers above the first
        assert late == 8
