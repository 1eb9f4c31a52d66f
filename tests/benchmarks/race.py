"""Contestants timed in turn on every rank, each repeat in another order, and weighed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from tests.memory import peak_in_use

PEAKS = 5  # how often memory is measured
Build = Callable[[], Callable[[], object]]
"""Makes a contestant; what it returns runs it once."""


def race(contestants: dict[str, Build], repeats: int, device: str) -> dict[str, list[float]]:
    """Milliseconds of each repeat; in each the order is another one, the same on all ranks."""
    with torch.device(device):
        runs = {name: build() for name, build in contestants.items()}
    spent: dict[str, list[float]] = {name: [] for name in runs}
    shuffle = random.Random(0).shuffle
    for repeat in range(repeats + 2):
        order = list(runs)
        shuffle(order)
        for name in order:
            meet()
            started = time.perf_counter()
            runs[name]()
            meet()
            if repeat >= 2:
                spent[name].append((time.perf_counter() - started) * 1e3)
    return spent


def meet() -> None:
    """Every rank has done what it was told, and so has its device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def weigh(
    contestants: dict[str, Build], device: str, forget: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """The peak of building each and running it twice, in MiB; `forget` is called before each."""
    peaks: dict[str, list[float]] = {}
    for name, build in contestants.items():

        def twice(build: Build = build) -> None:
            with torch.device(device):
                run = build()
            run()
            run()

        found = []
        for _ in range(1 + PEAKS):  # what is only made once in a process is made in the first
            forget()
            meet()
            found.append(peak_in_use(twice) / 2**20)
        peaks[name] = found[1:]
    return peaks
