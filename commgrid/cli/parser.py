"""Parser of the command line, which loads a command when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Sequence

from commgrid.cli.output import is_completing
from commgrid.errors import SpecError
from commgrid.layout.axis_names import nearest
from commgrid.version import VERSION

TYPE_CHECKING = False  # as type checkers know it; typing is slow to load
if TYPE_CHECKING:
    from typing import Any, NoReturn

COMMANDS = {
    "plan": "groups, sizes, communicators, and what start-up will cost",
    "explain": "one rank's coordinate, and its peers in every group",
    "check": "under torchrun or srun: start the grid and try every communicator",
    "show": "pictures of a grid, or of a pipeline's schedule",
    "presets": "grids that others use, by name; any of them as YAML",
    "diff": "what changes between two grids: sizes, names, neighbours, communicators",
    "bench": "under torchrun or srun: latency and bandwidth of every communicator",
    "trace": "what ranks have recorded: a table, a page, or a file for Perfetto",
    "diagnose": "which rank a job waits for, and in which call",
    "dump": "where each rank of a job on this host is, and its last calls",
    "verify": "whether what ranks have recorded can finish, under NCCL's rules and gloo's",
    "audit": "run a training script on several grids, and say where they part",
}


class _Parser(argparse.ArgumentParser):
    """argparse, whose errors are one line, with the nearest command."""

    def error(self, message: str) -> NoReturn:
        of_flag = re.fullmatch(r"argument (?:-\w/)?(--?[\w-]+)\S*: (.*)", message, re.DOTALL)
        if of_flag:
            raise SpecError(" ".join(of_flag.groups()))
        word = message.partition("invalid choice: '")[2].partition("'")[0]
        self.exit(2, f"{self.prog}: {message}{nearest(word, COMMANDS) if word else ''}\n")


def parsers(
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


def complete(parser: argparse.ArgumentParser) -> None:
    """Completion in the shell, where argcomplete is installed."""
    if not is_completing():
        return
    try:
        argcomplete = importlib.import_module("argcomplete")
    except ImportError:
        return
    argcomplete.autocomplete(parser)


def refuse(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """Says which flags a command does not have, and which they are most like."""
    flags = [flag for action in parser._actions for flag in action.option_strings]
    told = [
        given + nearest(given.partition("=")[0], flags) if given.startswith("-") else given
        for given in unknown
    ]
    theirs = "; the script's own come after --" if parser.prog.endswith(" audit") else ""
    parser.error(f"unrecognized arguments: {' '.join(told)}{theirs}")
