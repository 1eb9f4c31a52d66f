"""`told_when_stopped`: no signal is lost, and a `tell` that raises does not keep the process."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from commgrid.failures import told_when_stopped
from commgrid.testing import Ranks

MOMENTS = 12
"""Before and after each of the six changes of a handler or of the descriptor."""


def stopped_at(moment: int, folder: Path) -> None:
    """Send SIGTERM to this process at one moment of the block's beginning or end."""
    left = [moment]

    def at_a_moment() -> None:
        left[0] -= 1
        if left[0] == -1:
            signal.raise_signal(signal.SIGTERM)

    def around(function: Any) -> Any:
        def call(*args: Any) -> Any:
            at_a_moment()
            found = function(*args)
            at_a_moment()
            return found

        return call

    signal.set_wakeup_fd = around(signal.set_wakeup_fd)
    signal.signal = around(signal.signal)
    with told_when_stopped(lambda name: (folder / f"told {moment}").write_text(name)):
        pass
    (folder / f"moments {moment}").write_text(str(moment - left[0]))


def test_no_signal_is_lost_while_the_block_begins_or_ends(tmp_path: Path) -> None:
    args = [(moment, tmp_path) for moment in range(MOMENTS + 1)]
    with Ranks(stopped_at, MOMENTS + 1, per_rank=args, backend=None, killable=True) as ranks:
        outcomes = ranks.wait()
    # The last rank's moment never comes: it says that all moments were tried.
    assert (tmp_path / f"moments {MOMENTS}").read_text() == str(MOMENTS)
    for moment in range(MOMENTS):
        assert outcomes[moment].exitcode in (128 + signal.SIGTERM, -signal.SIGTERM), moment
    assert {path.name[5:] for path in tmp_path.glob("told *")} == {"5", "6", "7", "8"}


def raises(name: str) -> None:
    raise BrokenPipeError(name)


def leaves(name: str) -> None:
    raise SystemExit(0)


def stopped_and_waits(tell: Any) -> None:
    with told_when_stopped(tell):
        signal.raise_signal(signal.SIGTERM)
        time.sleep(60)  # until the thread has ended the process


@pytest.mark.parametrize("tell", [raises, leaves, print])
def test_a_process_ends_whatever_tell_raises(tell: Any, tmp_path: Path) -> None:
    with Ranks(stopped_and_waits, 1, tell, backend=None, output=tmp_path) as ranks:
        (outcome,) = ranks.wait().values()
    assert outcome.exitcode == 128 + signal.SIGTERM
    expected = {raises: "BrokenPipeError: SIGTERM", leaves: "SystemExit: 0", print: "SIGTERM"}
    assert expected[tell] in outcome.printed


def handled_by_the_program() -> None:
    """The nearest correct program: signals before and after the block are the program's own."""
    got: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    signal.raise_signal(signal.SIGTERM)
    with told_when_stopped(raises):
        pass
    signal.raise_signal(signal.SIGTERM)
    assert got == [signal.SIGTERM] * 2


def test_a_programs_own_handler_is_back_after_the_block(tmp_path: Path) -> None:
    with Ranks(handled_by_the_program, 1, backend=None, output=tmp_path) as ranks:
        (outcome,) = ranks.wait().values()
    assert outcome.exitcode == 0, outcome
