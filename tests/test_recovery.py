"""What ranks have in memory together: their own, their neighbours', and not of ranks left out."""

from typing import Any

import pytest
import torch
from torch import nn

import commgrid
from commgrid import CheckpointError, checkpoint
from commgrid.checkpoint.memory import Inventory, kept_states, missing
from commgrid.collectives.objects import gathered
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.rendezvous.membership import Membership
from commgrid.store import standby as torch_standby
from commgrid.tensor_parallel import initialize_parameters
from commgrid.testing import run_on_ranks
from commgrid.torch_compat import world as torch_world
from tests.waiting import until


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


def halved(folder: str) -> Any:
    """Four ranks, of which rank 2 goes; dp 3 does not fit, so rank 3 is left out."""
    grid = commgrid.initialize()
    assert isinstance(grid, commgrid.HyperCommGrid)
    model, reducer, optimizer = build()
    one_step(model, reducer, optimizer, 1.0)
    checkpoint.save(folder, 1, model, optimizer, extra={"tokens": 64}, keep_in_memory=True)
    told = gathered(Inventory.of(kept_states("default")[-1]), grid.get_group("dp"))
    assert missing(told[:2], with_others=True)  # rank 3 alone has what it kept for rank 2
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
    with pytest.raises(CheckpointError, match="no rank that is left has all of optimizer"):
        commgrid.recover(None, model, optimizer)
    found = commgrid.recover(folder, model, optimizer)
    one_step(model, reducer, optimizer, -0.3)  # its numbers depend on the optimizer's state
    weight = next(model.parameters()).detach().clone()
    commgrid.shutdown()
    return found.step, found.source, found.extra, bool(found.lost), weight


def alone() -> torch.Tensor:
    """The same steps in one process."""
    commgrid.initialize()
    model, reducer, optimizer = build()
    for x in (1.0, -0.3):
        one_step(model, reducer, optimizer, x)
    commgrid.shutdown()
    return next(model.parameters()).detach().clone()


def test_what_a_rank_left_out_has_comes_from_the_checkpoint(tmp_path: Any) -> None:
    folder = str(tmp_path)
    *others, gone, left_out = run_on_ranks(halved, 4, folder, backend=None, launcher="torchrun")
    assert (gone, left_out) == ("gone", "left out")
    (reference,) = run_on_ranks(alone, 1, backend=None, launcher="torchrun")
    for step, source, extra, lost, weight in others:
        assert (step, source, extra, lost) == (1, "checkpoint", {"tokens": 64}, True)
        torch.testing.assert_close(weight, reference, rtol=1e-12, atol=0)


def late(folder: str) -> Any:
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


def test_a_rank_left_out_that_comes_when_the_others_have_ended_leaves(tmp_path: Any) -> None:
    *_, gone, left_out = run_on_ranks(late, 4, str(tmp_path), backend=None, launcher="torchrun")
    assert (gone, left_out) == ("gone", "left out")


def kept_per_rank() -> list[list[str]]:
    """What ranks 0 and 2 lack of a state: by their own, and with what they keep for others."""
    grid = commgrid.initialize()
    assert isinstance(grid, commgrid.HyperCommGrid)
    checkpoint.keep(1, nn.Linear(4, 4), extra_per_rank={"seen": 10 + grid.rank})
    told = gathered(Inventory.of(kept_states("default")[-1]), grid.get_group("dp"))
    commgrid.shutdown()
    return [missing([told[0], told[2]], with_others=flag) for flag in (False, True)]


def test_values_of_a_rank_that_is_gone_are_its_neighbours() -> None:
    for own, with_others in run_on_ranks(kept_per_rank, 3, backend=None, launcher="torchrun"):
        assert own == ["extra_per_rank.tp=0 cp=0 dp=1 pp=0"]
        assert with_others == []
