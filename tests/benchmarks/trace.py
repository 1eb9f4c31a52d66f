"""A step of train_gpt with its collectives recorded, recorded and compared, and with neither.

    python tests/benchmarks/trace.py --json

tp 2 · pp 2 over gloo; they are switched on and off between steps of one run, so that all see the
same machine. `verify="order"` has records too. `processor` is what a rank's own threads take, which
other programs do not change. `call` is one all-reduce of 4 kB on two ranks; also on a group that
torch checks call by call, as `TORCH_DISTRIBUTED_DEBUG=DETAIL` has it: the peer of `verify="order"`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

import commgrid
from commgrid.recording import recorder
from commgrid.recording.order_check import OrderCheck
from commgrid.recording.recorder import Recorder
from commgrid.torch_compat import interposer as torch_calls
from tests.benchmarks.report import Row, compare, main, run_on_ranks
from tests.examples.curves import load

STATES = ("off", "trace", "order")
DETAIL = "TORCH_DISTRIBUTED_DEBUG=DETAIL"
Spent = dict[str, dict[str, list[float]]]


def switch(name: str, check: OrderCheck) -> None:
    """Have records from here on, or records and the check of order, or none."""
    recording = recorder.current()
    assert recording is not None
    torch_calls.stop(recording)
    torch_calls.stop(check)
    if name != "off":
        torch_calls.listen(recording)
    if name == "order":
        torch_calls.listen(check)


def steps(flags: list[str]) -> Spent:
    """Milliseconds of each step, by the clock and of the processor, by what was on."""
    train_gpt = load()
    trainer_class = train_gpt.Trainer
    plain = trainer_class.step
    spent: Spent = {kind: {name: [] for name in STATES} for kind in ("clock", "processor")}
    checks: list[OrderCheck] = []

    def step(trainer: object, number: int, batch: object) -> object:
        if not checks:
            checks.append(OrderCheck(commgrid.get_grid()))
        name = STATES[number % 3]
        switch(name, checks[0])
        dist.barrier()
        started, used = time.perf_counter(), time.process_time()
        found = plain(trainer, number, batch)
        dist.barrier()
        if number > 5:
            spent["clock"][name].append((time.perf_counter() - started) * 1e3)
            spent["processor"][name].append((time.process_time() - used) * 1e3)
        return found

    trainer_class.step = step
    with contextlib.redirect_stdout(io.StringIO()):
        train_gpt.train(train_gpt.parse(flags))
    return spent


def calls(count: int) -> Spent:
    """Microseconds of an all-reduce, by the clock and of the processor, by what was on."""
    grid = commgrid.initialize()
    x, check = torch.ones(1000), OrderCheck(grid)
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    checked_by_torch = dist.new_group()
    dist.set_debug_level(level)
    states = (*STATES, DETAIL)
    spent: Spent = {kind: {name: [] for name in states} for kind in ("clock", "processor")}
    for turn in range(11 * len(states)):
        name = states[turn % len(states)]
        group = checked_by_torch if name == DETAIL else grid.get_group("dp")
        switch("off" if name == DETAIL else name, check)
        dist.barrier()
        started, used = time.perf_counter(), time.process_time()
        for _ in range(count):
            dist.all_reduce(x, group=group)
        if turn >= len(states):
            spent["clock"][name].append((time.perf_counter() - started) / count * 1e6)
            spent["processor"][name].append((time.process_time() - used) / count * 1e6)
    commgrid.shutdown()
    return spent


def alone(count: int) -> Spent:
    """As `calls`, of one rank, which waits for nobody: what is added to a call."""
    grid = commgrid.initialize()
    group, x = grid.get_group("dp"), torch.ones(10)
    spent: Spent = {"processor": {name: [] for name in STATES}}
    recording = Recorder()
    for turn in range(24):
        name = STATES[turn % 2]
        (torch_calls.listen if name == "trace" else torch_calls.stop)(recording)
        used = time.process_time()
        for _ in range(count):
            dist.all_reduce(x, group=group)
        if turn > 1:
            spent["processor"][name].append((time.process_time() - used) / count * 1e6)
    torch_calls.stop(recording)
    commgrid.shutdown()
    return spent


def measure(args: argparse.Namespace) -> Iterator[Row]:
    flags = ["--tp", "2", "--pp", "2", "--steps", str(args.steps), "--log-every", "1000"]
    found = run_on_ranks(steps, 4, flags, backend=None, launcher="torchrun", timeout=600)
    for kind in ("clock", "processor"):
        mean = {
            name: [
                statistics.mean(one) for one in zip(*(r[kind][name] for r in found), strict=True)
            ]
            for name in STATES
        }
        least = min(len(each) for each in mean.values())
        for name in STATES[1:]:
            yield compare(
                f"{name}: step of train_gpt, tp 2, pp 2", kind, "ms", "neither",
                mean[name][:least], mean["off"][:least],
            )  # fmt: skip
    found = run_on_ranks(alone, 1, 2000, backend=None, launcher="torchrun", timeout=600)
    mine, off = (found[0]["processor"][name] for name in ("trace", "off"))
    yield compare("trace: all-reduce of one rank", "processor", "us", "neither", mine, off)
    found = run_on_ranks(calls, 2, 300, backend=None, launcher="torchrun", timeout=600)
    for kind in ("clock", "processor"):
        for name in STATES[1:]:
            mine, off = found[0][kind][name], found[0][kind]["off"]
            yield compare(f"{name}: all-reduce of 4 kB, 2 ranks", kind, "us", "neither", mine, off)
        mine, theirs = found[0][kind]["order"], found[0][kind][DETAIL]
        yield compare("order: all-reduce of 4 kB, 2 ranks", kind, "us", DETAIL, mine, theirs)


if __name__ == "__main__":
    main(
        __doc__, measure,
        ("--steps", {"type": int, "default": 126, "help": "of train_gpt (default 126)"}),
    )  # fmt: skip
