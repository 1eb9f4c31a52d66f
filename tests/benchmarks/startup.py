"""The cost of a start: a grid, Megatron-core's parallel state and DeviceMesh, in the same run.

    python tests/benchmarks/startup.py --json                 # everything, some minutes
    python tests/benchmarks/startup.py --worlds 64 1024 --ranks 8
    python tests/benchmarks/startup.py --worlds --ranks       # commands alone

First on the fake backend, one process standing for one rank of 64 to 131,072 (tp 8, pp 4,
cp 2, ep 8, etp 1): calls that create a group, distinct communicators, and seconds to plan
and create. Then on real gloo ranks: wall time, open files and threads a rank. Each is
measured for all of our names, and for just the names that the peer creates. Before them, how
long commands take beside Python's own start.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).parents[2]))
# As the tests: a store's server looks up the name of whoever connects, and may wait 5 s for it.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import commgrid
from commgrid import GridSpec, GroupPlan
from megatron_adapter import MegatronSizes
from tests.benchmarks.report import Row, compare, main, run_on_ranks
from tests.peers import parallel_state as mpu

FAKE = {"tp": 8, "pp": 4, "cp": 2, "ep": 8, "etp": 1}
GLOO = {
    8: {"tp": 2, "pp": 2, "cp": 1, "ep": 2, "etp": 1},
    16: {"tp": 2, "pp": 2, "cp": 2, "ep": 2, "etp": 1},
    32: {"tp": 2, "pp": 2, "cp": 2, "ep": 4, "etp": 1},
}
MEGATRON_LIMIT = 16_384  # its loops over every group of the world take minutes beyond
MESH_LIMIT = 131_072
DIMS = ("pp", "dp", "cp", "tp")
MESH_NAMES = [
    "_".join(axes) for count in (1, 2, 3, 4) for axes in itertools.combinations(DIMS, count)
]


# -- what is started --------------------------------------------------------------------


def start_all(sizes: dict[str, int]) -> None:
    commgrid.initialize(**sizes, connect="none")  # type: ignore[arg-type]


def start_megatrons(sizes: dict[str, int]) -> None:
    asked = MegatronSizes(dist.get_world_size(), **sizes, gloo=False)  # type: ignore[arg-type]
    commgrid.initialize(config=asked.spec(connect="none"))


def start_meshs(sizes: dict[str, int]) -> None:
    dense = {axis: size for axis, size in sizes.items() if axis in DIMS}
    commgrid.initialize(**dense, create=MESH_NAMES, connect="none")


def start_connected(sizes: dict[str, int]) -> None:
    commgrid.initialize(**sizes)  # type: ignore[arg-type]


def megatron(sizes: dict[str, int]) -> None:
    mpu.initialize_model_parallel(
        sizes["tp"], sizes["pp"], context_parallel_size=sizes["cp"],
        expert_model_parallel_size=sizes["ep"], expert_tensor_parallel_size=sizes["etp"],
        create_gloo_process_groups=False,
    )  # fmt: skip


def device_mesh(sizes: dict[str, int]) -> None:
    world = dist.get_world_size()
    dp = world // (sizes["tp"] * sizes["pp"] * sizes["cp"])
    mesh = init_device_mesh("cpu", (sizes["pp"], dp, sizes["cp"], sizes["tp"]), mesh_dim_names=DIMS)
    for name in MESH_NAMES:
        axes = tuple(name.split("_"))
        if len(axes) > 1:
            mesh[axes]._flatten(name)


STARTS: dict[str, Callable[[dict[str, int]], None]] = {
    "all": start_all,
    "megatron's names": start_megatrons,
    "DeviceMesh's names": start_meshs,
    "all, axes connected": start_connected,
    "megatron-core": megatron,
    "DeviceMesh": device_mesh,
}


def counting(sizes: dict[str, int], start: str) -> tuple[int, int, float]:
    """Calls that create a group, groups that exist afterwards, and seconds."""
    create, calls = c10d._new_process_group_helper, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return create(*args, **kwargs)

    c10d._new_process_group_helper = counted
    before = len(c10d._world.pg_map)
    started = time.perf_counter()
    STARTS[start](sizes)
    seconds = time.perf_counter() - started
    c10d._new_process_group_helper = create
    return calls, len(c10d._world.pg_map) - before, seconds


# -- one rank of a fake world -----------------------------------------------------------


def fake(world: int, start: str) -> None:
    """Runs in a process of its own: prints calls, communicators and seconds."""
    dist.init_process_group("fake", store=FakeStore(), rank=world // 2 + 1, world_size=world)
    commgrid.initialize  # noqa: B018 -- the import is not what is timed
    print(*counting(FAKE, start))


def fake_in_process(world: int, start: str) -> tuple[int, int, float]:
    done = subprocess.run(
        [sys.executable, __file__, "--one", str(world), start],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    calls, made, seconds = done.stdout.split()
    return int(calls), int(made), float(seconds)


def fake_rows(world: int, repeats: int) -> Iterator[Row]:
    case = f"fake, {world:,} ranks"
    can = {
        "megatron-core": world <= MEGATRON_LIMIT, "DeviceMesh": world <= MESH_LIMIT,
    }  # fmt: skip
    names = [name for name in STARTS if name != "all, axes connected" and can.get(name, True)]
    found: dict[str, list[tuple[int, int, float]]] = {name: [] for name in names}
    for _ in range(repeats if world < MEGATRON_LIMIT else 1):
        for name in names:
            found[name].append(fake_in_process(world, name))
    for ours, peer in (
        ("all", "megatron-core"), ("megatron's names", "megatron-core"),
        ("all", "DeviceMesh"), ("DeviceMesh's names", "DeviceMesh"),
    ):  # fmt: skip
        theirs = found.get(peer, [])
        for index, metric, unit in (
            (0, "creation calls", "calls"), (1, "communicators", "groups"), (2, "time", "s"),
        ):  # fmt: skip
            column, other = ([row[index] for row in rows] for rows in (found[ours], theirs))
            yield compare(case, f"{metric}, {ours}", unit, peer, column, other)


# -- real ranks -------------------------------------------------------------------------


def real(sizes: dict[str, int], start: str) -> tuple[int, int, float]:
    """Open files, threads and seconds that starting adds on this rank."""
    dist.init_process_group("gloo")  # over TCP, as a launcher has it
    dist.barrier()

    def usage() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    files, threads = usage()
    started = time.perf_counter()
    STARTS[start](sizes)
    seconds = time.perf_counter() - started
    dist.barrier()
    time.sleep(1.0)  # a thread that asked the store is there for half a second more
    more_files, more_threads = usage()
    dist.barrier()
    dist.destroy_process_group()
    return more_files - files, more_threads - threads, seconds


def real_rows(world: int, repeats: int) -> Iterator[Row]:
    case = f"gloo, {world} ranks"
    commgrid.initialize  # noqa: B018 -- imported before ranks are forked, as the peers are
    found: dict[str, list[tuple[int, int, float]]] = {name: [] for name in STARTS}
    for _ in range(repeats):
        for name in STARTS:
            ranks = run_on_ranks(
                real, world, GLOO[world], name, backend=None, launcher="torchrun", timeout=300
            )
            found[name].append(tuple(max(column) for column in zip(*ranks, strict=True)))  # type: ignore[arg-type]
    for ours, peer in (
        ("all", "megatron-core"), ("megatron's names", "megatron-core"),
        ("all, axes connected", "megatron-core"),
        ("all", "DeviceMesh"), ("DeviceMesh's names", "DeviceMesh"),
    ):  # fmt: skip
        for index, metric, unit in (
            (2, "wall time", "s"), (0, "open files", "files"), (1, "threads", "threads"),
        ):  # fmt: skip
            column, other = ([row[index] for row in rows] for rows in (found[ours], found[peer]))
            yield compare(case, f"{metric}, {ours}", unit, peer, column, other)


# -- a plan alone -----------------------------------------------------------------------


def plan_rows() -> Iterator[Row]:
    def plan() -> None:
        spec = GridSpec.build(**FAKE).resolve(2**20)
        assert len(GroupPlan.for_rank(spec, 777_777).communicators) == 29

    plan()
    seconds = []
    for _ in range(9):
        started = time.perf_counter()
        plan()
        seconds.append((time.perf_counter() - started) * 1e3)
    tracemalloc.start()
    plan()
    peak = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    yield compare("plan, 1,048,576 ranks", "time", "ms", "(no peer)", seconds, [])
    yield compare("plan, 1,048,576 ranks", "memory", "MB", "(no peer)", [peak], [])


COMMANDS = {
    "commgrid --help": ["--help"],
    "commgrid plan --tp 8 --world-size 64": ["plan", "--tp", "8", "--world-size", "64"],
    "commgrid plan … --cluster h100": ["plan", "--tp", "8", "--world-size", "64", "--cluster",
                                       "h100"],
}  # fmt: skip


def command_rows(repeats: int) -> Iterator[Row]:
    """Commands beside Python's own start, all from compiled files as an installed package has."""
    with tempfile.TemporaryDirectory() as compiled:
        environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environ["PYTHONPYCACHEPREFIX"] = compiled

        def seconds(*argv: str) -> float:
            started = time.perf_counter()
            subprocess.run(
                [sys.executable, *argv], stdout=subprocess.DEVNULL, check=True, env=environ
            )
            return (time.perf_counter() - started) * 1e3

        for case, argv in COMMANDS.items():
            seconds("-m", "commgrid", *argv)  # which compiles
            pairs = [
                (seconds("-m", "commgrid", *argv), seconds("-c", "pass")) for _ in range(repeats)
            ]
            ours, own = map(list, zip(*pairs, strict=True))
            yield compare(case, "time", "ms", "python -c pass", ours, own)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    yield from command_rows(args.commands)
    yield from plan_rows()
    for world in args.worlds:
        yield from fake_rows(world, args.repeats)
    for world in args.ranks:
        yield from real_rows(world, args.repeats)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        fake(int(sys.argv[2]), sys.argv[3])
    else:
        main(
            __doc__, measure,
            ("--worlds", {"type": int, "nargs": "*", "default": [64, 1024, 16_384, 131_072],
                          "help": "sizes of the fake world"}),
            ("--ranks", {"type": int, "nargs": "*", "default": [8, 16, 32], "choices": list(GLOO),
                         "help": "numbers of gloo ranks"}),
            ("--commands", {"type": int, "default": 25,
                            "help": "repeats of each command (default 25)"}),
            ("--repeats", {"type": int, "default": 3, "help": "of each case (default 3)"}),
        )  # fmt: skip
