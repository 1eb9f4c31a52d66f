"""What an agent starts: comes up with torch or with commgrid, and dies as it is told to.

    worker.py torch|commgrid DEATHS      DEATHS: {worker: the starts that it does not survive}
    worker.py train_gpt DEATHS FLAG…     the same, killed before step 6

Each start is counted in the job's folder; the last one leaves what came of it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import commgrid
from tests.examples.curves import load

DEATH_STEP = 6


def me() -> str:
    """Which worker of which node, the same in every start, whatever rank it is."""
    return f"{os.environ['NODE']}.{os.environ['LOCAL_RANK']}"


def own_file(kind: str) -> Path:
    return Path(os.environ["COMMGRID_TEST_JOB"]) / f"{kind}-{me()}"


def count_start() -> int:
    path = own_file("starts")
    starts = int(path.read_text()) + 1 if path.exists() else 1
    path.write_text(str(starts))
    return starts


def sums(engine: str) -> Callable[[float], float]:
    """Comes up; what adds a number up over all ranks."""
    group: Any = None
    limit = float(os.environ.get("STARTUP", "20"))
    if engine == "torch":
        dist.init_process_group("gloo", timeout=timedelta(seconds=limit))
    else:
        grid = commgrid.initialize(timeout=limit, startup_timeout=limit)
        group = grid.get_group("dp")

    def total(value: float) -> float:
        numbers = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(numbers, group=group)
        return float(numbers)

    return total


def come_up(engine: str, dies: bool, start: int) -> None:
    total = sums(engine)
    world = dist.get_world_size()
    assert total(1.0) == world
    some_die = total(float(dies)) > 0
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    while some_die:  # a job at work, until it notices, or until its agent stops it
        if os.environ.get("IDLE"):
            time.sleep(0.1)
        else:
            total(1.0)
    row = {"world": world, "start": start, "rank": dist.get_rank()}
    own_file("done").write_text(json.dumps(row))
    if engine == "torch":
        dist.destroy_process_group()
    else:
        commgrid.shutdown()


def train(flags: list[str], dies: bool) -> None:
    """The example, unchanged but for the death."""
    example = load()
    draw = example.global_batch

    def draw_or_die(text: Any, step: int, args: Any) -> Any:
        if dies and step == DEATH_STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        return draw(text, step, args)

    example.global_batch = draw_or_die
    try:
        example.train(example.parse(flags))
    except commgrid.CommGridError as error:
        sys.exit(f"{type(error).__name__}: {error}")


def forked(*given: str) -> None:
    """As `main`, in a process that was forked from its agent."""
    for caught in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # by the agent
        signal.signal(caught, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(*given)


def main(*given: str) -> None:
    engine, deaths, *flags = given
    torch.set_num_threads(1)
    start = count_start()
    dies = start in json.loads(deaths).get(me(), [])
    if engine == "train_gpt":
        train(flags, dies)
    else:
        come_up(engine, dies, start)


if __name__ == "__main__":
    main(*sys.argv[1:])
