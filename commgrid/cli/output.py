"""Output of commands: JSON of one schema, or text that fits the terminal."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from commgrid.errors import CommGridError

TYPE_CHECKING = False  # as type checkers know it; typing is slow to load

if TYPE_CHECKING:
    from typing import Any

    from commgrid.planning.plan import PlannedCommunicator
    from commgrid.planning.spec import GridSpec

JSON_VERSION = 1
"""Of JSON whose command gives no other; it rises when a key goes or means something else."""

# Exit statuses: 128 and the signal's number.
_PIPE_CLOSED, _INTERRUPTED, _TERMINATED = 141, 130, 143

NARROWEST = 20
"""Columns below which nothing is made narrower."""


def give(
    args: argparse.Namespace, found: Callable[[], Mapping[str, Any]], text: Callable[[], str]
) -> None:
    """Prints what a command has found: as JSON where `--json` asks for it, else as text."""
    _write(as_json(found()) if args.json else text())


def is_completing() -> bool:
    """Whether a shell asks for completions of its command line, by argcomplete."""
    return "_ARGCOMPLETE" in os.environ


def columns() -> int | None:
    """How wide text may be: on a terminal COLUMNS or its own width; elsewhere None, no limit.

    Output to a file or a pipe is for programs. COLUMNS does not count there: a Python that has
    loaded readline hands its terminal's on to every process that it starts.
    """
    if not sys.stdout.isatty():
        return None
    import shutil  # slow to load

    return max(shutil.get_terminal_size().columns, NARROWEST)


def write_grid(path: Path, spec: GridSpec, source: str) -> None:
    """Write a grid as YAML, with a comment that says where it is from.

    Raises:
        SpecError: it cannot be written.
    """
    from commgrid.viz.figure import write_text  # few commands write files

    comment = "\n# ".join(source.splitlines())
    write_text(path, f"# {comment}\n{spec.to_yaml()}")


def written(paths: Sequence[Path]) -> list[str]:
    """Lines that say which files there are now."""
    return ["", *(f"wrote {path}" for path in paths)] if paths else []


def as_json(found: Mapping[str, Any]) -> str:
    """One line: an object that begins with the schema's version; null for what is not finite.

    >>> as_json({"world_size": 8, "loss": float("nan")})
    '{"version": 1, "world_size": 8, "loss": null}'
    """
    import json  # slow to load, and most output is text

    return json.dumps(_finite({"version": JSON_VERSION, **found}), allow_nan=False)


def guarded(run: Callable[[], int]) -> int:
    """Runs a command; a closed pipe and Ctrl-C end it as a shell expects, without a traceback.

    So does SIGTERM, which would otherwise leave what it has started behind.
    """
    try:
        try:
            with _terminated():
                return run()
        finally:  # also of --help, which ends in SystemExit
            if sys.stdout is not None:  # as with `>&-`
                sys.stdout.flush()
    except BrokenPipeError:  # `commgrid plan … | head`
        drop_output()
        return _PIPE_CLOSED
    except KeyboardInterrupt:
        return _INTERRUPTED


@contextmanager
def _terminated() -> Iterator[None]:
    """SIGTERM ends what runs as an exception does: through everyone's `finally`."""
    if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
        raise SystemExit(_TERMINATED)

    try:
        signal.signal(signal.SIGTERM, end)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def drop_output() -> None:
    """Gives up standard output, which cannot be written to, so that closing it does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write(text: str) -> None:
    """Prints now, so that a full disk is an error of the command and no traceback at its end."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_output()
        raise CommGridError(
            f"the output cannot be written: {error.strerror or error}; is the disk full?"
        ) from error


def names_of(first: PlannedCommunicator, others: Sequence[PlannedCommunicator] = ()) -> str:
    """The names of a communicator, and of others of equal ranks.

    Args:
        first: which comes first.
        others: of the same ranks.
    """
    also = ", ".join(name for each in others for name in each.names)
    return f"{', '.join(first.names)}{f', also {also}' if also else ''}"
