"""A grid of which a rank is lost: what still returns then, and what says so."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commgrid
from commgrid import HyperCommGrid
from commgrid.collectives import all_reduce
from commgrid.data_parallel import GradientReducer
from commgrid.errors import GridDestroyedError, PeerFailedError, PeerTimeoutError
from commgrid.failures import named_failures
from commgrid.pipeline import Pipeline
from commgrid.tensor_parallel import ColumnParallelLinear
from commgrid.testing import run_on_ranks
from commgrid.torch_compat import ended_groups
from tests.flags import meet
from tests.killing import KILLED, kill_me, run_killable
from tests.nccl_stand_in import NAME, install
from tests.waiting import until

LOST = "rank 2 is gone: its process has ended"


def lost(grid: HyperCommGrid) -> None:
    """Wait until this rank has learnt that rank 2 has ended, and its groups are woken."""
    until(lambda: "tp" not in grid._groups, "rank 2 is lost")


def after_a_loss() -> list[str]:
    """What is raised outside `named_failures`, where NCCL's calls return what no rank has sent."""
    grid = commgrid.initialize(dp=3, tp=1, watch=True, connect="none", timeout=3000.0)
    group = grid.get_group("dp")
    layer = ColumnParallelLinear(4, 4)
    reducer = GradientReducer(model := nn.Linear(4, 4))
    stage = Pipeline(nn.Linear(4, 4), "gpipe", num_microbatches=1, loss=nn.functional.mse_loss)
    if grid.rank == 2:
        kill_me()
    lost(grid)
    x = torch.ones(2, 4)

    def backward() -> None:
        model(x).sum().backward()
        reducer.finish()

    found = []
    for call in (
        lambda: grid.get_group("dp"), lambda: commgrid.get_group("dp"), grid.device_mesh,
        lambda: all_reduce(x, "dp"), lambda: layer(x), backward, lambda: stage.step(x, targets=x),
        grid.suspend, grid.check,
    ):  # fmt: skip
        with pytest.raises(PeerFailedError) as caught:
            call()
        found.append(str(caught.value))
    assert (grid.rank, grid.shape["dp"], group.size()) != (0, 0, 0)  # numbers stay
    grid.abort()
    with pytest.raises(GridDestroyedError):
        grid.get_group("dp")
    commgrid.destroy()
    meet(dist.get_rank(), 2)
    return found


def test_look_ups_layers_and_reducers_raise() -> None:
    """Training went on with undefined numbers."""
    *survivors, killed = run_killable(after_a_loss, 3)
    assert killed == KILLED
    for found in survivors:
        assert len(found) == 9
        for said in found:
            assert LOST in said
            assert "grid 'default' cannot be used any more: call commgrid.rebuild" in said


@pytest.mark.parametrize(("late", "kind"), [(False, PeerFailedError), (True, PeerTimeoutError)])
def test_what_the_watch_alone_knows_is_raised_too(late: bool, kind: type[Exception]) -> None:
    """The watch notes a failure before it wakes the grid's groups."""
    grid = commgrid.initialize()
    try:
        grid.refuse_if_failed()
        seen: Any = SimpleNamespace(failure=LOST, late=late, close=lambda: None)
        grid._watch = seen
        with pytest.raises(kind, match=LOST):
            grid.refuse_if_failed()
        assert grid.failure == (LOST, late)
    finally:
        commgrid.shutdown()
    grid.refuse_if_failed()  # a destroyed grid has errors of its own


def caught_and_rebuilt() -> tuple[float, str]:
    """A program that catches the loss outside `named_failures` may rebuild, and goes on."""
    grid = commgrid.initialize(watch=True, connect="none", timeout=3000.0)
    compiled_name = grid.get_group("dp").group_name
    if grid.rank == 2:
        kill_me()
    lost(grid)
    again = commgrid.rebuild()
    assert again is not None
    total = float(all_reduce(torch.ones(1), "dp"))
    with pytest.raises(GridDestroyedError) as caught:  # as compiled functions call it
        torch.ops._c10d_functional.all_reduce(torch.ones(1), "sum", compiled_name)
    alive = torch.ops._c10d_functional.all_reduce(
        torch.ones(1), "sum", again.get_group("dp").group_name
    )
    torch.ops._c10d_functional.wait_tensor(alive)
    assert float(alive) == 2.0
    meet(dist.get_rank(), 2)
    return total, str(caught.value)


def test_a_rebuilt_grid_is_good_and_names_of_before_say_compile_again() -> None:
    *survivors, killed = run_killable(caught_and_rebuilt, 3)
    assert killed == KILLED
    for total, said in survivors:
        assert total == 2.0
        assert "of grid 'default' before it was rebuilt" in said
        assert "compile the function again (torch.compiler.reset())" in said


def no_loss() -> None:
    """The nearest program: all goes well, with a watch."""
    grid = commgrid.initialize(watch=True, connect="none")
    with named_failures(grid):
        assert float(all_reduce(torch.ones(1), "dp")) == 3.0
    assert grid.failure is None
    assert ColumnParallelLinear(4, 4)(torch.ones(2, 4)).shape == (2, 4)


def test_a_watched_grid_without_a_loss() -> None:
    run_on_ranks(no_loss, 3, backend=None, launcher="torchrun")


# -- over a stand-in for NCCL ---------------------------------------------------------------------


def aborted() -> tuple[set[str], list[str]]:
    install()
    grid = commgrid.initialize(tp=2, backend=NAME, connect="none", watch=True, timeout=30.0)
    ended: list[str] = []
    alone = {each.name for each in grid.communicators if len(each.ranks) == 1}
    destroy = dist.destroy_process_group

    def destroys(group: dist.ProcessGroup) -> None:
        ended.append(group.group_desc.split(",")[0])
        destroy(group)

    dist.destroy_process_group = destroys  # type: ignore[assignment]
    grid.abort()
    meet(dist.get_rank(), 2)
    return alone, ended


def test_groups_of_one_rank_end_the_normal_way_at_an_abort() -> None:
    """torch warned of each that destroy_process_group() was not called."""
    for alone, ended in run_on_ranks(
        aborted, 2, backend=None, launcher="torchrun", check=False, timeout=100
    ):
        assert alone
        assert {*ended} == alone


def watched_while_suspended(found: list[Any]) -> str:
    """A watch looks at the other communicators while one is suspended."""
    install()
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("commgrid").addHandler(handler)
    grid = commgrid.initialize(tp=2, backend=NAME, connect="none", watch=True, timeout=30.0)
    grid.suspend("tp")
    looked: list[str] = []
    communicator = next(each for each in grid.communicators if each.name == "pp_tp")
    backend = communicator.group.backend  # type: ignore[attr-defined]
    before = backend.get_error
    backend.get_error = lambda: (looked.append("pp_tp"), before())[1]
    until(lambda: len(looked) > 2, "the watch has looked at pp_tp")
    grid.resume("tp")
    meet(dist.get_rank(), 2)
    return "\n".join(told)


def test_a_watch_looks_further_while_a_communicator_is_suspended() -> None:
    """It raised at the suspended one every second, and came to no other."""
    for told in run_on_ranks(
        watched_while_suspended, 2, [], backend=None, launcher="torchrun", check=False, timeout=100
    ):
        assert "a callback of the links between ranks failed" not in told


def test_of_what_ends_nothing_is_nccls() -> None:
    assert ended_groups.nccl_backends(dist.ProcessGroup(0, 1)) == []  # type: ignore[call-arg]
