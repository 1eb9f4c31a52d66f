"""Text fits the terminal and is in colour there; what is piped is neither wrapped nor coloured."""

import contextlib
import fcntl
import io
import os
import re
import shutil
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from commgrid.cli import main
from commgrid.cli.terminal import columns, has_colour
from commgrid.pipeline.schedule import make_schedule
from commgrid.pipeline.simulator import simulate

ROOT = Path(__file__).parents[2]
COMMANDS = [
    "plan --tp 2 --pp 2 --ep 4 --etp 1 --world-size 512",
    "explain --tp 2 --world-size 64 --rank 37 --share all",
    "show --tp 2 --pp 2 --ep 4 --etp 1 --world-size 512",
    "show --schedule 1f1b --stages 12 --microbatches 8",
    "show --schedule zb-h1 --stages 4 --microbatches 60",
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def printed(capsys: pytest.CaptureFixture[str], command: str) -> str:
    assert main(command.split()) == 0
    return capsys.readouterr().out


def be_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Captured output is a terminal of so many columns, without colours."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.mark.full("60-*", "132-*")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("width", [60, 80, 132])
def test_no_line_is_longer_than_the_terminal(
    command: str, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = printed(capsys, command)
    monkeypatch.setenv("COLUMNS", str(width))
    assert printed(capsys, command) == whole  # into a pipe
    be_terminal(monkeypatch, width)
    fitting = printed(capsys, command)
    assert max(map(len, fitting.splitlines())) <= width
    if "--schedule" not in command:  # nothing is lost
        assert fitting.split() == whole.split()


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


def test_only_a_terminal_says_how_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    own = shutil.get_terminal_size().columns
    assert columns(Terminal()) == max(own, 20)
    monkeypatch.setenv("COLUMNS", "50")
    assert columns(Terminal()) == 50
    assert columns(io.StringIO()) is None
    monkeypatch.setenv("COLUMNS", "1")
    assert columns(Terminal()) == 20


def test_help_fits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    for command in ("plan", "explain", "check", "show"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        said = capsys.readouterr().out
        assert max(map(len, said.splitlines())) <= 70
        assert "\nexamples:\n  " in said


@pytest.mark.parametrize(
    ("environ", "on_terminal", "in_pipe"),
    [
        ({}, True, False), ({"NO_COLOR": "1"}, False, False), ({"NO_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "1"}, True, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
        ({"TERM": "dumb"}, False, False),
    ],
    ids=str,
)  # fmt: skip
def test_colour_is_for_terminals(
    environ: dict[str, str], on_terminal: bool, in_pipe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert has_colour(Terminal()) == on_terminal
    assert has_colour(io.StringIO()) == in_pipe


@pytest.mark.parametrize("command", COMMANDS)
def test_colours_change_no_character(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = printed(capsys, command)
    assert "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = printed(capsys, command)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain
    assert "\x1b" not in printed(capsys, f"{command} --json")
    assert main(["plan", "--tp", "2"]) == 2
    assert capsys.readouterr().err.startswith("\x1b[1;31mcommgrid plan:\x1b[0m --world-size: ")


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
@pytest.mark.parametrize("command", ["-m commgrid plan --help", "-m megatron_adapter departures"])
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

    monkeypatch.setattr("commgrid.cli.plan.as_text", stopped)
    assert main(["plan", "--tp", "2", "--world-size", "4"]) == 130


@pytest.mark.full
def test_on_a_real_terminal() -> None:
    ours, its = os.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 66, 0, 0))
    command = [sys.executable, "-m", "commgrid", *COMMANDS[0].split()]
    environ = dict(os.environ)  # what Python knows of, not what readline has added
    with subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=its, stderr=subprocess.PIPE
    ) as running:
        os.close(its)
        said = b""
        with contextlib.suppress(OSError):  # which is how a terminal ends
            while read := os.read(ours, 65536):
                said += read
        _, error = running.communicate(timeout=300)
    os.close(ours)
    assert (running.returncode, error) == (0, b"")
    lines = re.sub(r"\x1b\[[\d;]*m", "", said.decode()).splitlines()
    assert 60 < max(map(len, lines)) <= 66
    assert b"\x1b[1m512 ranks\x1b[0m" in said
