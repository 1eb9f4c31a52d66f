"""train_gpt --survive: ranks are killed in a step, and the others' curve is that of no failure."""

import os
import re
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import commgrid
from commgrid.testing import run_on_ranks
from tests.examples.curves import curve, load, run, same_curve
from tests.killing import KILLED, kill_me, run_killable
from tests.sizes import full

TINY = [
    "--layers", "2", "--hidden", "16", "--heads", "4", "--batch-size", "24", "--seq-len", "4",
    "--clip-grad", "1.5", "--lr", "1e-2", "--dtype", "fp64", "--steps", "16", "--log-every", "4",
]  # fmt: skip
DEEP = ["--layers", "4"]
"""A block for each of four stages."""
Deaths = dict[int, tuple[int, str]]
"""By rank, the step and the trainer's method in which it is killed."""

JOBS: dict[str, tuple[int, list[str], Deaths, list[str], str, str]] = {
    # name: ranks, flags, who is killed when, without whom and from where the others go on each
    # time, what the last grid is, and where the last state came from
    "four": (
        4, ["--tp", "2"], {1: (10, "reduce")}, ["rank 1, 9"], "tp 2 on 2 ranks", "memory",
    ),
    "first": (
        8, ["--tp", "2"], {0: (10, "reduce")}, ["rank 0, 9"], "tp 2 · dp 3 on 6 ranks", "memory",
    ),
    "middle": (
        8, ["--tp", "2"], {3: (10, "mean")}, ["rank 3, 9"], "tp 2 · dp 3 on 6 ranks", "memory",
    ),
    "last": (
        8, ["--tp", "2"], {7: (10, "reduce")}, ["rank 7, 9"], "tp 2 · dp 3 on 6 ranks", "memory",
    ),
    "pipeline": (
        8, ["--pp", "2", "--tp", "2"], {2: (10, "reduce")}, ["rank 2, 9"],
        "tp 2 · pp 2 on 4 ranks", "memory",
    ),
    "zero1": (
        8, ["--tp", "2", "--zero1"], {5: (10, "mean")}, ["rank 5, 9"], "tp 2 · dp 3 on 6 ranks",
        "neighbours' memory",
    ),
    "fsdp": (
        4, ["--fsdp"], {2: (10, "reduce")}, ["rank 2, 9"], "dp_shard 3 on 3 ranks",
        "neighbours' memory",
    ),
    "stage": (
        4, ["--pp", "4", *DEEP], {1: (10, "reduce")}, ["rank 1, 9"], "pp 3 on 3 ranks",
        "neighbours' memory",
    ),
    "spare": (
        9, ["--tp", "2", "--ranks", "0-7"], {0: (10, "reduce")}, ["rank 0, 9"],
        "tp 2 · dp 4 on 8 ranks", "memory",
    ),
    "twice": (
        8, ["--tp", "2", "--zero1"], {0: (6, "reduce"), 4: (13, "mean")},
        ["rank 0, 3", "ranks 0, 4, 12"], "tp 2 · dp 3 on 6 ranks", "neighbours' memory",
    ),
    "left_out": (  # 7 ranks do not divide the batch; rank 7 has what it kept for rank 6
        8, ["--zero1"], {6: (10, "reduce")}, ["rank 6, 9"], "dp 6 on 6 ranks",
        "memory of ranks left out",
    ),
    "neighbours": (  # both who had a shard and who kept it
        4, ["--fsdp", "--save-every", "5"], {1: (10, "reduce"), 2: (10, "reduce")},
        ["ranks 1-2, 5"], "dp_shard 2 on 2 ranks", "checkpoint",
    ),
}  # fmt: skip


def mortal(job: list[str], deaths: Deaths) -> None:
    """Trains; a rank that is to die is killed in its step."""
    rank = int(os.environ["RANK"])
    example = load()
    commgrid.rebuild = partial(commgrid.rebuild, grace=20.0)  # of a machine with other work
    trainer = sys.modules["gpt_trainer"].Trainer
    steps = {"now": 0}
    if rank in deaths:
        at, method = deaths[rank]
        step, method_before = trainer.step, getattr(trainer, method)

        def counted(self: Any, number: int, batch: Any) -> Any:
            steps["now"] = number
            return step(self, number, batch)

        def killed(self: Any, *args: Any) -> Any:
            if steps["now"] == at:
                kill_me()
            return method_before(self, *args)

        trainer.step = counted
        setattr(trainer, method, killed)
    example.train(example.parse(job))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, list[dict[str, float]]]:
    """One process that nobody kills, by whether the model is the deep one."""
    paths = {deep: tmp_path_factory.mktemp("alone") / "metrics" for deep in (False, True)}
    jobs = [[*TINY, *deep * DEEP, "--metrics", str(path)] for deep, path in paths.items()]
    run_on_ranks(run, 1, *jobs, backend=None, launcher="torchrun")
    return {deep: curve(path) for deep, path in paths.items()}


@pytest.mark.parametrize("name", JOBS if full() else ["four"])
def test_the_curve_of_a_run_without_failure(
    name: str,
    alone: dict[bool, list[dict[str, float]]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    world, flags, deaths, went_on, grid, source = JOBS[name]
    metrics = tmp_path / "metrics"
    saves = ["--save", str(tmp_path / "saved")] if "--save-every" in flags else []
    job = [*TINY, *flags, *saves, "--survive", "3", "--metrics", str(metrics)]
    started = time.monotonic()
    results = run_killable(mortal, world, job, deaths)
    said = capfd.readouterr().out
    print(said, f"\n{name}: {time.monotonic() - started:.1f} s in all")
    assert [rank for rank, found in enumerate(results) if found == KILLED] == sorted(deaths)
    same_curve(curve(metrics), alone["--layers" in flags], "fp64")
    lines = [line for line in said.splitlines() if "goes on without" in line]
    assert len(lines) == len(went_on)  # one line from one rank
    for line, expected in zip(lines, went_on, strict=True):
        who, step = expected.rsplit(", ", 1)
        assert f"goes on without {who} over" in line
        assert f"the state of step {step} from" in line
        seconds = re.search(r"in ([\d.]+) s", line)
        assert seconds is not None
        assert float(seconds[1]) < 60  # tells a hang; it is printed
    assert f"over {grid} (was" in lines[-1]
    assert f"from {source}, in" in lines[-1]
    assert "done: " in said


def raises_once(job: list[str]) -> None:
    """Trains; in step 10 of rank 1 an error is raised that does not come again."""
    example = load()
    draw, raised = example.global_batch, []

    def fail(text: Any, step: int, args: Any) -> Any:
        if step == 10 and os.environ["RANK"] == "1" and not raised:
            raised.append(step)
            raise ValueError("no such token")
        return draw(text, step, args)

    example.global_batch = fail
    commgrid.rebuild = partial(commgrid.rebuild, grace=30.0)  # until all have come
    example.train(example.parse(job))


def test_a_rank_that_raises_takes_part_again(
    alone: dict[bool, list[dict[str, float]]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    metrics = tmp_path / "metrics"
    job = [*TINY, "--survive", "3", "--metrics", str(metrics)]
    run_on_ranks(raises_once, 2, job, backend=None, launcher="torchrun")
    said, wrong = capfd.readouterr()
    same_curve(curve(metrics), alone[False], "fp64")
    assert "rank 1 failed in step 10, and takes part again: ValueError: no such token\n" in wrong
    assert "step    9  goes on with all ranks over dp 2 on 2 ranks (was dp 2): the state" in said
