"""A step of train_gpt with its collectives recorded, and without.

    python tests/benchmarks/trace.py --json

tp 2 · pp 2 over gloo; recording is switched on and off between steps of one run, so that both see
the same machine. `call` is one all-reduce of 4 kB on two ranks.
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
from commgrid.runtime import recorder
from tests.benchmarks.report import Row, compare, main
from tests.examples.curves import load
from tests.ranks import run_on_ranks


def steps(flags: list[str]) -> dict[str, list[float]]:
    """Milliseconds of each step, by whether it was recorded; on and off in turn."""
    train_gpt = load()
    trainer_class = train_gpt.Trainer
    plain = trainer_class.step
    spent: dict[str, list[float]] = {"off": [], "on": []}

    def step(trainer: object, number: int, batch: object) -> object:
        name = "on" if number % 2 else "off"
        if name == "on":
            recorder.start()
        else:
            recorder.stop()
        dist.barrier()
        started = time.perf_counter()
        found = plain(trainer, number, batch)
        dist.barrier()
        if number > 4:
            spent[name].append((time.perf_counter() - started) * 1e3)
        return found

    trainer_class.step = step
    with contextlib.redirect_stdout(io.StringIO()):
        train_gpt.train(train_gpt.parse(flags))
    recorder.stop()
    return spent


def calls(count: int) -> dict[str, list[float]]:
    """Microseconds of an all-reduce, on and off in turn."""
    grid = commgrid.initialize()
    group, x = grid.get_group("dp"), torch.ones(1000)
    spent: dict[str, list[float]] = {"off": [], "on": []}
    for turn in range(22):
        name = "on" if turn % 2 else "off"
        if name == "on":
            recorder.start()
        started = time.perf_counter()
        for _ in range(count):
            dist.all_reduce(x, group=group)
        if turn > 1:
            spent[name].append((time.perf_counter() - started) / count * 1e6)
        recorder.stop()
    commgrid.shutdown()
    return spent


def measure(args: argparse.Namespace) -> Iterator[Row]:
    flags = ["--tp", "2", "--pp", "2", "--steps", str(args.steps), "--log-every", "1000"]
    found = run_on_ranks(steps, 4, flags, init=None, launcher="torchrun", timeout=600)
    mean = {
        name: [statistics.mean(one) for one in zip(*(r[name] for r in found), strict=True)]
        for name in ("on", "off")
    }
    yield compare("train_gpt, tp 2, pp 2", "step", "ms", "not recorded", mean["on"], mean["off"])
    found = run_on_ranks(calls, 2, 300, init=None, launcher="torchrun", timeout=600)
    yield compare(
        "all-reduce of 4 kB, 2 ranks", "call", "us", "not recorded", found[0]["on"], found[0]["off"]
    )


if __name__ == "__main__":
    main(
        __doc__, measure,
        ("--steps", {"type": int, "default": 84, "help": "of train_gpt (default 84)"}),
    )  # fmt: skip
