"""The GPU tests' runner, emulated over gloo: all pass, and what had ended survives a kill."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import commgrid
from commgrid.testing import run_on_ranks
from tests.gpu import results, run
from tests.gpu.on_gpus import Where
from tests.gpu.results import COLUMNS, Result
from tests.gpu.session import Session
from tests.gpu.turns import turn
from tests.waiting import until, until_waiting

GPU = Path(__file__).parent / "gpu"


def command(*options: str, path: Path) -> list[str]:
    return [sys.executable, str(GPU / "run.py"), "--emulate", "--results", str(path), *options]


@pytest.mark.full
def test_all_pass_over_gloo_or_say_why_not(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    done = subprocess.run(command(path=path), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    found = results.read(path)
    assert {each.outcome for each in found} == {"passed", "skipped"}
    for each in found:
        if each.outcome == "skipped":
            assert each.found.startswith("needs "), each
    passed = [each.check for each in found if each.outcome == "passed"]
    assert sum("session" in check for check in passed) >= 11  # graphs and compilers may lack
    assert sum("failures" in check for check in passed) == 7


@pytest.mark.full
def test_what_had_ended_survives_a_kill(tmp_path: Path) -> None:
    path, printed = tmp_path / "results.jsonl", tmp_path / "printed"
    with printed.open("wb") as output:
        process = subprocess.Popen(
            command("--slice", "session", "failures", path=path), stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    until = time.monotonic() + 100
    while len(results.read(path)) < 3:
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)  # between two looks at the file
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for each in results.read(path):
        assert str(each).splitlines()[0] in printed.read_text()


def test_a_slices_limit_names_the_test_that_hung(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text("")
    process = run.start("failures", path, True)
    try:
        while not (check := results.unfinished(path, process.pid)):
            assert process.poll() is None
            time.sleep(0.01)  # between two looks at the file
    finally:
        process.kill()
        process.wait()
    assert "test_a_rank_that_never_comes_to_the_first_call" in check


@pytest.mark.full
def test_a_slice_that_takes_too_long_is_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    asked = command("--slice", "failures", "--seconds", "12", path=path)
    done = subprocess.run(asked, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    last = results.read(path)[-1]
    assert last.found == "not ended when the 12 s of slice failures were over"
    assert str(last) in done.stdout


def takes_turns(folder: str, pid_of: str, rank: int) -> None:
    """Rank 0 leaves its turn when rank 1, which is to be alone, waits for that."""
    pid, order = Path(pid_of), Path(folder, "order")
    if rank == 1:
        until(lambda: order.exists(), "rank 0 has its turn")
        pid.write_text(str(os.getpid()))
    with turn(Path(folder), alone=rank == 1), order.open("a") as file:
        file.write(f"{rank} begins\n")
        file.flush()
        if rank == 0:
            until(lambda: pid.exists() and pid.read_text(), "rank 1 comes")
            until_waiting([int(pid.read_text())])
        file.write(f"{rank} ends\n")


def test_a_test_that_is_to_be_alone_waits_for_others(tmp_path: Path) -> None:
    run_on_ranks(takes_turns, 2, str(tmp_path), str(tmp_path / "pid"),
                 per_rank=[(0,), (1,)], backend=None)  # fmt: skip
    assert (tmp_path / "order").read_text().split("\n")[:4] == [
        "0 begins", "0 ends", "1 begins", "1 ends",
    ]  # fmt: skip


def test_slices_name_every_file_once() -> None:
    listed = [test.partition("::")[0] for name in run.SLICES for test in run.tests_of(name)]
    assert {*listed} == {f"tests/gpu/{path.name}" for path in GPU.glob("test_*.py")}
    megatron = [each for each in listed if "megatron" in each]
    assert len(listed) - len(megatron) == len({*listed} - {*megatron})


def passes(where: Where) -> str:
    return f"on the {where.device}"


def fails(where: Where) -> str:
    raise ValueError("no such check")


def skips(where: Where) -> str:
    pytest.skip("needs what is not here")


def hangs(where: Where) -> str:
    time.sleep(1000)  # until it is killed
    return ""


def dies(where: Where) -> str:
    os._exit(3)


def fails_on_one(where: Where) -> str:
    if commgrid.initialize().rank == 1:
        raise ValueError("no such check")
    return hangs(where)


@pytest.fixture
def session() -> Iterator[Session]:
    with Session(Where(emulated=True), 2) as session:
        yield session


def test_a_failed_check_does_not_end_the_session(session: Session) -> None:
    for _ in range(2):
        with pytest.raises(AssertionError, match="fails failed\n--- rank 0\nTraceback") as failed:
            session.run(fails)
        assert "ValueError: no such check" in str(failed.value)
        assert session.run(passes) == "on the cpu"
        with pytest.raises(pytest.skip.Exception, match="needs what is not here"):
            session.run(skips)


def test_the_failure_of_one_rank_is_told_though_the_other_hangs(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.gpu.session.OTHERS_SECONDS", 1.0)
    with pytest.raises(AssertionError, match=r"failed, and has not ended on ranks \[0\]") as failed:
        session.run(fails_on_one)
    assert "in hangs\n" in str(failed.value)
    assert str(failed.value).endswith("ValueError: no such check\n")


def test_a_check_that_hangs_is_named_and_the_next_one_runs(session: Session) -> None:
    with pytest.raises(AssertionError, match=r"hangs has not ended on ranks \[0, 1\] within 1 s"):
        session.run(hangs, limit=1)
    assert session.run(passes) == "on the cpu"
    with pytest.raises(AssertionError, match="rank 0 has ended"):
        session.run(dies)
    assert session.run(passes) == "on the cpu"


def result(check: str, outcome: str = "passed", **more: object) -> Result:
    of = {"date": "2026-01-02", "gpu": "1 × H", "torch": "2.11.0", "nccl": "2.28.9"}
    return Result(f"tests/gpu/{check}", outcome, 1.0, **{"found": "", "lines": (), **of, **more})  # type: ignore[arg-type]


def test_a_later_result_replaces_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    results.write(results.rows([result("a.py::b"), result("a.py::c", found="3 | 4 MiB")]), path)
    cases = [
        result("a.py::b[1]"),
        result("a.py::b[2]", "failed", lines=("E   ValueError: no", "E    + 3", "a.py:3: Error")),
    ]
    results.write(results.rows([*cases, result("a.py", "failed")]), path)
    place = ("2026-01-02", "1 × H", "2.11.0", "2.28.9")
    assert results.table(path) == {
        "a.py::b": ("a.py::b", *place, "failed (1 of 2 cases, 2 s): ValueError: no"),
        "a.py::c": ("a.py::c", *place, "passed (1 s): 3 / 4 MiB"),
    }


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    results.append(path, result("a.py::b"))
    with path.open("a") as file:
        file.write(json.dumps(vars(result("a.py::c")))[:40])
    assert results.read(path) == [result("a.py::b")]


def test_every_check_of_the_table_exists() -> None:
    assert f"| {' | '.join(COLUMNS)} |" in results.TABLE.read_text()
    found = results.table()
    assert len(found) > 40
    for check, row in found.items():
        file, name = check.split("::")
        assert re.search(rf"^def {name}\(", (GPU / file).read_text(), re.MULTILINE), check
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", row[1]), row
        assert re.match(r"(passed|failed|skipped)\b", row[5]), row
