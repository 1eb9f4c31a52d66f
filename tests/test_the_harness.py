"""What a failing test of several ranks prints: the cause first, and no more than is needed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch.distributed as dist

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
