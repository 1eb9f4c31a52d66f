"""`commgrid verify` over traces made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commgrid import SpecError
from commgrid.call_analysis.program import Batch, Wait
from commgrid.call_analysis.verification import programs
from commgrid.call_records.call import Call, Group
from commgrid.call_records.trace import Trace
from commgrid.cli import main
from tests.records import save

GROUPS = {"tp": Group("tp", (0, 1), "1"), "dp": Group("dp", (0, 1), "2"),
          "other": Group("other", ())}  # fmt: skip


def saved(folder: Path, rank: int, *calls: tuple[Any, ...], **more: Any) -> None:
    """A trace of `tp` and `dp` over ranks 0 and 1; calls are group, operation, peer, ended.

    A call begins a millisecond after the one before, and returns at once; `ended` is in
    microseconds.
    """
    made = []
    for at, (group, operation, peer, ended) in enumerate(calls):
        began = 1.7e9 + at / 1e3
        ends = began + 1e-4 if ended == "now" else ended and 1.7e9 + ended / 1e6
        made.append(
            Call(GROUPS[group], operation, peer, (2,), "float32", 8, where=f"r{rank}.py:{at} f",
                 began=began, issued=began + 1e-4, ended=ends)
        )  # fmt: skip
    save(folder, Trace(rank, tuple(made), at=1.7e9, **more))


def both(folder: Path, *calls: tuple[Any, ...], **more: Any) -> Path:
    for rank in range(2):
        saved(folder, rank, *calls, **more)
    return folder


def test_a_wait_stands_where_it_was_over(tmp_path: Path) -> None:
    """By time: before the first call that began later."""
    folder = both(
        tmp_path, ("tp", "all_reduce", None, 1900), ("dp", "all_reduce", None, "now"),
        ("dp", "all_reduce", None, None), ("tp", "send", 1, 9000),
    )  # fmt: skip
    steps = programs(folder)[0]
    assert [
        (step.operation, step.handle) if isinstance(step, Call) else step for step in steps
    ] == [
        ("all_reduce", 0), ("all_reduce", None), Wait((0,)), ("all_reduce", 2), ("send", 3),
        Wait((3,)),
    ]  # fmt: skip
    assert steps[4].peer == 1  # type: ignore[union-attr]


def test_messages_of_a_batch_are_one(tmp_path: Path) -> None:
    """Alone they wait for each other over NCCL; as a batch they do not."""
    for rank in range(2):
        other = 1 - rank
        calls = ("tp", "send", other, 5000), ("tp", "recv", other, 5100)
        saved(tmp_path / "alone", rank, *calls)
        saved(
            tmp_path / "batch", rank, *calls, batches={(GROUPS["tp"], 0): 1, (GROUPS["tp"], 1): 1}
        )
    assert main(["verify", str(tmp_path / "alone"), "--backend", "nccl"]) == 1
    assert main(["verify", str(tmp_path / "alone"), "--backend", "gloo"]) == 0
    assert main(["verify", str(tmp_path / "batch")]) == 0
    steps = programs(tmp_path / "batch")[0]
    assert isinstance(steps[0], Batch)
    assert [call.operation for call in steps[0].calls] == ["send", "recv"]


def opposite(folder: Path, ended: list[Any]) -> None:
    for rank, names in enumerate((["tp", "dp"], ["dp", "tp"])):
        saved(
            folder, rank, *((n, "all_reduce", None, e) for n, e in zip(names, ended, strict=True))
        )


def test_it_ends_with_1_and_names_both_calls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    opposite(tmp_path, ["now", "now"])
    assert main(["verify", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "cannot finish under nccl's rules: 2 calls wait in a circle" in said
    assert (
        "rank 0 waits in tp all_reduce 0 (r0.py:0 f) for rank 1, which comes to it at r1.py:1 f"
        in said
    )
    assert "rank 1  [dp all_reduce 0]  tp all_reduce 0" in said
    assert main(["verify", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["finishes"], [v["kind"] for v in found["verdicts"]]) == (False, ["circle"] * 3)


def test_what_only_some_devices_run_is_told_and_an_error_where_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    opposite(tmp_path, [5000, 5100])
    assert main(["verify", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("2 ranks, 4 calls: all finish under nccl's and gloo's rules\n\ncareful")
    assert main(["verify", str(tmp_path), "--strict"]) == 1
    assert main(["verify", str(tmp_path), "--backend", "gloo"]) == 0


def test_traces_from_which_it_cannot_be_told_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = ("tp", "all_reduce", None, "now")
    saved(tmp_path / "half", 0, one)
    assert main(["verify", str(tmp_path / "half")]) == 3
    told = capsys.readouterr().out
    assert "1 ranks, 0 calls: all finish" in told
    assert "not checked: rank 1 has no record there" in told
    with pytest.raises(SpecError, match=r"rank 1 of tp has no trace beside rank 0's"):
        programs(tmp_path / "half")
    with pytest.raises(SpecError, match=r"its first 3 calls were not kept"):
        programs(both(tmp_path / "late", one, dropped=3))
    with pytest.raises(SpecError, match=r"is on 'other', which is no communicator"):
        programs(both(tmp_path / "other", ("other", "all_reduce", None, "now")))
    assert main(["verify", str(tmp_path / "nowhere")]) == 2
