"""What an agent starts: comes up with torch or with commgrid, and dies as it is told to.

    worker.py torch|commgrid DEATHS      DEATHS: {worker: the starts that it does not survive}
    worker.py train_gpt DEATHS FLAG…     the same, killed before step 6
    worker.py faulty FAULTS FLAG…        train_gpt; FAULTS: {worker: {step: what happens in it}}

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
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import commgrid
from tests.engines.agents import MARK, processes_of
from tests.examples.curves import load

DEATH_STEP = "6"


def me() -> str:
    """Which worker of which node, the same in every start, whatever rank it is."""
    return f"{os.environ['NODE']}.{os.environ['LOCAL_RANK']}"


def own_file(kind: str) -> Path:
    return Path(os.environ[MARK]) / f"{kind}-{me()}"


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
            time.sleep(0.1)  # idle, so that it notices nothing
        else:
            total(1.0)
    row = {"world": world, "start": start, "rank": dist.get_rank()}
    own_file("done").write_text(json.dumps(row))
    if engine == "torch":
        dist.destroy_process_group()
    else:
        commgrid.shutdown()


def fail(fault: str, step: int) -> None:
    """What happens to this worker in a step: once in a job, however often that is taken.

    Args:
        fault: `kill`; `host`, its agent and all of the agent's workers; `stop`, until somebody
            wakes it; `raise`; or `raise always`, in each attempt of its first start.
        step: for the file that says when it was.
    """
    happened = own_file(f"failed-{step}")
    if happened.exists() and (fault != "raise always" or own_file("starts").read_text() != "1"):
        return
    happened.write_text(json.dumps({"pid": os.getpid()}))
    if fault.startswith("raise"):
        raise ValueError("no such token")
    if fault == "host":
        for pid in processes_of(os.environ[MARK], os.environ["NODE"]):
            if pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGSTOP if fault == "stop" else signal.SIGKILL)


def train(flags: list[str], faults: dict[str, str]) -> None:
    """The example, unchanged but for what happens in some steps."""
    example = load()
    draw = example.global_batch

    def draw_or_fail(text: Any, step: int, args: Any) -> Any:
        if fault := faults.get(f"{step}"):
            fail(fault, step)
        return draw(text, step, args)

    example.global_batch = draw_or_fail
    commgrid.rebuild = partial(commgrid.rebuild, grace=8.0)  # of a machine with other work
    try:
        example.train(example.parse(flags))
    except commgrid.CommGridError as error:
        sys.exit(f"{type(error).__name__}: {error}")


def main(*given: str) -> None:
    engine, deaths, *flags = given
    torch.set_num_threads(1)
    start = count_start()
    own = json.loads(deaths).get(me(), [])
    if engine == "faulty":
        train(flags, own or {})
    elif engine == "train_gpt":
        train(flags, {DEATH_STEP: "kill"} if start in own else {})
    else:
        come_up(engine, start in own, start)


if __name__ == "__main__":
    main(*sys.argv[1:])
