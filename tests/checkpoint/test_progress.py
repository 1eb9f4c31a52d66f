"""How far a save or load has got is told while it runs."""

import io
import time
from pathlib import Path

import pytest
import torch

import commgrid
from commgrid import checkpoint
from commgrid.checkpoint import agreement as progress
from commgrid.testing import run_on_ranks
from tests.checkpoint.models import made


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_come_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for stream, seconds in ((Terminal(), 0.2), (io.StringIO(), 10.0)):
        now[0] = 0.0
        line = progress.ProgressLine("saving step 3", stream)
        for _ in range(4):
            now[0] += seconds / 2
            line(1_500_000, 3_000_000)
        line.finish("saved step 3")
        told = stream.getvalue()
        assert told.count("saving step 3: 1.5 MB of this rank's 3.0 MB") == 2
        assert told.endswith(f"saved step 3 in {seconds * 2:.1f} s\n")


def counted(folder: str) -> list[list[tuple[int, int]]]:
    commgrid.initialize(dp=2)
    model = made()
    found: list[list[tuple[int, int]]] = [[], []]
    checkpoint.save(folder, 1, model, progress=lambda done, total: found[0].append((done, total)))
    checkpoint.load(folder, model, progress=lambda done, total: found[1].append((done, total)))
    commgrid.shutdown()
    return found


def test_a_callable_hears_of_its_own_ranks_bytes(tmp_path: Path) -> None:
    size = sum(tensor.nbytes for tensor in made_alone().state_dict().values())
    ranks = run_on_ranks(counted, 2, str(tmp_path), backend=None, launcher="torchrun")
    assert sum(written[-1][1] for written, _ in ranks) == size  # each number is written once
    for written, read in ranks:
        assert len({total for _, total in written}) == 1
        assert [done for done, _ in written] == sorted(done for done, _ in written)
        assert (written[0][0], read[-1]) == (0, (size, size))
        assert [done == total for done, total in written].index(True) == len(written) - 1


def made_alone() -> torch.nn.Module:
    return made(parallel=False)
