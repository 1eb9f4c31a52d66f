"""What a look-up costs: a grid's, Megatron-core's and DeviceMesh's, on one rank of a fake world.

python tests/benchmarks/lookup.py --json
"""

from __future__ import annotations

import argparse
import sys
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).parents[2]))

import commgrid
from tests.benchmarks.report import Row, compare, main
from tests.peers import parallel_state as mpu

REPEATS, CALLS = 9, 20_000


def nanoseconds(calls: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Each call's cost, repeats interleaved; what an empty lambda costs is taken off.

    A repeat is the best of five runs: what a shared machine adds comes in bursts.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPEATS):
        empty = min(timeit.repeat(lambda: None, number=CALLS, repeat=5)) / CALLS
        for name, call in calls.items():
            number = CALLS if "slice" not in name else CALLS // 1000
            spent = min(timeit.repeat(call, number=number, repeat=5)) / number
            found[name].append(max(spent - empty, 1e-9) * 1e9)
    return found


def measure(args: argparse.Namespace) -> Iterator[Row]:
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=64)
    mesh = init_device_mesh("cpu", (4, 2, 2, 4), mesh_dim_names=("pp", "dp", "cp", "tp"))
    mpu.initialize_model_parallel(4, 4, context_parallel_size=2, create_gloo_process_groups=False)
    grid = commgrid.initialize(tp=4, pp=4, cp=2)
    get_group = commgrid.get_group
    spent = nanoseconds({
        "commgrid.get_group": lambda: get_group("tp"),
        "grid.get_group": lambda: grid.get_group("dp_cp"),
        "grid.get_local_rank": lambda: grid.get_local_rank("tp"),
        "grid.next_rank": lambda: grid.next_rank("pp"),
        "mpu group": lambda: mpu.get_tensor_model_parallel_group(),
        "mpu dp_cp": lambda: mpu.get_data_parallel_group(with_context_parallel=True),
        "mpu rank": lambda: mpu.get_tensor_model_parallel_rank(),
        "mpu next": lambda: mpu.get_pipeline_model_parallel_next_rank(),
        "mesh group": lambda: mesh.get_group("tp"),
        "mesh local rank": lambda: mesh.get_local_rank("tp"),
        "mesh slice": lambda: mesh["dp", "tp"],
    })  # fmt: skip
    for ours, peer, theirs in (
        ("commgrid.get_group", "megatron-core", "mpu group"),
        ("commgrid.get_group", "DeviceMesh", "mesh group"),
        ("grid.get_group", "megatron-core", "mpu dp_cp"),
        ("grid.get_group", "DeviceMesh", "mesh group"),
        ("grid.get_local_rank", "megatron-core", "mpu rank"),
        ("grid.get_local_rank", "DeviceMesh", "mesh local rank"),
        ("grid.next_rank", "megatron-core", "mpu next"),
        ("grid.get_group", "DeviceMesh slicing", "mesh slice"),
    ):
        yield compare("64 ranks, fake", ours, "ns", peer, spent[ours], spent[theirs])


if __name__ == "__main__":
    main(__doc__, measure)
