"""A sharded optimizer against the same optimizer, unsharded; its state, copies and mistakes."""

import copy
import gc
import io
import pickle
import time
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commgrid
from commgrid import CommGridError, ShapeError
from commgrid.collectives.objects import gathered
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.expert import GroupedExperts
from commgrid.runtime.grid import HyperCommGrid
from commgrid.tensor_parallel import ColumnParallelLinear, initialize_parameters
from commgrid.testing import run_on_ranks

OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 1e-2}),
    (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True, "foreach": True}),
    (torch.optim.Adam, {"lr": 1e-2, "fused": True}),
    (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adagrad, {"lr": 1e-2}),
    (torch.optim.RMSprop, {"lr": 1e-2, "centered": True}),
    (torch.optim.NAdam, {"lr": 1e-2}),
    (torch.optim.Adadelta, {"lr": 1.0}),
]


def make(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)
    initialize_parameters(model, seed=1)
    return model


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups with biases without weight decay."""
    named = dict(model.named_parameters())
    return [
        {"params": [p for name, p in named.items() if "weight" in name], "weight_decay": 0.1},
        {"params": [p for name, p in named.items() if "bias" in name], "weight_decay": 0.0},
    ]


def every_optimizer() -> None:
    grid = commgrid.initialize()
    for kind, options in OPTIMIZERS:
        for bucket_bytes in (1, 2**20):
            ours, theirs = make(), make()
            reducer = GradientReducer(ours, shard=True, bucket_bytes=bucket_bytes)
            given = {} if kind is torch.optim.Adagrad else {"groups": groups(ours)}
            sharded = ShardedOptimizer(reducer, kind, **given, **options)
            whole = kind(groups(theirs) if given else theirs.parameters(), **options)
            schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (sharded, whole)]
            for step in range(4):
                x = torch.randn(
                    8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step)
                )
                mine = x.chunk(grid.size("dp"))[grid.get_local_rank("dp")]
                ours(mine).square().mean().backward()
                reducer.finish()
                theirs(x).square().mean().backward()
                for optimizer, schedule in zip((sharded, whole), schedules, strict=True):
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule.step()
            state = ours.state_dict()
            for name, parameter in theirs.named_parameters():
                # fp64, averages of two halves against one mean, through four updates.
                torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-10, atol=1e-12)


def test_equals_the_unsharded_optimizer() -> None:
    run_on_ranks(every_optimizer, 2)


def train(
    model: nn.Module, reducer: GradientReducer, optimizer: ShardedOptimizer, step: int
) -> None:
    dtype = next(model.parameters()).dtype
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).to(dtype)
    model(x).square().mean().backward()
    reducer.finish()
    optimizer.step()
    optimizer.zero_grad()


def resumed() -> None:
    grid = commgrid.initialize()
    for dtype in (torch.float64, torch.bfloat16):
        for shard in (True, False):
            first = make(dtype)
            reducer = GradientReducer(first, shard=shard)
            optimizer = ShardedOptimizer(reducer, torch.optim.AdamW, lr=1e-2)
            train(first, reducer, optimizer, 0)
            saved = io.BytesIO()
            torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, saved)
            train(first, reducer, optimizer, 1)
            loaded = torch.load(io.BytesIO(saved.getvalue()), weights_only=True)
            second = make(dtype)
            again = GradientReducer(second, shard=shard)
            resumed = ShardedOptimizer(again, torch.optim.AdamW, lr=1e-2)
            second.load_state_dict(loaded["model"])
            resumed.load_state_dict(loaded["optimizer"])
            train(second, again, resumed, 1)
            for ours, theirs in zip(
                first.state_dict().values(), second.state_dict().values(), strict=True
            ):
                assert torch.equal(ours, theirs)
    other = nn.Linear(5, 2)
    wrong = ShardedOptimizer(GradientReducer(other, shard=True), torch.optim.AdamW)
    with pytest.raises(ShapeError, match="was saved for other parts of the parameters: it has"):
        wrong.load_state_dict(loaded["optimizer"])
    assert grid.size("dp") == 2


def test_state_is_taken_up_where_it_was_left() -> None:
    run_on_ranks(resumed, 2)


def rounded() -> None:
    """bf16 weights are their fp32 copies, rounded; it is the copies that take the steps."""
    commgrid.initialize()
    for shard in (True, False):
        ours, exact = make(torch.bfloat16), make(torch.bfloat16).float()
        reducer = GradientReducer(ours, shard=shard)
        sharded = ShardedOptimizer(reducer, torch.optim.SGD, lr=2.0**-10)
        whole = torch.optim.SGD(exact.parameters(), lr=2.0**-10)
        for _ in range(3):
            for model, optimizer in ((ours, sharded), (exact, whole)):
                optimizer.zero_grad()
                sum(parameter.sum() for parameter in model.parameters()).backward()
                if model is ours:
                    reducer.finish()
                optimizer.step()
        sharded.wait()
        for parameter, copied in zip(ours.parameters(), exact.parameters(), strict=True):
            assert torch.equal(parameter, copied.bfloat16())
        reducer.close()


def test_half_precision_weights_follow_their_fp32_copies() -> None:
    run_on_ranks(rounded, 2)


def scheduled() -> None:
    """A step and its schedule's, then saved; and again in a new optimizer that loads it."""
    commgrid.initialize()
    for shard in (True, False):
        model = make()
        optimizer = ShardedOptimizer(
            GradientReducer(model, shard=shard), torch.optim.SGD, lr=1.0, overlap=False
        )
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        optimizer.step()
        schedule.step()
        assert optimizer.state_dict()["inner"]["param_groups"][0]["lr"] == 0.5
        again = make()
        loaded = ShardedOptimizer(
            GradientReducer(again, shard=shard), torch.optim.SGD, lr=1.0, overlap=False
        )
        loaded.load_state_dict(optimizer.state_dict())
        assert loaded.param_groups[0]["lr"] == 0.5


