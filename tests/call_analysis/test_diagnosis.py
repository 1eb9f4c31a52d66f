"""Records of all ranks, commgrid's and torch's, read and judged."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid import SpecError
from commgrid.call_analysis import diagnosis
from commgrid.cli import main
from commgrid.testing import run_on_ranks


def saved(folder: Path, rank: int, *calls: list[Any], **rest: Any) -> None:
    """Records made by hand, which were written at 40 s; times in seconds, the turn left out."""
    rows = [[*call[:8], *(None if t is None else int(t * 1e9) for t in call[8:])] for call in calls]
    members = {"dp_cp": [1, 5, 9, 13], "pp": [4, 5, 6, 7]}
    found = {
        "format": 1, "rank": rank, "wall": 40.0, "monotonic": int(40e9), "dropped": 0,
        "members": {name: ranks for name, ranks in members.items() if rank in ranks},
        "calls": rows, **rest,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / f"rank_{rank:05}.json").write_text(json.dumps(found))


def reduced(number: int, began: float, ended: float | None, where: str = "a.py:9 f") -> list[Any]:
    return ["dp_cp", number, "all_reduce", [4], "float32", 16, None, where, began, began, ended]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ranks 1, 9 and 13 have waited for 31 s; rank 5 was in a pipeline before."""
    for rank in (1, 9, 13):
        saved(tmp_path, rank, reduced(0, 1, 2), reduced(1, 9, None))
    sent = ["pp", 0, "send", [4], "float32", 16, 2, "model.py:212 forward", 3, 3, 4]
    saved(tmp_path, 5, reduced(0, 1, 2), sent)
    return tmp_path


