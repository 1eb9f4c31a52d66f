"""train_gpt --survive: ranks are killed in a step, and the others' curve is that of no failure."""

import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from commgrid.checkpoint import memory
from tests.examples.curves import curve, load, run, same_curve
from tests.full import full
from tests.mortal import KILLED, kill_me, run_mortal
from tests.ranks import run_on_ranks

TINY = [
    "--layers", "4", "--hidden", "16", "--heads", "4", "--batch-size", "24", "--seq-len", "4",
    "--clip-grad", "1.5", "--lr", "1e-2", "--dtype", "fp64", "--steps", "20", "--log-every", "5",
]  # fmt: skip
Deaths = dict[int, tuple[int, str]]
"""By rank, the step and the trainer's method in which it is killed."""

JOBS: dict[str, tuple[int, list[str], Deaths, str, str]] = {
    # name: ranks, flags, who is killed when, what the last grid is, where the state came from
    "four": (4, ["--tp", "2"], {1: (10, "reduce")}, "tp 2 on 2 ranks", "memory"),
    "first": (8, ["--tp", "2"], {0: (10, "reduce")}, "tp 2 · dp 3 on 6 ranks", "memory"),
    "middle": (8, ["--tp", "2"], {3: (10, "mean")}, "tp 2 · dp 3 on 6 ranks", "memory"),
    "last": (8, ["--tp", "2"], {7: (10, "reduce")}, "tp 2 · dp 3 on 6 ranks", "memory"),
    "pipeline": (
        8, ["--pp", "2", "--tp", "2"], {2: (10, "reduce")}, "tp 2 · pp 2 on 4 ranks", "memory",
    ),
    "zero1": (
        8, ["--tp", "2", "--zero1"], {5: (10, "mean")}, "tp 2 · dp 3 on 6 ranks",
        "neighbours' memory",
    ),
    "fsdp": (4, ["--fsdp"], {2: (10, "reduce")}, "dp_shard 3 on 3 ranks", "neighbours' memory"),
    "stage": (4, ["--pp", "4"], {1: (10, "reduce")}, "pp 3 on 3 ranks", "neighbours' memory"),
    "spare": (
        9, ["--tp", "2", "--ranks", "0-7"], {0: (10, "reduce")}, "tp 2 · dp 4 on 8 ranks", "memory",
    ),
    "twice": (
        8, ["--tp", "2", "--zero1"], {0: (6, "reduce"), 4: (13, "mean")}, "tp 2 · dp 3 on 6 ranks",
        "neighbours' memory",
    ),
}  # fmt: skip


def mortal(job: list[str], deaths: Deaths) -> dict[str, Any]:
    """Trains; a rank that is to die is killed in its step."""
    import os

    rank = int(os.environ["RANK"])
    example = load()
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
    return {"kept": [state.step for state in memory.kept_states()]}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    path = tmp_path_factory.mktemp("alone") / "metrics"
    job = [*TINY, "--metrics", str(path)]
    run_on_ranks(run, 1, job, init=None, launcher="torchrun")
    return curve(path)


@pytest.mark.parametrize("name", JOBS if full() else ["four"])
def test_the_curve_of_a_run_without_failure(
    name: str,
    alone: list[dict[str, float]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    world, flags, deaths, grid, source = JOBS[name]
    metrics = tmp_path / "metrics"
    job = [*TINY, *flags, "--survive", "3", "--metrics", str(metrics)]
    started = time.monotonic()
    results = run_mortal(mortal, world, job, deaths)
    said = capfd.readouterr().out
    print(said, f"\n{name}: {time.monotonic() - started:.1f} s in all")
    assert [rank for rank, found in enumerate(results) if found == KILLED] == sorted(deaths)
    same_curve(curve(metrics), alone, "fp64")
    lines = [line for line in said.splitlines() if "goes on without" in line]
    assert len(lines) == len(deaths)  # one line from one rank
    for line, (who, (step, _)) in zip(lines, deaths.items(), strict=True):
        assert f"goes on without rank {who} " in line or who in dict(list(deaths.items())[:-1])
        kept = (step - 1) // 3 * 3
        assert f"the state of step {kept} from" in line
        seconds = re.search(r"in ([\d.]+) s", line)
        assert seconds is not None
        assert float(seconds[1]) < 60  # tells a hang; it is printed
    assert f"over {grid} (was" in lines[-1]
    assert f"from {source}, in" in lines[-1]
    assert "done: " in said
