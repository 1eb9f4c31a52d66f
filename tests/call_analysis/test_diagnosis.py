"""Records of all ranks, commgrid's and torch's, read and judged."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid import SpecError
from commgrid.call_analysis import diagnosis
from commgrid.call_records import ring
from commgrid.call_records.call import Call, Group
from commgrid.call_records.trace import Trace
from commgrid.cli import main
from commgrid.testing import run_on_ranks
from tests.records import save

DP = Group("dp_cp", (1, 5, 9, 13), "dp_cp", "gloo")
PP = Group("pp", (4, 5, 6, 7), "pp", "gloo")


def saved(folder: Path, rank: int, *calls: Call, **rest: Any) -> None:
    """Records made by hand, which were written at 40 s."""
    groups = tuple(group for group in (DP, PP) if rank in group.ranks)
    state = rest.pop("state", ring.COPIED)
    save(folder, Trace(rank, calls, groups=groups, at=40.0, **rest), state=state)


def reduced(number: int, began: float, ended: float | None) -> Call:
    return Call(
        DP, "all_reduce", shape=(4,), dtype="float32", bytes=16, number=number, where="a.py:9 f",
        began=began, issued=began, ended=ended, waiting=ended is None,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ranks 1, 9 and 13 have waited for 31 s; rank 5 was in a pipeline before."""
    for rank in (1, 9, 13):
        saved(tmp_path, rank, reduced(0, 1, 2), reduced(1, 9, None))
    sent = Call(PP, "send", 6, (4,), "float32", 16, where="model.py:212 forward", began=3, issued=3,
                ended=4)  # fmt: skip
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
        "no fault found in the records of ranks 1, 5, 9, 13; not checked: ranks 4, 6-7 "
        "have no record there"
    )


@pytest.mark.parametrize(
    ("rest", "text"),
    [
        (None, "cannot tell: rank 5 has no record there; ranks 1, 9, "),
        ({"state": ring.ENDED}, "rank 5 ended without entering dp_cp all_reduce 1"),
        ({"entered": {DP: 2}}, "rank 1 has not come out of dp_cp all_reduce 1"),
    ],
)
def test_a_rank_that_is_gone(folder: Path, rest: Any, text: str) -> None:
    (folder / "rank_00005.ring").unlink()
    if rest is not None:
        saved(folder, 5, reduced(0, 1, 2), **rest)
    assert str(diagnosis.diagnose(diagnosis.read(folder))).startswith(text)
    assert main(["diagnose", str(folder)]) == (3 if rest is None else 1)


def test_what_was_dropped_is_not_taken_for_missing(folder: Path) -> None:
    """Rank 1's ring holds its last call only; turns are said, and fit the others'."""
    last = replace(reduced(7, 9, None), turn=1)
    saved(folder, 1, last, dropped=7, entered={DP: 2})
    text = str(diagnosis.diagnose(diagnosis.read(folder)))
    assert text.startswith("rank 5 has not entered dp_cp all_reduce 1, for which ranks 1, 9, 13")


def test_a_rank_whose_record_is_incomplete_is_not_accused(folder: Path) -> None:
    """As where its disk was full: what it has issued since is not known."""
    saved(folder, 5, reduced(0, 1, 2), lost=True)
    found = diagnosis.diagnose(diagnosis.read(folder))
    assert (found.is_open, found.causes[0].kind) == (True, "missing rank")
    assert str(found).startswith("cannot tell: the record of rank 5 is not complete")
    assert main(["diagnose", str(folder)]) == 3


@pytest.mark.parametrize("how", [{"over": True}, {"earlier": 1}])
def test_a_rank_that_ended_its_recording_is_not_accused(folder: Path, how: Any) -> None:
    """Alone, by `commgrid.trace.stop()`, or to record again, with turns of another beginning."""
    saved(folder, 5, reduced(0, 1, 2), state=ring.ENDED, **how)
    found = diagnosis.diagnose(diagnosis.read(folder))
    assert (found.is_open, found.incomplete, found.causes[0].kind) == (True, (5,), "missing rank")
    assert str(found).startswith("cannot tell: rank 5 stopped recording (commgrid.trace.stop); ")
    assert main(["diagnose", str(folder)]) == 3


def test_calls_beyond_a_record_are_not_checked(folder: Path) -> None:
    """Also if no rank waits in them; where all records end at one place, all was checked."""
    for rank in (1, 9, 13):
        saved(folder, rank, reduced(0, 1, 2), reduced(1, 3, 4), state=ring.ENDED)
    for calls, status in (([(0, 1, 2), (1, 3, 4)], 0), ([(0, 1, 2)], 3)):
        saved(folder, 5, *[reduced(*call) for call in calls], state=ring.ENDED, over=True)
        found = diagnosis.diagnose(diagnosis.read(folder))
        assert (found.causes, found.incomplete) == ((), (5,) if status else ())
    assert found.is_open
    assert str(found).endswith("; the record of rank 5 ends before others' calls")


def test_ranks_that_were_asked_did_not_answer(folder: Path) -> None:
    (folder / "rank_00005.ring").unlink()
    found = str(diagnosis.diagnose(diagnosis.read(folder), asked=3.0))
    assert found.startswith("cannot tell: rank 5 did not answer in 3 s; ranks 1, 9, ")


def test_stacks_beside_the_records_say_where_a_rank_is(folder: Path) -> None:
    stacks = (
        'Current thread 0x1 (most recent call first):\n  File "/me/loader.py", line 88 in load\n'
    )
    (folder / "rank_00005.stacks").write_text(stacks)
    text = str(diagnosis.diagnose(diagnosis.read(folder)))
    assert "31 s at a.py:9 f; it is in loader.py:88 load; its last call was pp send 0" in text
    os.utime(folder / "rank_00005.stacks", (2.0, 2.0))  # of before its last call
    assert "loader.py" not in str(diagnosis.diagnose(diagnosis.read(folder)))


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
        assert first.kind == "other operation"  # nobody has issued what comes after it
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
    with pytest.raises(SpecError, match=r"has no rank_\*\.ring and no dump"):
        diagnosis.read(tmp_path)
    for garbage in (b"", b"{", b"[]", b"{}", b"\x80\x04.", pickle.dumps({"entries": [{}]})):
        (tmp_path / "dump_3").write_bytes(garbage)
        with pytest.raises(SpecError, match="is no dump of torch's flight recorder"):
            diagnosis.read(tmp_path)
    assert main(["diagnose", str(tmp_path)]) == 2
    assert "dump_3" in capsys.readouterr().err
    with pytest.raises(SpecError, match="ends in its rank"):
        diagnosis.flight_recorder.read([tmp_path / "dump"])
