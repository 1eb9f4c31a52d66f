"""The command line: `commgrid plan`, `commgrid explain`, `commgrid check`, `commgrid show`."""

# PYTHON_ARGCOMPLETE_OK

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from commgrid.cli import check, explain, plan, show
from commgrid.errors import CommGridError
from commgrid.planning.names import nearest
from commgrid.version import VERSION

_COMMANDS = {"plan": plan, "explain": explain, "check": check, "show": show}
_PIPE_CLOSED = 141  # as a shell reports a command that a closed pipe ended


class _Parser(argparse.ArgumentParser):
    """argparse, with the nearest command in its errors."""

    def error(self, message: str) -> NoReturn:
        word = message.partition("invalid choice: '")[2].partition("'")[0]
        super().error(message + nearest(word, _COMMANDS) if word else message)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status, 0 or 2 where the input is wrong."""
    parser, commands = _parsers()
    _complete(parser)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        _refuse(commands[args.command], unknown)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except CommGridError as error:
        print(f"commgrid {args.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `commgrid plan … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print(
            f"commgrid {args.command}: needs torch, which is not installed here (pip install "
            "torch); plan, explain and show do without it",
            file=sys.stderr,
        )
        return 2
    return status


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of everything, and that of each command."""
    parser = _Parser(
        prog="commgrid",
        description="Plan, explain, check and draw the communicators of a training job.",
        epilog="`commgrid COMMAND --help` has examples.",
    )
    parser.add_argument("--version", action="version", version=_version())
    commands: Any = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in _COMMANDS.values():
        module.add_parser(commands)
    return parser, commands.choices


def _version() -> str:
    """commgrid's version and torch's, which is not imported for it."""
    try:
        torch = f"torch {importlib.metadata.version('torch')}"
    except importlib.metadata.PackageNotFoundError:
        torch = "no torch"
    return f"commgrid {VERSION} ({torch}, Python {sys.version.partition(' ')[0]})"


def _complete(parser: argparse.ArgumentParser) -> None:
    """Completion in the shell, where argcomplete is installed."""
    try:
        argcomplete = importlib.import_module("argcomplete")
    except ImportError:
        return
    argcomplete.autocomplete(parser)


def _refuse(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """Says which flags a command does not have, and which they are most like."""
    flags = re.findall(r"--[a-z][a-z-]*", parser.format_help())
    told = [
        given + nearest(given.partition("=")[0], flags) if given.startswith("-") else given
        for given in unknown
    ]
    parser.error(f"unrecognized arguments: {' '.join(told)}")
