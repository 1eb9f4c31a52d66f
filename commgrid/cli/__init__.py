"""The command line, a module for each command."""

# PYTHON_ARGCOMPLETE_OK

from __future__ import annotations

import argparse
import importlib
import io
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from commgrid.cli.output import guarded, is_completing
from commgrid.cli.parser import COMMANDS
from commgrid.errors import CommGridError, SpecError
from commgrid.layout.axis_names import nearest
from commgrid.version import VERSION


class _Parser(argparse.ArgumentParser):
    """argparse, whose errors are one line, with the nearest command."""

    def error(self, message: str) -> NoReturn:
        of_flag = re.fullmatch(r"argument (?:-\w/)?(--?[\w-]+)\S*: (.*)", message, re.DOTALL)
        if of_flag:
            raise SpecError(" ".join(of_flag.groups()))
        word = message.partition("invalid choice: '")[2].partition("'")[0]
        self.exit(2, f"{self.prog}: {message}{nearest(word, COMMANDS) if word else ''}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status, 2 where the input is wrong."""
    _write_what_it_can()
    return guarded(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    parser, commands = _parsers(words)
    _complete(parser)
    if not words:
        parser.print_help(sys.stderr)
        return 2
    rest: list[str] = []
    if words[:1] == ["audit"] and "--" in words:  # what follows is another program's
        words, rest = words[: words.index("--")], words[words.index("--") + 1 :]
    try:
        args, unknown = parser.parse_known_args(words)
        args.rest, args.words = rest, words
        if unknown:
            _refuse(commands[args.command], unknown)
        status: int = args.run(args)
    except CommGridError as error:
        return _fail(words[0], str(error))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        return _fail(
            words[0],
            "needs torch, which is not installed here (pip install torch); plan, explain, "
            "show, presets, diff, trace, diagnose, dump and verify do without it",
        )
    return status


def _fail(command: str, message: str) -> int:
    """Says on one line what is wrong."""
    print(f"commgrid {command}: {message}", file=sys.stderr)
    return 2


def _write_what_it_can() -> None:
    """What standard output's encoding lacks, such as `·` in ASCII, is `?` and no traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors != "replace":
        sys.stdout.reconfigure(errors="replace")


def _parsers(
    words: Sequence[str] | None = None,
) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of everything, and that of each command.

    Args:
        words: of the command line, of which only the command is loaded; None: all are, as for
            completion in the shell.
    """
    every = words is None or is_completing()
    wanted = COMMANDS if every else [*(words or ())][:1]
    parser = _Parser(
        prog="commgrid",
        description="Plan, explain, check, measure and draw the communicators of a training job.",
        epilog="`commgrid COMMAND --help` has examples.",
    )
    version = _version() if "--version" in (words or ()) else VERSION
    parser.add_argument("--version", action="version", version=version)
    commands: Any = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        if name in wanted:
            importlib.import_module(f"commgrid.cli.commands.{name}").add_parser(commands)
        else:
            commands.add_parser(name, help=summary, add_help=False)
    return parser, commands.choices


def _version() -> str:
    """commgrid's version and torch's, which is not imported for it."""
    metadata = importlib.import_module("importlib.metadata")
    try:
        torch = f"torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        torch = "no torch"
    return f"commgrid {VERSION} ({torch}, Python {sys.version.partition(' ')[0]})"


def _complete(parser: argparse.ArgumentParser) -> None:
    """Completion in the shell, where argcomplete is installed."""
    if not is_completing():
        return
    try:
        argcomplete = importlib.import_module("argcomplete")
    except ImportError:
        return
    argcomplete.autocomplete(parser)


def _refuse(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """Says which flags a command does not have, and which they are most like."""
    flags = [flag for action in parser._actions for flag in action.option_strings]
    told = [
        given + nearest(given.partition("=")[0], flags) if given.startswith("-") else given
        for given in unknown
    ]
    theirs = "; the script's own come after --" if parser.prog.endswith(" audit") else ""
    parser.error(f"unrecognized arguments: {' '.join(told)}{theirs}")
