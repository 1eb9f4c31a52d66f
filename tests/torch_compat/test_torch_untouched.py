"""torch is after `commgrid.shutdown` what it was before `import commgrid`."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

import commgrid
from commgrid.testing import run_on_ranks
from commgrid.torch_compat import interposer

ROOT = Path(__file__).parents[2]

USED = """
    import importlib, sys
    import torch, torch.distributed as dist
    import torch._dynamo  # which replaces torch.manual_seed
    import torch.distributed.tensor
    from torch import nn

    NAMES = (
        "torch", "torch.distributed", "torch.distributed.distributed_c10d",
        "torch.distributed._functional_collectives", "torch.distributed.device_mesh",
        "torch.distributed.tensor._redistribute", "torch.distributed.fsdp",
        "torch.nn.parallel.distributed", "torch.nn.utils.clip_grad", "torch.optim.optimizer",
        "torch.distributed.checkpoint", "torch.autograd", "torch.distributed.utils",
    )
    CLASSES = (
        dist.ProcessGroup, dist.Work, dist.ProcessGroupGloo, dist.device_mesh.DeviceMesh,
        dist.tensor.DTensor, dist.Store, dist.TCPStore, dist.PrefixStore, torch.Tensor, nn.Module,
        nn.Parameter, nn.parallel.DistributedDataParallel, torch.optim.Optimizer, torch.optim.AdamW,
    )

    def attributes():
        owners = [*map(importlib.import_module, NAMES), *CLASSES]
        # An annotation that Python has evaluated, and a cache of torch's own, are no changes.
        return {
            (getattr(owner, "__name__", owner), key): id(value)
            for owner in owners for key, value in vars(owner).items()
            if callable(value) or isinstance(value, (staticmethod, classmethod, property))
        }

    before = attributes()
    import commgrid, megatron_adapter
    from commgrid.collectives import all_reduce
    from commgrid.data_parallel import GradientReducer
    from commgrid.tensor_parallel import ColumnParallelLinear
    from torch.nn.parallel import DistributedDataParallel

    def changed():
        after = attributes()
        return sorted(f"{o}.{k}" for (o, k), value in before.items() if after.get((o, k)) != value)

    assert changed() == [], changed()

    def use():
        grid = commgrid.initialize(trace=True, verify="order", watch=True)
        mesh = grid.device_mesh("dp", "tp")
        mesh["dp", "tp"]._flatten("dp_tp")
        layer = ColumnParallelLinear(4, 4)
        reducer = GradientReducer(layer)
        layer(torch.ones(2, 4)).sum().backward()
        reducer.finish()
        torch.optim.AdamW(layer.parameters()).step()
        reducer.close()
        all_reduce(torch.ones(1), "dp")
        DistributedDataParallel(nn.Linear(2, 2), process_group=grid.get_group("dp"))
        grid.suspend()
        grid.resume()
        commgrid.trace.summary()
        commgrid.shutdown()

    for _ in range(2):
        use()
        import gc
        gc.collect()  # a model with slices hooks into torch as long as it lives
        assert changed() == [], changed()
    print("untouched")
"""


def test_nothing_differs_after_use() -> None:
    """A trace left 28 methods of ProcessGroup replaced, and a mesh one of DeviceMesh's."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(USED)],
        cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.stdout == "untouched\n", done.stdout + done.stderr


def used() -> tuple[list[str], list[Any]]:
    """Everything that replaces something, on several ranks and in an order that interleaves."""
    owners = (
        dist.ProcessGroup,
        dist.Work,
        dist.device_mesh.DeviceMesh,
        dist,
        dist.distributed_c10d,
    )
    before = [dict(vars(owner)) for owner in owners]
    grid = commgrid.initialize(tp=2, trace=True)
    mesh = grid.device_mesh("dp", "tp")
    grid.suspend("tp")  # replaces methods that the trace has replaced
    grid.resume("tp")
    commgrid.trace.stop()  # which cannot put them back beneath
    commgrid.trace.start()
    dist.all_reduce(torch.ones(1), group=grid.get_group("tp"))
    whole = distribute_tensor(torch.arange(6.0), mesh["tp"], [Shard(0)]).full_tensor()
    assert whole.tolist() == list(range(6))
    calls = commgrid.trace.summary().count("all_reduce")
    commgrid.shutdown()
    changed = [
        f"{owner}.{key}"
        for owner, then in zip(owners, before, strict=True)
        for key, value in then.items()
        if callable(value) and vars(owner).get(key) is not value
    ]
    commgrid.trace.stop()
    return changed, [calls, commgrid.trace.summary().count("all_reduce")]


def test_what_was_replaced_twice_comes_off_as_well() -> None:
    for changed, calls in run_on_ranks(used, 4, backend=None, launcher="torchrun"):
        assert changed == []
        assert calls == [1, 1]  # the records stay, and each call was told once


class Counting:
    """A listener that counts."""

    def __init__(self) -> None:
        self.calls = 0

    def begins(self, its_group: dist.ProcessGroup, made: Any) -> None:
        self.calls += 1

    def issued(self, call: object, work: dist.Work | None) -> None:
        pass

    failed = waits = lambda *_: None
    waited = lambda *_: None  # noqa: E731


def test_a_listener_of_ones_own_hears_on() -> None:
    listener: Any = Counting()
    interposer.listen(listener)
    try:
        for count in (1, 2):
            grid = commgrid.initialize(trace=True)
            dist.all_reduce(torch.ones(1), group=grid.get_group("dp"))
            commgrid.shutdown()
            assert listener.calls == count
    finally:
        interposer.stop(listener)
        commgrid.trace.stop()


def test_a_method_that_another_library_has_wrapped_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = dist.ProcessGroup.allreduce
    listener: Any = Counting()
    interposer.listen(listener)
    ours = dist.ProcessGroup.allreduce
    monkeypatch.setattr(dist.ProcessGroup, "allreduce", lambda *a, **k: ours(*a, **k))
    theirs = dist.ProcessGroup.allreduce
    interposer.stop(listener)
    interposer.put_back()
    assert dist.ProcessGroup.allreduce is theirs
    interposer.listen(listener)  # once more, and not twice
    grid = commgrid.initialize()
    dist.all_reduce(torch.ones(1), group=grid.get_group("dp"))
    assert listener.calls == 1
    commgrid.shutdown()
    interposer.stop(listener)
    monkeypatch.undo()
    interposer.put_back()
    assert dist.ProcessGroup.allreduce is plain
