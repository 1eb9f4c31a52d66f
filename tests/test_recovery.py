"""Ranks that a rebuild leaves out hand over the state that only they have in memory."""

from typing import Any

import pytest
import torch
from torch import nn

import commgrid
from commgrid import CheckpointError, checkpoint, recovery
from commgrid.checkpoint.memory import Inventory, kept_states, missing
from commgrid.collectives.objects import gathered
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.recovery import Given, given
from commgrid.rendezvous.membership import Membership
from commgrid.store import standby as torch_standby
from commgrid.tensor_parallel import initialize_parameters
from commgrid.testing import run_on_ranks
from commgrid.torch_compat import world as torch_world
from tests.killing import KILLED, kill_me, run_killable
from tests.waiting import until

HALVES = {"weight": ((4,), "float32")}
LOW, HIGH = ((0,), (2,)), ((2,), (2,))


def has(step: int, own: list[Any], others: list[Any] = [], **more: Any) -> Inventory:  # noqa: B006
    """A rank's description of the halves of a weight that it has."""
    boxes = ({"weight": each} if each else {} for each in (own, others, more.pop("left", [])))
    first, second, left = boxes
    return Inventory(step, f"{step}/tag", first, second, ["step"], HALVES, left)


def test_only_what_nobody_with_a_place_has() -> None:
    told = {0: [has(3, [LOW])], 1: [has(3, [LOW])], 2: [has(3, [LOW], [HIGH])], 3: [has(3, [HIGH])]}
    high = Given(0, frozenset({("weight", *HIGH)}), frozenset())
    assert given(told, [0, 1]) == ("3/tag", {2: high})  # and rank 3, which has it too, nothing
    assert given(told, [0, 3]) == ("3/tag", {})
    assert given({0: told[0], 1: told[1]}, [0]) == ("", {})  # it would not be whole
    assert given({0: [has(3, [LOW], left=[HIGH])], 3: told[3]}, [0]) == ("3/tag", {})  # it was


def test_the_newest_state_that_is_whole() -> None:
    older, newer = has(2, [LOW, HIGH]), has(4, [LOW])
    assert given({0: [older, newer], 1: [has(4, [LOW])]}, [0]) == ("2/tag", {})
    tag, plan = given({0: [older, newer], 1: [has(4, [HIGH])]}, [0])
    assert (tag, list(plan)) == ("4/tag", [1])
    assert given({0: [], 1: [older]}, [0]) == ("", {})  # no rank with a place has it


def one_step(
    model: nn.Module, reducer: GradientReducer, optimizer: ShardedOptimizer, x: float
) -> None:
    model(torch.full((2, 64), x, dtype=torch.float64)).square().sum().backward()
    reducer.finish()
    optimizer.step()
    optimizer.zero_grad()


def build() -> tuple[nn.Module, GradientReducer, ShardedOptimizer]:
    """A layer and ZeRO-1 over dp."""
    model = nn.Linear(64, 32, bias=False, dtype=torch.float64)
    initialize_parameters(model, 1)
    reducer = GradientReducer(model, shard=True)
    return model, reducer, ShardedOptimizer(reducer, torch.optim.AdamW, lr=0.1)


def halved(folder: str | None) -> Any:
    """Four ranks, of which rank 2 goes; dp 3 does not fit, so rank 3 is left out."""
    grid = commgrid.initialize()
    assert isinstance(grid, commgrid.HyperCommGrid)
    model, reducer, optimizer = build()
    one_step(model, reducer, optimizer, 1.0)
    checkpoint.keep(1, model, optimizer, extra={"tokens": 64})
    told = gathered(Inventory.of(kept_states("default")[-1]), grid.get_group("dp"))
    assert missing(told[:2], with_others=True)  # without rank 3 the checkpoint would be needed
    assert not missing([told[0], told[1], told[3]], with_others=True)
    if grid.rank == 2:  # stands for one that is gone
        grid.abort()
        commgrid.shutdown()
        return "gone"
    rebuilt = commgrid.rebuild(ranks=[0, 1, 3], fits=lambda sizes: sizes["dp"] != 3)
    if rebuilt is None:
        return "left out"
    assert rebuilt.rebuilt is not None
    assert (tuple(rebuilt.spec.grid_ranks), rebuilt.rebuilt.spares) == ((0, 1), (3,))
    assert commgrid.get_grid() is rebuilt
    model, reducer, optimizer = build()
    found = commgrid.recover(folder, model, optimizer)
    one_step(model, reducer, optimizer, -0.3)  # its numbers depend on the optimizer's state
    weight = next(model.parameters()).detach().clone()
    commgrid.shutdown()
    return found.step, found.source, found.extra, weight


def alone() -> torch.Tensor:
    """The same steps in one process."""
    commgrid.initialize()
    model, reducer, optimizer = build()
    for x in (1.0, -0.3):
        one_step(model, reducer, optimizer, x)
    commgrid.shutdown()
    return next(model.parameters()).detach().clone()


def test_a_rank_left_out_hands_over_and_leaves() -> None:
    *others, gone, left_out = run_on_ranks(halved, 4, None, backend=None, launcher="torchrun")
    assert (gone, left_out) == ("gone", "left out")
    (reference,) = run_on_ranks(alone, 1, backend=None, launcher="torchrun")
    for step, source, extra, weight in others:
        assert (step, source, extra) == (1, "memory of ranks left out", {"tokens": 64})
        torch.testing.assert_close(weight, reference, rtol=1e-12, atol=0)


def late(folder: str | None) -> Any:
    """As `halved`; rank 3 waits for a place only when the others have ended."""
    wait, here = Membership.wait, torch_standby.Answer.HERE

    def waits_late(self: Membership, name: str, said: str) -> Any:
        Membership.wait = wait  # type: ignore[method-assign]
        until(
            lambda: torch_standby.ask(torch_world.world_store()) is not here, "WORLD's store ends"
        )
        return wait(self, name, said)

    Membership.wait = waits_late  # type: ignore[method-assign]
    return halved(folder)


def test_a_rank_left_out_that_comes_when_the_others_have_ended_leaves() -> None:
    *_, gone, left_out = run_on_ranks(late, 4, None, backend=None, launcher="torchrun")
    assert (gone, left_out) == ("gone", "left out")


def dies_while_handing_over() -> Any:
    """Rank 3, which is left out, is gone before it has handed over."""
    grid = commgrid.initialize(timeout=5)
    assert grid is not None
    model, reducer, optimizer = build()
    one_step(model, reducer, optimizer, 1.0)
    checkpoint.keep(1, model, optimizer)
    if grid.rank == 2:
        kill_me()
    grid.abort()
    if grid.rank == 3:
        recovery.given = lambda *_: kill_me()  # type: ignore[assignment, misc]
    rebuilt = commgrid.rebuild(fits=lambda sizes: sizes["dp"] != 3, grace=6)
    assert rebuilt is not None
    model, _, optimizer = build()
    with pytest.raises(CheckpointError, match="no rank that is left has all of optimizer") as told:
        commgrid.recover(None, model, optimizer)
    commgrid.shutdown()
    return str(told.value)


@pytest.mark.full
def test_one_that_dies_meanwhile_holds_nobody_up() -> None:
    """The others go on, from a checkpoint if there is one."""
    results = run_killable(dies_while_handing_over, 4)
    assert results[0] == results[1]
    assert results[2:] == [KILLED, KILLED]
