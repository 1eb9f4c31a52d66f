"""Files that are no traces, or of another job, are named, and no rank is blamed."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commgrid import SpecError
from commgrid.call_records import files as trace_files
from commgrid.call_records.call import Call, Group
from commgrid.call_records.trace import Trace
from commgrid.cli import main
from tests.records import save

TP = Group("tp", (0, 1), "tp@1", "gloo")
CALL = Call(TP, "all_reduce", shape=(2,), dtype="float32", bytes=8, where="a.py:1 f", began=1.7e9,
            issued=1.7e9, ended=1.7e9)  # fmt: skip


def saved(folder: Path, number: int, **given: Any) -> Path:
    """A rank's trace of one call on `tp` of ranks 0 and 1."""
    trace = Trace(number, (CALL,), entered={TP: 1}, at=1.7e9, job="a")
    save(folder, replace(trace, **given))
    return folder / f"rank_{number:05}.ring"


@pytest.mark.parametrize("command", ["trace", "diagnose", "verify"])
def test_a_wrong_folder_is_said_with_where_to_look(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path / "runs", 0)
    saved(tmp_path / "runs", 1)
    (tmp_path / "empty").mkdir()
    for folder, said in (
        (tmp_path / "nowhere", "nowhere: there is no such folder; expected the folder that"),
        (tmp_path, f"; expected the folder that COMMGRID_TRACE or commgrid.trace.save was given, "
         f"such as {tmp_path / 'runs'}"),
        (path, f"is a file; expected the folder that COMMGRID_TRACE or commgrid.trace.save was "
         f"given, such as {tmp_path / 'runs'}"),
        (tmp_path / "empty", "has no rank_*.ring"),
    ):  # fmt: skip
        assert main([command, str(folder)]) == 2
        assert said in capsys.readouterr().err or (command, folder) == ("diagnose", tmp_path)
    assert main([command, str(tmp_path / "runs")]) == 0


def test_traces_of_two_jobs_are_refused(tmp_path: Path) -> None:
    """A run on two ranks into the folder of one on four: ranks 2 and 3 are the earlier one's."""
    for rank in range(4):
        saved(tmp_path, rank, job="one")
    for rank in range(2):
        saved(tmp_path, rank, job="two", at=1.7e9 + 60)
    with pytest.raises(SpecError, match=r"holds traces of 2 jobs, ranks 0-1 of 20.*, ranks 2-3 of"):
        trace_files.read(tmp_path)
    for rank in (2, 3):
        (tmp_path / f"rank_{rank:05}.ring").unlink()
    assert [trace.job for trace in trace_files.read(tmp_path)] == ["two", "two"]
    saved(tmp_path, 1, job="")  # not known, as the store had gone
    assert [trace.job for trace in trace_files.read(tmp_path)] == ["two", ""]


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    shutil.copy(saved(tmp_path, 0), tmp_path / "rank_00001.ring")
    with pytest.raises(SpecError, match=r"00001.ring: holds rank 0, as rank_00000.ring does"):
        trace_files.read(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "number", "by"),
    [
        ("rank_00000.json", b'{"format": 1, "rank": 0', 1, " (0.2.0 or earlier)"),
        ("rank_00000.ring", b"commgrid ring 1\n" + bytes(5000), 1, " (0.2.0 or earlier)"),
        ("rank_00000.ring", b"commgrid ring 3\n" + bytes(5000), 3, ""),
    ],
)
def test_another_version_is_said(
    tmp_path: Path, name: str, text: bytes, number: int, by: str
) -> None:
    (tmp_path / name).write_bytes(text)
    with pytest.raises(SpecError) as refused:
        trace_files.read(tmp_path)
    assert str(refused.value) == (
        f"{tmp_path}/{name}: format {number}, this version reads 2; read it with the version of "
        f"commgrid that has written it{by}"
    )


def test_files_of_earlier_versions_beside_rings_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "rank_00000.json").write_text('{"format": 1, "rank": 0}')
    saved(tmp_path, 1)
    assert [trace.rank for trace in trace_files.read(tmp_path)] == [1]


def test_a_file_that_was_cut_off_or_changed_is_refused(tmp_path: Path) -> None:
    """Every beginning of a file, and every byte of its table put to something else."""
    path = saved(tmp_path, 0)
    data = path.read_bytes()
    for end in (*range(0, len(data), 97), len(data) - 1):
        path.write_bytes(data[:end])
        with pytest.raises(SpecError, match="is no trace of commgrid's"):
            trace_files.read(tmp_path)
    refused = 0
    for at in range(4096, len(data)):
        path.write_bytes(data[:at] + b"\xff" + data[at + 1 :])
        try:
            trace_files.read(tmp_path)  # only a number may be another
        except SpecError:
            refused += 1
    assert refused > (len(data) - 4096) / 3


PLACES = {
    0: ("/job/train.py", "/job/a/utils.py", "/job/b/utils.py", "/x/y/deep.py", "/z/y/deep.py"),
    1: ("/copy/train.py", "/copy/b/utils.py"),
}


def test_files_of_one_name_are_told_apart_and_no_others(tmp_path: Path) -> None:
    """By as much of the path as any rank needs; where a rank keeps its copy does not matter."""
    for rank, files in PLACES.items():
        calls = tuple(replace(CALL, where=f"{file}:3 f") for file in files)
        saved(tmp_path, rank, calls=calls)
    first, second = trace_files.read(tmp_path)
    assert [call.where for call in first.calls] == [
        "train.py:3 f", "a/utils.py:3 f", "b/utils.py:3 f", "x/y/deep.py:3 f", "z/y/deep.py:3 f",
    ]  # fmt: skip
    assert [call.where for call in second.calls] == ["train.py:3 f", "b/utils.py:3 f"]


def test_what_commands_cannot_take_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, 0)
    for argv, said in (
        (["trace", str(tmp_path), "-o", str(tmp_path / "a.txt")], "expected a file that ends in"),
        (["trace", str(tmp_path), "--top", "0"], "--top 0: expected a whole number from 1 on"),
        (["diagnose", str(tmp_path), "--patience", "-1"], "--patience -1: expected seconds"),
        (["diagnose", str(tmp_path), "--patience", "nan"], "--patience nan: expected seconds"),
    ):
        assert main(argv) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "a.txt").exists()
