"""megatron-core's GPT, its schedule, DDP and optimizers: the same losses on commgrid's groups."""

from __future__ import annotations

import shlex
import warnings

import pytest
import torch.distributed as dist

from commgrid.testing import run_on_ranks
from tests.peers import parallel_state

pytest.importorskip("megatron.core")
from examples import megatron_gpt

CASES = {
    "--tp 2 --sequence-parallel": 2,
    "--pp 2 --vpp 2": 2,
    "--tp 2 --pp 2": 8,
    "--experts 4 --ep 2": 2,
    "--experts 4 --ep 2 --tp 2 --etp 1 --sequence-parallel": 4,
    "--tp 2 --pp 2 --distributed-optimizer": 8,
    "--experts 4 --ep 2 --tp 2 --etp 1 --sequence-parallel --distributed-optimizer": 4,
}
"""Arguments of the example, and the number of ranks."""


def two_losses(given: str) -> dict[str, list[float]]:
    """Five steps with Megatron's own groups, and with commgrid's behind its state."""
    return losses(given, ("megatron", "commgrid"))


def losses(given: str, kinds: tuple[str, ...]) -> dict[str, list[float]]:
    """The steps with each kind of groups."""
    warnings.simplefilter("ignore")  # of Megatron, which has many
    found = {}
    for groups in kinds:
        args = megatron_gpt.parse(["--groups", groups, *shlex.split(given)])
        found[groups] = megatron_gpt.train(args)
        if groups == "collection":
            assert parallel_state._DATA_PARALLEL_GROUP is None
            assert parallel_state._TENSOR_MODEL_PARALLEL_GROUP is None
        megatron_gpt.finish(args)
        for group in list(dist.distributed_c10d._world.pg_map):  # Megatron leaves its own behind
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
    return found


@pytest.mark.nightly("--experts * --sequence-parallel", "--tp 2 --pp 2", "--tp 2 --seq*")
@pytest.mark.full("--experts * --distributed-optimizer", "--tp 2 --pp 2 --distributed-optimizer")
@pytest.mark.parametrize("given", CASES)
def test_losses_are_the_same_to_the_last_bit(given: str) -> None:
    """Megatron's own groups, commgrid's behind its state, and commgrid's handed on."""
    kinds = ("megatron", "commgrid", "collection")
    steps = 3 if CASES[given] > 2 else 5
    ranks = run_on_ranks(
        losses, CASES[given], f"{given} --steps {steps}", kinds, timeout=300, check=False
    )
    for found in ranks:
        assert len(found["megatron"]) == steps
        assert found["commgrid"] == found["megatron"]
        assert found["collection"] == found["megatron"]
    assert min(ranks[-1]["megatron"]) > 3  # a rank of the last stage has losses
