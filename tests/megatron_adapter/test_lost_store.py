"""A group made after the store's server has ended: the error says so, and where it was."""

import os

import pytest
import torch.distributed as dist

from commgrid import PeerTimeoutError
from megatron_adapter.parallel_state.rank_groups import create_group
from tests.killing import kill_me, run_killable
from tests.waiting import until


def makes_a_group_without_the_store() -> str:
    dist.init_process_group("gloo")
    server = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.wait(["connected"])
        kill_me()  # and the store's server with it
    store.set("connected", "")

    def has_ended() -> bool:
        try:
            return not store.check(["connected"])
        except dist.DistNetworkError:
            return True

    until(has_ended, "the end of the store")
    with pytest.raises(PeerTimeoutError) as told:
        create_group([0, 1], group_desc="EXTRA")
    assert server in str(told.value)
    return str(told.value)


def test_the_store_is_named() -> None:
    _, said = run_killable(makes_a_group_without_the_store, 2)
    assert said.startswith("rank 1: group 'EXTRA' of ranks 0-1 cannot be created: the store at ")
    assert "has ended or does not answer" in said