def test_a_saved_state_has_the_rate_that_a_schedule_has_set_since_the_step() -> None:
    run_on_ranks(scheduled, 2)


def late() -> None:
    """One rank comes late to the gather; weights loaded meanwhile must not be lost to it."""
    grid = commgrid.initialize()
    model = make(torch.float32)
    reducer = GradientReducer(model, shard=True)
    optimizer = ShardedOptimizer(reducer, torch.optim.SGD, lr=1e-2)
    model(torch.ones(1, 5)).sum().backward()
    reducer.finish()
    if grid.rank == 1:
        time.sleep(0.3)  # late
    optimizer.step()
    model.load_state_dict({name: torch.full_like(p, 5.0) for name, p in model.named_parameters()})
    optimizer.wait()
    assert all(parameter.eq(5).all() for parameter in model.parameters())
    # A part that is loaded by itself reaches the fp32 copies as well.
    half = make(torch.bfloat16)
    reducer = GradientReducer(half, shard=True)
    optimizer = ShardedOptimizer(reducer, torch.optim.SGD, lr=0.0)
    half[0].load_state_dict(
        {name: torch.full_like(p, 7.0) for name, p in half[0].named_parameters()}
    )
    half(torch.ones(1, 5, dtype=torch.bfloat16)).sum().backward()
    reducer.finish()
    optimizer.step()
    optimizer.wait()
    assert half[0].weight.eq(7).all()


def test_loaded_weights_stay() -> None:
    run_on_ranks(late, 2)


def named() -> list[list[float]]:
    """The weights after a step, from each way in which torch's optimizers take parameters."""
    commgrid.initialize()
    found = []
    for shard in (True, False):
        for ways in (
            lambda model: None,
            lambda model: model.named_parameters(),
            lambda model: list(model.parameters()),
            lambda model: [{"params": model.named_parameters()}],
            lambda model: [
                {"params": list(model[0].named_parameters())},
                {"params": model[2].parameters()},
            ],
        ):
            model = make()
            reducer = GradientReducer(model, shard=shard)
            optimizer = ShardedOptimizer(
                reducer, torch.optim.AdamW, groups=ways(model), lr=1e-2, overlap=False
            )
            model(torch.ones(1, 5, dtype=torch.float64)).sum().backward()
            reducer.finish()
            optimizer.step()
            found.append(torch.cat([p.detach().flatten() for p in model.parameters()]).tolist())
            reducer.close()
    return found


def test_parameters_may_come_with_their_names() -> None:
    """torch's optimizers take them since 2.6."""
    for found in run_on_ranks(named, 2):
        assert len(found) == 10
        assert all(each == found[0] for each in found)


def swap(model: nn.Module, averages: list[Tensor]) -> None:
    """Swap weights for averages, in place."""
    for parameter, average in zip(model.parameters(), averages, strict=True):
        kept = parameter.clone()
        parameter.copy_(average)
        average.copy_(kept)


