"""train_gpt --survive: ranks are killed in a step, and the others' curve is that of no failure."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import commgrid
from commgrid.testing import run_on_ranks
from tests.examples.curves import alone, curve, load, same_curve
from tests.flags import hear, tell
from tests.killing import KILLED, kill_me, run_killable

TINY = [
    "--layers", "2", "--hidden", "16", "--heads", "4", "--batch-size", "24", "--seq-len", "4",
    "--clip-grad", "1.5", "--lr", "1e-2", "--dtype", "fp64", "--steps", "16", "--log-every", "4",
]  # fmt: skip
DEEP = ["--layers", "4"]
"""A block for each of four stages."""
Deaths = dict[int, tuple[int, str]]
"""By rank, the step and the trainer's method in which it is killed."""

# By name: ranks, flags, which rank is killed when, without which ranks and from which step the
# others go on each time, what the last grid is, and where the last state came from.
Job = tuple[int, list[str], Deaths, list[str], str, str]
JOBS: dict[str, Job] = {
    "four": (
        4, ["--tp", "2"], {1: (10, "reduce")}, ["rank 1, 9"], "tp 2 on 2 ranks", "memory",
    ),
    "first": (4, [], {0: (10, "reduce")}, ["rank 0, 9"], "dp 3 on 3 ranks", "memory"),
    "pipeline": (
        4, ["--pp", "2"], {2: (10, "reduce")}, ["rank 2, 9"], "pp 2 on 2 ranks", "memory",
    ),
    "zero1": (
        4, ["--zero1"], {1: (10, "mean")}, ["rank 1, 9"], "dp 3 on 3 ranks", "neighbours' memory",
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
        5, ["--tp", "2", "--ranks", "0-3"], {0: (10, "reduce")}, ["rank 0, 9"],
        "tp 2 · dp 2 on 4 ranks", "memory",
    ),
    "twice": (
        4, ["--zero1"], {0: (6, "reduce"), 2: (13, "mean")}, ["rank 0, 3", "ranks 0, 2, 12"],
        "dp 2 on 2 ranks", "neighbours' memory",
    ),
    "left_out": (  # 5 ranks do not divide the batch; rank 5 alone has what it kept for rank 4
        6, ["--zero1", "--save-every", "5"], {4: (10, "reduce")}, ["rank 4, 5"], "dp 4 on 4 ranks",
        "checkpoint",
    ),
    "neighbours": (  # both who had a shard and who kept it
        4, ["--fsdp", "--save-every", "5"], {1: (10, "reduce"), 2: (10, "reduce")},
        ["ranks 1-2, 5"], "dp_shard 2 on 2 ranks", "checkpoint",
    ),
}  # fmt: skip
JOBS |= {
    f"{name} of eight": (
        8, ["--tp", "2"], {rank: (10, method)}, [f"rank {rank}, 9"], "tp 2 · dp 3 on 6 ranks",
        "memory",
    )
    for name, rank, method in [("first", 0, "reduce"), ("middle", 3, "mean"), ("last", 7, "reduce")]
}  # fmt: skip
JOBS["stages of eight"] = (
    8, ["--pp", "2", "--tp", "2"], {2: (10, "reduce")}, ["rank 2, 9"], "tp 2 · pp 2 on 4 ranks",
    "memory",
)  # fmt: skip


def mortal(job: list[str], deaths: Deaths) -> None:
    """Trains; a rank that is to die is killed in its step."""
    rank = int(os.environ["RANK"])
    example = load()
    commgrid.rebuild = partial(commgrid.rebuild, grace=20.0)  # of a machine with other work
    trainer = sys.modules["gpt_training.trainer"].Trainer
    steps = {"now": 0}
    if rank in deaths:
        at, method = deaths[rank]
        together = [other for other, when in deaths.items() if when == deaths[rank]]
        step, method_before = trainer.step, getattr(trainer, method)

        def counted(self: Any, number: int, batch: Any) -> Any:
            steps["now"] = number
            return step(self, number, batch)

        def killed(self: Any, *args: Any) -> Any:
            if steps["now"] == at:
                tell(f"rank {rank} is about to end")
                # A rank that had seen another one end would not come this far.
                hear(*(f"rank {other} is about to end" for other in together))
                kill_me()
            return method_before(self, *args)

        trainer.step = counted
        setattr(trainer, method, killed)
    example.train(example.parse(job))


def same_as_alone(metrics: Path, flags: list[str]) -> None:
    """Fail unless the curve is that of one process without failures."""
    model = DEEP if "--layers" in flags else []
    same_curve(curve(metrics), alone(" ".join([*TINY, *model])).rows, "fp64")


@pytest.mark.full
@pytest.mark.full("[!f]*", "first", "fsdp")
@pytest.mark.nightly("* of eight")
@pytest.mark.parametrize("name", JOBS)
def test_the_curve_of_a_run_without_failure(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    world, flags, deaths, went_on, grid, source = JOBS[name]
    metrics = tmp_path / "metrics"
    saves = ["--save", str(tmp_path / "saved")] if "--save-every" in flags else []
    job = [*TINY, *flags, *saves, "--survive", "3", "--metrics", str(metrics)]
    results = run_killable(mortal, world, job, deaths)
    said = capfd.readouterr().out
    print(said)
    assert [rank for rank, found in enumerate(results) if found == KILLED] == sorted(deaths)
    same_as_alone(metrics, flags)
    lines = [line for line in said.splitlines() if "goes on without" in line]
    assert len(lines) == len(went_on)  # one line from one rank
    for line, expected in zip(lines, went_on, strict=True):
        who, step = expected.rsplit(", ", 1)
        assert f"goes on without {who} over" in line
        assert f"the state of step {step} from" in line
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
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    metrics = tmp_path / "metrics"
    job = [*TINY, "--survive", "3", "--metrics", str(metrics)]
    run_on_ranks(raises_once, 2, job, backend=None, launcher="torchrun")
    said, wrong = capfd.readouterr()
    same_as_alone(metrics, [])
    assert "rank 1 failed in step 10, and takes part again: ValueError: no such token\n" in wrong
    assert "step    9  goes on with all ranks over dp 2 on 2 ranks (was dp 2): the state" in said
