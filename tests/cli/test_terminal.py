"""Output of commands, on a terminal, in a pipe, and where it cannot be written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from commgrid.cli import main
from commgrid.cli.output import columns
from commgrid.pipeline_schedules.schedule import make_schedule
from commgrid.pipeline_schedules.simulator import simulate

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


def printed(capsys: pytest.CaptureFixture[str], command: str) -> str:
    assert main(command.split()) == 0
    return capsys.readouterr().out


def be_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Captured output is a terminal of so many columns."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))


def test_a_staircase_is_folded_in_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = simulate(make_schedule("1f1b", num_stages=12, num_microbatches=8))
    whole = simulation.draw().splitlines()
    assert len({line.index("F0") - 3 * stage for stage, line in enumerate(whole)}) == 1
    parts = [part.splitlines() for part in simulation.draw(columns=60).split("\n\n")]
    assert len(parts) > 1
    for stage, line in enumerate(whole):
        joined = "".join(part[stage][len("stage 11  ") :].ljust(48) for part in parts)
        assert joined.rstrip() == line[len("stage 11  ") :]
    be_terminal(monkeypatch, 60)
    text = printed(capsys, "show --schedule 1f1b --stages 12 --microbatches 8")
    assert text.rstrip("\n") == simulation.draw(columns=60)
    text = printed(capsys, "show --schedule 1f1b --stages 12 --microbatches 100")
    assert re.search(r"\n… the first 4 of \d+ parts; -o schedule.svg draws all of it\n$", text)


def test_only_a_terminal_says_how_wide(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    assert columns() is None
    be_terminal(monkeypatch, 50)
    assert columns() == 50
    be_terminal(monkeypatch, 1)
    assert columns() == 20


def test_help_fits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for command in ("plan", "explain", "check", "show"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        said = capsys.readouterr().out
        assert max(map(len, said.splitlines())) <= 100
        assert "\nexamples:\n  " in said


def started(command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} {command}"], cwd=ROOT,
        capture_output=True, text=True, timeout=300, env={**os.environ, **environ},
    )  # fmt: skip


@pytest.mark.full
def test_output_that_cannot_be_written_is_one_line() -> None:
    done = started("-m commgrid plan --tp 2 --world-size 4 > /dev/full")
    assert done.returncode == 2
    assert done.stderr == (
        "commgrid plan: the output cannot be written: No space left on device; is the disk full?\n"
    )


@pytest.mark.full
@pytest.mark.parametrize("command", ["-m commgrid plan --help", "-m megatron_adapter names"])
def test_a_closed_pipe_is_no_traceback_anywhere(command: str) -> None:
    done = started(f"{command} | true")
    assert done.stderr == ""
    assert done.returncode in (0, 141)


@pytest.mark.full
def test_a_terminal_without_the_characters_gets_others() -> None:
    done = started("-m commgrid plan --tp 2 --world-size 4", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "  dense   tp 2 ? cp 1 ? dp 2 ? pp 1 " in done.stdout


def test_ctrl_c_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("commgrid.cli.commands.plan.as_text", stopped)
    assert main(["plan", "--tp", "2", "--world-size", "4"]) == 130