def edited(how: str, steps: int = 30) -> None:
    """The fp32 copies after steps whose updates are lost in bf16, with edits after each or not."""
    commgrid.initialize()
    found = []
    for edits in (False, True):
        model = make(torch.bfloat16)
        averages = [parameter.detach().clone() + 1 for parameter in model.parameters()]
        reducer = GradientReducer(model, shard=True)
        optimizer = ShardedOptimizer(reducer, torch.optim.AdamW, lr=1e-4, weight_decay=0.0)
        for step in range(steps):
            x = torch.ones(2, 5, dtype=torch.bfloat16) * (1 + step % 3)
            model(x).float().square().sum().backward()
            reducer.finish()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.wait()
            with torch.no_grad():
                if edits and how == "swapped":
                    swap(model, averages)
                    swap(model, averages)
                elif edits and how == "clamped":
                    for parameter in model.parameters():
                        parameter.clamp_(-100, 100)
        found.append([each.clone() for each in optimizer.state_dict()["masters"]])
        reducer.close()
    plain, after = found
    assert all(torch.equal(a, b) for a, b in zip(plain, after, strict=True))


@pytest.mark.parametrize("how", ["swapped", "clamped"])
def test_weights_that_are_what_they_were_leave_their_fp32_copies(how: str) -> None:
    """Averages swapped in and back, or a clamp without effect, rounded the copies at each step."""
    run_on_ranks(edited, 2, how)


class Reads(nn.Module):
    """Uses a parameter of a module that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 5, dtype=torch.float64)
        self.layer = nn.Linear(5, 5, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x + self.table.weight[0])
        return result


def overlapped() -> list[float]:
    grid = commgrid.initialize()
    model = Reads()
    initialize_parameters(model, seed=0)
    reducer = GradientReducer(model, shard=True, bucket_bytes=1)
    optimizer = ShardedOptimizer(reducer, torch.optim.SGD, lr=0.1)
    losses = []
    for step in range(4):
        loss = model(torch.ones(2, 5, dtype=torch.float64)).square().sum()
        losses.append(loss.item())
        loss.backward()
        reducer.finish()
        if (step + grid.rank) % 2:
            time.sleep(0.05)  # the others' forward begins before this rank has sent its part
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_forward_waits_for_every_parameter_it_reads() -> None:
    alone = run_on_ranks(overlapped, 1)[0]
    for losses in run_on_ranks(overlapped, 2):
        assert losses == pytest.approx(alone, rel=1e-12)


def copied() -> None:
    commgrid.initialize(tp=2)
    model = nn.Sequential(nn.LayerNorm(5), ColumnParallelLinear(5, 4, gather_output=True))
    reducer = GradientReducer(model, shard=True)
    optimizer = ShardedOptimizer(reducer, torch.optim.AdamW, lr=1e-2)
    x = torch.ones(2, 5)
    train(model, reducer, optimizer, 0)
    optimizer.wait()
    expected = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), expected)
        twin.load_state_dict(model.state_dict())
        twin(x).sum().backward()  # its gradients are its own
        assert all(p.grad is not None for p in twin.parameters())
        again = GradientReducer(twin, shard=True)
        train(twin, again, ShardedOptimizer(again, torch.optim.AdamW), 0)
    alive = weakref.ref(optimizer), weakref.ref(reducer)
    del optimizer, reducer, again, model, twin
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


def test_models_copy_and_pickle_under_it_and_nothing_stays_behind() -> None:
    run_on_ranks(copied, 4)


def moved() -> None:
    commgrid.initialize()
    for shard in (True, False):
        model = make(torch.float32)
        reducer = GradientReducer(model, shard=shard)
        optimizer = ShardedOptimizer(reducer, torch.optim.AdamW)
        model(torch.ones(1, 5)).sum().backward()
        reducer.finish()
        model[0].weight.data = model[0].weight.data.clone()
        with pytest.raises(
            CommGridError, match=r"0.weight of shape \(7, 5\) was moved or replaced"
        ):
            optimizer.step()
        with pytest.raises(commgrid.SpecError, match=r"'0\.weight' in groups is not one"):
            ShardedOptimizer(reducer, torch.optim.AdamW, groups=[{"params": ["0.weight"]}])


def test_a_moved_parameter_is_named() -> None:
    run_on_ranks(moved, 2)


@pytest.mark.ranks(4, ep=2)
def test_state_of_whole_gradients_loads_on_another_data_parallel_rank(grid: HyperCommGrid) -> None:
    """Ranks along edp hold the same experts, and with shard=False the same optimizer state."""
    reducer = GradientReducer(GroupedExperts(4, 8, 4))
    found = gathered((grid.get_local_rank("ep"), reducer.groups.coordinate()), grid.get_group("dp"))
    for index, coordinate in found:
        assert all(coordinate == other for same, other in found if same == index)
