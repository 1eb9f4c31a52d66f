"""train_gpt --survive over NCCL: a rank is killed in a step, and the others go on as if not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.examples.curves import curve, same_curve
from tests.examples.test_train_gpt_survive import TINY, mortal
from tests.gpu.on_gpus import nccl_variables, take_device
from tests.killing import KILLED, run_killable


def trains(job: list[str], deaths: dict[int, tuple[int, str]], rank: int) -> dict[str, Any]:
    take_device(rank)
    return mortal(job, deaths)


@pytest.mark.parametrize(
    ("flags", "victim", "world"), [([], 1, 4), (["--tp", "2", "--zero1"], 0, 4)]
)
def test_the_curve_of_a_run_without_failure_over_nccl(
    flags: list[str], victim: int, world: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for path, ranks, deaths in ((whole, 1, {}), (cut, world, {victim: (10, "reduce")})):
        more = [] if ranks == 1 else [*flags, "--survive", "3"]
        job = [*TINY, *more, "--metrics", str(path)]
        per_rank = [(rank,) for rank in range(ranks)]
        found = run_killable(
            trains, ranks, job, deaths, per_rank=per_rank, method="spawn", environ=nccl_variables
        )
        assert [rank for rank, each in enumerate(found) if each == KILLED] == [*deaths]
    said = capfd.readouterr().out
    print(said)
    same_curve(curve(cut), curve(whole), "fp64")
    assert f"goes on without rank {victim} " in said
