"""A rank that is killed while a watched grid starts is named at once."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import commgrid
from commgrid.testing import RanksFailed, run_on_ranks
from tests.flags import hear, tell

VICTIM = 2


def starts(moment: str, folder: str, rank: int) -> None:
    commgrid.join()
    if rank == VICTIM:
        dies(moment)
    started, told = time.monotonic(), "nothing"
    try:
        commgrid.initialize(tp=2, watch=True, startup_timeout=200)
    except commgrid.CommGridError as error:
        told = f"{type(error).__name__}: {error}"
    Path(folder, f"{rank}.json").write_text(json.dumps([told, time.monotonic() - started]))
    tell(f"{rank} is through")
    if rank == 0:  # which serves the store
        hear("1 is through", "3 is through")
    os._exit(0)


def dies(moment: str) -> None:
    """Has this rank killed: once it has come to compare, or while it makes its groups."""
    from commgrid.runtime import agreement, torch_groups

    def killed(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "while agreeing":
        agreement.Meeting._await_verdict = killed  # type: ignore[method-assign]
    else:
        torch_groups.create_group = killed


@pytest.mark.parametrize("moment", ["while creating groups", "while agreeing"])
def test_a_rank_that_is_killed_while_a_grid_starts_is_named_at_once(
    moment: str, tmp_path: Path
) -> None:
    with pytest.raises(RanksFailed):  # none of them returns
        run_on_ranks(
            starts, 4, moment, str(tmp_path), per_rank=[(rank,) for rank in range(4)],
            backend=None, launcher="torchrun", timeout=400,
        )  # fmt: skip
    for rank in (0, 1, 3):
        told, seconds = json.loads((tmp_path / f"{rank}.json").read_text())
        assert told == "PeerFailedError: grid 'default': rank 2 is gone: its process has ended"
        assert seconds < 100, seconds
