"""States in memory: who keeps what, what it takes, and what is left when ranks are gone."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commgrid
from commgrid import CheckpointError, checkpoint
from commgrid.checkpoint.memory import Inventory, kept_states, missing
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.resharding import transport
from commgrid.tensor_parallel import ColumnParallelLinear, initialize_parameters
from commgrid.testing import run_on_ranks
from tests.waiting import comes, until_waits


def trained(tp: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A layer over tp, one step of ZeRO-1 old."""
    model = ColumnParallelLinear(8, 16, bias=False) if tp > 1 else nn.Linear(8, 16, bias=False)
    initialize_parameters(model, 1)
    reducer = GradientReducer(model, shard=True)
    optimizer = ShardedOptimizer(reducer, torch.optim.AdamW, lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    reducer.finish()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def kept_over_hosts() -> dict[str, Any]:
    """Two hosts of two ranks, tp 2 · dp 2: dp goes over hosts, and so do neighbours."""
    rank = int(os.environ["RANK"])
    os.environ["COMMGRID_HOST"] = f"host {rank // 2}"
    commgrid.initialize(tp=2)
    model, optimizer = trained(2)
    for step in (1, 2, 3):
        checkpoint.keep(step, model, optimizer, extra={"step": step})
    states = kept_states("default")
    inventory = Inventory.of(states[-1])
    all_told = [each for each in commgrid_gathered(inventory) if each.tag == inventory.tag]
    found = {
        "steps": [state.step for state in states],
        "own": sum(c.data.nbytes for i in states[-1].own for c in i.chunks),
        "others": sum(c.data.nbytes for i in states[-1].others for c in i.chunks),
        "weights kept for others": [i.key for i in states[-1].others if i.path[0] == "model"],
        "whole": missing(all_told, with_others=False),
        "host 1 alone": missing(all_told[2:], with_others=True),
        "host 1 without neighbours": len(missing(all_told[2:], with_others=False)),
    }
    weight = next(model.parameters()).detach().clone()
    with torch.no_grad():
        next(model.parameters()).zero_()
    restored = commgrid.recover(None, model, optimizer)
    assert torch.equal(next(model.parameters()), weight)
    assert (restored.step, restored.source, restored.extra) == (3, "memory", {"step": 3})
    checkpoint.forget(after=2)
    assert [state.step for state in kept_states("default")] == [2]
    checkpoint.forget()
    try:
        commgrid.recover(None, model, optimizer)
    except CheckpointError as error:
        found["nothing"] = str(error)
    commgrid.shutdown()
    return found


def keeps_beside_a_slow_rank() -> bool:
    """Whether rank 1 has returned while rank 0 has not yet got the boxes that it keeps for it."""
    grid = commgrid.initialize()
    model, optimizer = trained(1)
    store, early = dist.distributed_c10d._get_default_store(), False
    finish = transport.Carrier._finish

    def slowly(carrier: transport.Carrier, *message: Any) -> None:
        nonlocal early
        until_waits("rank 1")
        early = early or store.check(["rank 1 has returned"])
        finish(carrier, *message)

    if grid.rank == 0:
        transport.Carrier._finish = slowly  # type: ignore[method-assign]
    else:
        comes("rank 1")
    checkpoint.keep(1, model, optimizer)
    if grid.rank == 1:
        store.set("rank 1 has returned", "")
        store.wait(["rank 0 has returned"])
    else:
        store.set("rank 0 has returned", "")
    commgrid.shutdown()
    return early


def test_a_rank_returns_when_all_have_what_they_keep() -> None:
    """One that failed next ended the others' last messages, and they went on from a step before."""
    found = run_on_ranks(keeps_beside_a_slow_rank, 2, backend=None, launcher="torchrun")
    assert found == [False, False]


def commgrid_gathered(value: Any) -> list[Any]:
    from commgrid.collectives.objects import gathered

    return gathered(value, commgrid.get_group("dp_tp"))


def test_what_is_alone_on_a_host_is_on_another_too() -> None:
    everyone = run_on_ranks(kept_over_hosts, 4, backend=None, launcher="torchrun", check=False)
    # 64 weights on each; of the state, which ZeRO-1 has on one rank of dp, exp_avg and exp_avg_sq,
    # and once more on the other host. Adam's step is one number for both slices of the weight.
    state = 2 * (2 * 64 * 4)
    assert sum(found["own"] for found in everyone) == 4 * 64 * 4 + state + 2 * 4
    assert sum(found["others"] for found in everyone) == state + 4
    for found in everyone:
        assert found["steps"] == [2, 3]
        assert found["weights kept for others"] == []  # both hosts have them
        assert found["whole"] == found["host 1 alone"] == []
        assert found["host 1 without neighbours"] > 0
        assert (
            "no rank has a state in memory of grid 'default' (checkpoint.keep keeps some)"
            in found["nothing"]
        )
        assert "no folder of checkpoints was given; start again" in found["nothing"]


def test_a_newer_checkpoint_goes_first(tmp_path: Path) -> None:
    commgrid.initialize()
    model = nn.Linear(2, 1)
    checkpoint.keep(5, model, extra={"from": "memory"})
    checkpoint.save(tmp_path, 7, model, extra={"from": "disk"}, progress=False)
    found = commgrid.recover(tmp_path, model, progress=False)
    assert (found.step, found.source, found.extra) == (7, "checkpoint", {"from": "disk"})
    checkpoint.save(tmp_path, 8, model, keep_in_memory=True, progress=False)
    assert commgrid.recover(tmp_path, model, progress=False).source == "memory"
    checkpoint.forget()
    commgrid.shutdown()


def test_a_state_of_another_model_is_refused() -> None:
    commgrid.initialize()
    checkpoint.keep(5, nn.Linear(2, 1))
    with pytest.raises(
        CheckpointError, match=r"of another model, whose shapes differ: model.weigh"
    ):
        commgrid.recover(None, nn.Linear(3, 1))
    checkpoint.forget()
    commgrid.shutdown()


def test_the_next_job_of_a_process_finds_nothing(tmp_path: Path) -> None:
    """Its model may have the same names and shapes, and be another one."""
    commgrid.initialize()
    checkpoint.keep(20, nn.Linear(2, 1))
    commgrid.shutdown()
    commgrid.initialize()
    with pytest.raises(CheckpointError):
        commgrid.recover(tmp_path, nn.Linear(2, 1), progress=False)
    commgrid.shutdown()


def kept_twice() -> list[float]:
    """A step that was trained once more, from an earlier one."""
    commgrid.initialize()
    model, restored = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    for step, number in ((1, 1.0), (2, 2.0), (1, 3.0), (2, 4.0)):
        nn.init.constant_(model.weight, number)
        checkpoint.keep(step, model)
    kept = [state.step for state in kept_states("default")]
    commgrid.recover(None, restored)
    commgrid.shutdown()
    return [*kept, restored.weight.item()]


def test_of_two_states_of_one_step_the_last_one_counts() -> None:
    """Recovery took the first of them."""
    assert run_on_ranks(kept_twice, 2) == [[1, 2, 4.0]] * 2
