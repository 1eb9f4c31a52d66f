"""Files that are no traces, or of another job, are named, and no rank is blamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commgrid import SpecError
from commgrid.call_records import files as trace_files
from commgrid.cli import main

CALL = ["tp", 0, "all_reduce", [2], "float32", 8, None, "a.py:1 f", 0, 100, 200, 0]


def saved(folder: Path, number: int, call: list[Any] | None = None, **more: Any) -> Path:
    """A rank's trace of one call on `tp` of ranks 0 and 1."""
    folder.mkdir(exist_ok=True)
    path = folder / f"rank_{number:05}.json"
    found = {
        "format": 1, "rank": number, "wall": 1.7e9, "monotonic": 0, "dropped": 0,
        "members": {"tp": [0, 1]}, "calls": [CALL if call is None else call], **more,
    }  # fmt: skip
    path.write_text(json.dumps(found))
    return path


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
        (tmp_path / "empty", "has no rank_*.json"),
    ):  # fmt: skip
        assert main([command, str(folder)]) == 2
        assert said in capsys.readouterr().err or (command, folder) == ("diagnose", tmp_path)
    assert main([command, str(tmp_path / "runs")]) == 0


def test_traces_of_two_jobs_are_refused(tmp_path: Path) -> None:
    """A run on two ranks into the folder of one on four: ranks 2 and 3 are the earlier one's."""
    for rank in range(4):
        saved(tmp_path, rank, job="one", wall=1.7e9)
    for rank in range(2):
        saved(tmp_path, rank, job="two", wall=1.7e9 + 60)
    with pytest.raises(SpecError, match=r"holds traces of 2 jobs, ranks 0-1 of 20.*, ranks 2-3 of"):
        trace_files.read(tmp_path)
    for rank in (2, 3):
        (tmp_path / f"rank_{rank:05}.json").unlink()
    assert [trace.job for trace in trace_files.read(tmp_path)] == ["two", "two"]
    saved(tmp_path, 1)  # of a version that did not say
    assert [trace.job for trace in trace_files.read(tmp_path)] == ["two", ""]


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, 0)
    saved(tmp_path, 1, rank=0)
    with pytest.raises(SpecError, match=r"00001.json: holds rank 0, as rank_00000.json does"):
        trace_files.read(tmp_path)


def test_another_version_is_said_once(tmp_path: Path) -> None:
    saved(tmp_path, 0, format=2)
    with pytest.raises(SpecError) as refused:
        trace_files.read(tmp_path)
    assert str(refused.value) == (
        f"{tmp_path}/rank_00000.json: format 2, this version reads 1; read it with the version of "
        "commgrid that has written it"
    )


def test_a_file_that_was_cut_off_or_changed_is_refused(tmp_path: Path) -> None:
    """Every beginning of a file, and every value of a call put to something else."""
    text = saved(tmp_path, 0).read_text()
    for end in range(0, len(text) - 1):
        (tmp_path / "rank_00000.json").write_text(text[:end])
        with pytest.raises(SpecError, match="is no whole trace of commgrid's; it was cut off"):
            trace_files.read(tmp_path)
    (tmp_path / "rank_00000.json").write_bytes(b"\x80\x04]")
    with pytest.raises(SpecError, match="cannot be read: no text"):
        trace_files.read(tmp_path)
    for at in range(len(CALL)):
        for value in ({}, "x", 1.5, [[]], -1):
            call = [*CALL[:at], value, *CALL[at + 1 :]]
            saved(tmp_path, 0, call)
            kind = list(trace_files.KEYS.values())[at]
            if not isinstance(value, kind) or (at, value) == (6, -1):
                with pytest.raises(SpecError, match="is no trace of commgrid's"):
                    trace_files.read(tmp_path)
    for more in ({"members": {"tp": ["a"]}}, {"members": []}, {"rank": -4}, {"rank": "0"},
                 {"calls": [CALL[:5]]}, {"wall": None}, {"format": None}):  # fmt: skip
        saved(tmp_path, 0, **more)
        with pytest.raises(SpecError, match="is no trace of commgrid's"):
            trace_files.read(tmp_path)


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
