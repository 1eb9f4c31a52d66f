"""How many communicators Megatron's state takes: its own, and the adapter's on one grid.

    python tests/benchmarks/adapter.py --json
    python tests/benchmarks/adapter.py --worlds 8 1024

A forked process stands for one rank of a world on torch's fake backend. Counted are the calls that
create a group, the communicators of more than one rank that this rank then holds, gloo's twins
among them, and what those for the GPU would take of its memory once they are used: an estimate,
with 0.6 GB each (0.4 to 0.7 has been reported for NCCL).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).parents[2]))

import megatron_adapter
from commgrid.planning.yaml_keys import OPTIONS
from tests.benchmarks.report import Row, compare, main, run_on_ranks
from tests.peers import parallel_state as theirs

GB_EACH = 0.6
CASES: dict[int, dict[str, dict[str, Any]]] = {
    8: {
        "tp 2": {"tensor_model_parallel_size": 2},
        "tp 2 · pp 2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        "tp 2 · pp 2 · cp 2": {
            "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2,
            "context_parallel_size": 2,
        },
        "ep 4": {"expert_model_parallel_size": 4},
        "tp 2 · ep 2 · etp 1": {
            "tensor_model_parallel_size": 2, "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
    },
    64: {
        "tp 4 · pp 4 · cp 2 · ep 8 · etp 1": {
            "tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 4,
            "context_parallel_size": 2, "expert_model_parallel_size": 8,
            "expert_tensor_parallel_size": 1,
        },
        "tp 2 · pp 4 · ep 2 · etp 1, 4 optimizers": {
            "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4,
            "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1,
            "num_distributed_optimizer_instances": 4,
        },
    },
}  # fmt: skip
LARGE = {
    "tp 8 · pp 4 · cp 2 · ep 8 · etp 1": {
        "tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 4,
        "context_parallel_size": 2, "expert_model_parallel_size": 8,
        "expert_tensor_parallel_size": 1,
    }
}  # fmt: skip
CONTESTANTS = (*OPTIONS["share"].words, "megatron-core")
"""The adapter with each choice of `share=`, and Megatron itself."""


def one(world: int, case: str, contestant: str) -> tuple[int, int, int]:
    """In a process of its own: calls, communicators, and those for the GPU."""
    dist.init_process_group("fake", store=FakeStore(), rank=world // 2 + 1, world_size=world)
    given = CASES.get(world, LARGE)[case]
    create, calls, twins = c10d._new_process_group_helper, 0, set()

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        made = create(*args, **kwargs)
        if "gloo" in str(kwargs.get("group_desc")).lower():
            twins.add(made[0])
        return made

    c10d._new_process_group_helper = counted
    if contestant == "megatron-core":
        make = theirs.create_group
        # The fake backend has no gloo beside it; the twin is counted all the same.
        theirs.create_group = lambda ranks, backend=None, **more: make(ranks, **more)
        theirs.initialize_model_parallel(**given)
    else:
        megatron_adapter.initialize_model_parallel(**given, share=contestant)
    held = [g for g in c10d._world.pg_map if g is not dist.group.WORLD and g.size() > 1]
    return calls, len(held), len([group for group in held if group not in twins])


def measure(args: argparse.Namespace) -> Iterator[Row]:
    for world in args.worlds:
        for case in CASES.get(world, LARGE):
            found = {
                name: run_on_ranks(one, 1, world, case, name, backend=None, timeout=900)[0]
                for name in CONTESTANTS
            }
            calls, held, on_gpu = found["megatron-core"]
            for share in OPTIONS["share"].words:
                mine = found[share]
                where = f"{world:,} ranks: {case}, share={share}"
                peer = "megatron-core"
                yield compare(where, "creation calls", "a rank", peer, [mine[0]], [calls])
                yield compare(where, "communicators", "a rank", peer, [mine[1]], [held])
                yield compare(
                    where, "device memory, estimate", "GB a rank", peer,
                    [mine[2] * GB_EACH], [on_gpu * GB_EACH],
                )  # fmt: skip


if __name__ == "__main__":
    worlds = [8, 64, 1024, 16_384]
    main(
        __doc__, measure,
        ("--worlds", {"type": int, "nargs": "+", "default": worlds,
                      "help": "numbers of ranks (default 8 64 1024 16384)"}),
    )  # fmt: skip
