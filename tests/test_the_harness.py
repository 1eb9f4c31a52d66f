"""What a failing test of several ranks prints: the cause first, and no more than is needed."""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import commgrid
from tests.mortal import run_mortal
from tests.ranks import RanksFailed, run_on_ranks


def waits_for_the_other(rank: int) -> None:
    if rank == 1:
        raise ValueError("the cause")
    time.sleep(60)


def test_the_rank_that_failed_first_is_printed_first() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_on_ranks(waits_for_the_other, 3, per_rank=[(0,), (1,), (2,)], init=None, timeout=4)
    said = str(failed.value)
    ranks = [line.split()[2] for line in said.splitlines() if line.startswith("--- rank")]
    assert ranks == ["1", "0", "2"]
    assert "ValueError: the cause" in said
    assert said.count("in waits_for_the_other\n") == 3  # where the killed ones were
    assert said.count("in _child\n") == 3
    assert "pytest" not in said  # nor where their parent was when it forked them


@pytest.mark.parametrize("times", [1, 2])
def test_torch_gets_a_second_try_to_start(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Once, before any rank's function has failed, and it is said."""

    def barrier() -> None:
        tried = tmp_path / f"{dist.get_rank()}.{len(list(tmp_path.iterdir()))}"
        tried.touch()
        if len(list(tmp_path.iterdir())) <= times:
            raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(dist, "barrier", barrier)
    if times == 1:
        assert run_on_ranks(dist.get_rank, 1) == [0]
    else:
        with pytest.raises(RanksFailed, match="Connection reset by peer"):
            run_on_ranks(dist.get_rank, 1)
    assert (
        "torch did not start, and is started again: 1 of 1 ranks failed" in capfd.readouterr().err
    )


def test_ranks_collect_nothing_that_a_test_before_has_left() -> None:
    """A process group would wait for its threads, which a forked process does not have."""
    gc.disable()
    try:
        left: list[object] = [commgrid.initialize().get_group("dp")]
        left.append(left)
        commgrid.shutdown()
        del left
        assert run_on_ranks(collect, 1, init=None, timeout=60) == [True]
        assert run_mortal(collect, 1, timeout=60) == [True]
    finally:
        gc.enable()


def collect() -> bool:
    gc.collect()
    return True


def stay(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    time.sleep(200)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for it")
def test_nothing_is_left_of_a_rank_that_takes_too_long(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    with pytest.raises(RanksFailed):
        run_mortal(stay, 1, str(path), timeout=3)
    until = time.monotonic() + 30
    while Path(f"/proc/{path.read_text()}").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
