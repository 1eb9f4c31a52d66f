"""A planted leftover is named; a program that cleans up leaves nothing that would be."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset

import commgrid
from commgrid.launching.leftovers import Snapshot
from commgrid.testing import run_on_ranks


@pytest.fixture
def before() -> Iterator[Snapshot]:
    taken = Snapshot()
    yield taken
    assert taken.left() == []  # once the test has cleaned up


def test_an_open_file(before: Snapshot, tmp_path: Path) -> None:
    with open(tmp_path / "log.txt", "w") as file:
        assert before.left() == [f"file {tmp_path}/log.txt is still open (fd {file.fileno()})"]


def test_a_file_that_only_garbage_holds_is_closed(before: Snapshot, tmp_path: Path) -> None:
    cycle: list[Any] = [open(tmp_path / "log.txt", "w")]  # noqa: SIM115
    cycle.append(cycle)
    del cycle
    with pytest.warns(ResourceWarning, match="unclosed file"):
        assert before.left() == []


def test_a_thread(before: Snapshot) -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait, name="loader")
    thread.start()
    assert before.left() == ["thread 'loader' was started and still runs"]
    over.set()
    assert before.left() == []  # without a join: the thread is given a moment to end


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODE", "slow")
    monkeypatch.setenv("SEED", "1")
    before = Snapshot()
    with monkeypatch.context() as changed:
        changed.setenv("MODE", "fast")
        changed.delenv("SEED")
        changed.setenv("DEPTH", "2")
        assert before.left() == [
            "environment variable 'DEPTH' was set",
            "environment variable 'MODE' was changed",
            "environment variable 'SEED' was removed",
        ]
    assert before.left() == []


def test_settings_of_torch(before: Snapshot) -> None:
    torch.set_default_dtype(torch.float64)
    with torch.no_grad():
        assert before.left() == [
            "default dtype is torch.float64, was torch.float32",
            "grad mode is False, was True",
        ]
    torch.set_default_dtype(torch.float32)


def hook(*_: object) -> None:
    pass


@pytest.mark.parametrize(
    ("register", "place"),
    [
        (
            nn.modules.module.register_module_forward_hook,
            "torch.nn.modules.module._global_forward_hooks",
        ),
        (
            nn.modules.module.register_module_full_backward_pre_hook,
            "torch.nn.modules.module._global_backward_pre_hooks",
        ),
        (
            register_optimizer_step_post_hook,
            "torch.optim.optimizer._global_optimizer_post_hooks",
        ),
    ],
)
def test_a_hook(before: Snapshot, register: Callable[..., Any], place: str) -> None:
    handle = register(hook)
    assert before.left() == [
        f"hook hook is still in {place}: call remove() on the handle that registering it returned"
    ]
    handle.remove()


@pytest.mark.parametrize(
    ("owner", "name", "called"),
    [
        (torch, "matmul", "torch.matmul"),
        (dist, "all_reduce", "torch.distributed.all_reduce"),
        (
            dist.distributed_c10d,
            "new_group",
            "torch.distributed.distributed_c10d.new_group",
        ),
        (torch.Tensor, "backward", "torch.Tensor.backward"),
        (nn.Module, "__call__", "torch.nn.Module.__call__"),
        (torch.autograd.Function, "apply", "torch.autograd.Function.apply"),
        (dist.ProcessGroup, "allreduce", "torch.distributed.ProcessGroup.allreduce"),
        (dist.Work, "wait", "torch.distributed.Work.wait"),
    ],
)
def test_a_patch(
    before: Snapshot, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, called: str
) -> None:
    own = getattr(owner, name)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, lambda *args, **options: own(*args, **options), raising=False)
        found = before.left()
    inherited = name not in vars(owner)  # a patch adds it there
    assert found == ([] if inherited else [f"{called} is still patched"])
    assert not inherited or owner is torch.autograd.Function


def test_several_patches_and_a_removal(before: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        for name in ("all_gather", "all_reduce", "broadcast", "gather", "reduce", "scatter"):
            patched.setattr(dist, name, hook)
        patched.delattr(dist, "barrier")
        removed, said = before.left()
    assert removed == "torch.distributed.barrier was removed"
    start, _, names = said.partition(": ")
    assert start == "torch.distributed is still patched"
    assert names.endswith(" and 2 more")


def test_a_world_and_groups() -> None:
    def leaving() -> list[list[str]]:
        outer = Snapshot()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        inner = Snapshot()
        group = dist.new_group([0], group_desc="mine")
        found = [outer.left(), inner.left()]
        dist.destroy_process_group(group)
        found.append(inner.left())
        dist.destroy_process_group()
        return [*found, outer.left()]

    assert run_on_ranks(leaving, 1, backend=None) == [
        [
            [
                "torch.distributed is still initialized: call commgrid.shutdown() if commgrid "
                "started it, else torch.distributed.destroy_process_group()"
            ],
            [
                "process group 'mine' is still registered: call "
                "torch.distributed.destroy_process_group(group)"
            ],
            [],
            [],
        ]
    ]


def test_a_grid_a_recording_and_a_key() -> None:
    def leaving() -> list[list[str]]:
        store = dist.distributed_c10d._get_default_store()
        before = Snapshot(store)
        commgrid.initialize(tp=2, name="mine")
        dist.barrier()
        alive = [each for each in before.left() if not each.startswith("store key")]
        commgrid.destroy()
        dist.barrier()
        destroyed = before.left()
        commgrid.trace.start()
        traced = before.left()
        commgrid.trace.stop()
        dist.barrier()
        store.set("commgrid/mine/0.1/tp", "")
        return [alive, destroyed, traced, before.left()]

    for alive, destroyed, traced, key in run_on_ranks(leaving, 2, check=False):
        assert alive == ["grid 'mine' is still alive: call commgrid.shutdown()"]
        assert destroyed == []
        assert traced == [
            "thread 'commgrid answers' was started and still runs",
            "commgrid.trace still records: call commgrid.trace.stop()",
        ]
        assert key == ["store key 'commgrid/mine/0.1/tp' was left"]


def train() -> None:
    """A program that cleans up."""
    torch.manual_seed(0)
    grid = commgrid.initialize(tp=2, trace=True, watch=True, verify="order")
    layer = nn.parallel.DistributedDataParallel(nn.Linear(2, 2), process_group=grid.get_group("tp"))
    optimizer = torch.optim.AdamW(layer.parameters())
    for (inputs,) in DataLoader(TensorDataset(torch.randn(4, 2)), num_workers=1):
        layer(inputs).sum().backward()
        optimizer.step()
    grid.suspend(["dp_cp"])
    grid.resume(["dp_cp"])
    compiled = torch.compile(lambda tensor: tensor * 2, backend="eager")
    assert compiled(torch.ones(1)).item() == 2
    dist.all_reduce(torch.ones(1), group=grid.get_group("tp"))
    commgrid.destroy()
    commgrid.trace.stop()


@pytest.mark.parametrize("starts_world", [False, True])
def test_a_clean_program_leaves_nothing(starts_world: bool) -> None:
    def clean() -> list[str]:
        store = None if starts_world else dist.distributed_c10d._get_default_store()
        before = Snapshot(store)
        train()
        dist.barrier()
        commgrid.shutdown()
        return before.left()

    how: dict[str, Any] = {"backend": None, "launcher": "torchrun"} if starts_world else {}
    assert run_on_ranks(clean, 2, **how) == [[], []]


def test_torch_is_not_imported_for_it() -> None:
    program = (
        "import sys\n"
        "from commgrid.launching.leftovers import Snapshot\n"
        "assert Snapshot().left() == []\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_file_of_a_store_is_open_while_it_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = dist.PrefixStore("prefix", dist.FileStore(str(path), 1))
    before = Snapshot(store)
    with path.open("rb"):  # as a call of the store on another thread has it
        assert before.left() == []
    with (tmp_path / "other").open("w") as other:
        assert before.left() == [f"file {other.name} is still open (fd {other.fileno()})"]