def test_the_command_says_who_and_where(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(folder)]) == 1
    assert " ".join(capsys.readouterr().out.split()) == (
        "rank 5 has not entered dp_cp all_reduce 1, for which ranks 1, 9, 13 have waited 31 s at "
        "a.py:9 f; its last call was pp send 0 at model.py:212 forward"
    )
    assert main(["diagnose", str(folder), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    cause = found["causes"][0]
    assert (cause["kind"], cause["ranks"], cause["group"]) == ("not entered", [5], "dp_cp")
    assert (cause["waiting"], cause["seconds"], cause["turn"]) == ([1, 9, 13], 31.0, 1)
    assert found["waiting"] == {"1": [5], "9": [5], "13": [5]}
    assert found["missing"] == [4, 6, 7]
    assert main(["diagnose", str(folder), "--patience", "60"]) == 3
    assert " ".join(capsys.readouterr().out.split()) == (
        "nothing is wrong that the records of ranks 1, 5, 9, 13 show; not checked: ranks 4, 6-7 "
        "left no record (killed before it was written?)"
    )


@pytest.mark.parametrize(
    ("rest", "text"),
    [
        (None, "cannot tell: rank 5 left no record (killed before it was written?); ranks 1, 9, "),
        ({"over": True}, "rank 5 ended without entering dp_cp all_reduce 1"),
        ({"entered": {"dp_cp": 2}}, "rank 1 has not come out of dp_cp all_reduce 1"),
    ],
)
def test_a_rank_that_is_gone(folder: Path, rest: Any, text: str) -> None:
    (folder / "rank_00005.json").unlink()
    if rest is not None:
        saved(folder, 5, reduced(0, 1, 2), **rest)
    assert str(diagnosis.diagnose(diagnosis.read(folder))).startswith(text)
    assert main(["diagnose", str(folder)]) == (3 if rest is None else 1)


def test_what_was_dropped_is_not_taken_for_missing(folder: Path) -> None:
    """Rank 1's ring holds its last call only; turns are said, and fit the others'."""
    rows = [*reduced(7, 9, None), 1]
    found = json.loads((folder / "rank_00001.json").read_text())
    found |= {"calls": [[*rows[:8], int(9e9), int(9e9), None, 1]], "dropped": 7}
    (folder / "rank_00001.json").write_text(json.dumps(found))
    text = str(diagnosis.diagnose(diagnosis.read(folder)))
    assert text.startswith("rank 5 has not entered dp_cp all_reduce 1, for which ranks 1, 9, 13")


def test_calls_of_an_earlier_communicator_of_the_name_do_not_count(folder: Path) -> None:
    """As after a rebuild: rank 5 came once more often before."""
    saved(
        folder, 5, reduced(0, 0.1, 0.2), reduced(1, 0.3, None), reduced(0, 1, 2),
        since={"dp_cp": int(0.5e9)}, entered={"dp_cp": 1},
    )  # fmt: skip
    text = str(diagnosis.diagnose(diagnosis.read(folder)))
    assert text.startswith("rank 5 has not entered dp_cp all_reduce 1")


# -- torch's flight recorder -----------------------------------------------------------


def torch_dumps(folder: str, text: bool) -> None:
    """Rank 2 leaves out one of torch's all-reduces; every rank's recorder is written down."""
    from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json

    grid = commgrid.initialize(tp=2, timeout=1.0)
    group = grid.get_group("dp_tp")
    with contextlib.suppress(RuntimeError):
        for step in range(3):
            if grid.rank != 2 or step < 2:
                dist.all_reduce(torch.ones(3), group=group)  # here
            dist.all_gather([torch.ones(3) for _ in range(4)], torch.ones(3), group=group)
    path = Path(folder) / f"nccl_trace_rank_{grid.rank}"
    path.write_bytes(_dump_fr_trace_json() if text else _dump_fr_trace())
    grid.abort()


@pytest.mark.parametrize("text", [False, True], ids=["pickle", "json"])
def test_torchs_own_dumps_are_read(text: bool, tmp_path: Path) -> None:
    run_on_ranks(torch_dumps, 4, str(tmp_path), text, backend=None, launcher="torchrun")
    found = diagnosis.diagnose(diagnosis.read(tmp_path))
    first = found.causes[0]
    assert first.ranks == (2,)
    assert first.group == "dp_tp"
    assert set(first.waiting) == {0, 1, 3}
    if not text:  # torch's JSON has no places
        assert "skipped dp_tp all_reduce" in first.text
        assert "test_diagnosis.py" in first.text


PUBLISHED = {
    "gpu_error_1st": {12, 14}, "gpu_error_2nd": {9, 14}, "lock_gil_1st": {9, 14},
    "lock_gil_2nd": {10, 15},
}  # fmt: skip
"""NVIDIA/nvidia-resiliency-ext at d8686d9, tests/attribution/unit/fr_traces: which ranks' faults
were injected, by its fault_injection.log."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_dumps_of_injected_faults_that_are_published(name: str) -> None:
    """Sixteen ranks of Megatron over NCCL, with what was under way alone."""
    where = os.environ.get("COMMGRID_NVRX_DUMPS")
    if where is None:
        pytest.skip(
            "needs a download: set COMMGRID_NVRX_DUMPS to tests/attribution/unit/fr_traces of "
            "NVIDIA/nvidia-resiliency-ext"
        )
    paths = [path for path in (Path(where) / name).iterdir() if path.name.startswith("_dump_")]
    found = diagnosis.diagnose(diagnosis.flight_recorder.read(paths))
    assert {rank for each in found.causes for rank in each.ranks} == PUBLISHED[name]


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


def test_a_dump_that_would_run_code_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "dumps" / "nccl_trace_rank_0"
    path.parent.mkdir()
    for held in (Evil(), {"version": "2.10", "pg_config": {}, "entries": [Evil()]}):
        path.write_bytes(pickle.dumps(held))
        with pytest.raises(SpecError, match=r"is no dump .*it would load posix.mkdir"):
            diagnosis.read(path.parent)
    assert not (tmp_path / "evil").exists()


def test_what_is_no_dump_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SpecError, match="there is no such folder"):
        diagnosis.read(tmp_path / "nowhere")
    with pytest.raises(SpecError, match=r"has no rank_\*\.json and no dump"):
        diagnosis.read(tmp_path)
    for garbage in (b"", b"{", b"[]", b"{}", b"\x80\x04.", pickle.dumps({"entries": [{}]})):
        (tmp_path / "dump_3").write_bytes(garbage)
        with pytest.raises(SpecError, match="is no dump of torch's flight recorder"):
            diagnosis.read(tmp_path)
    assert main(["diagnose", str(tmp_path)]) == 2
    assert "dump_3" in capsys.readouterr().err
    with pytest.raises(SpecError, match="ends in its rank"):
        diagnosis.flight_recorder.read([tmp_path / "dump"])
