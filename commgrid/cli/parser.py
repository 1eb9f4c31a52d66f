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

HEADINGS = {
    "before a job": ("plan", "explain", "show", "presets", "diff"),
    "on the cluster": ("check", "bench"),
    "while it hangs": ("dump", "diagnose", "trace"),
    "is it right": ("verify", "audit"),
}
COMMANDS = {
    "plan": "groups, sizes, communicators, and what start-up or a step costs",
    "explain": "one rank's coordinate, and its peers in every group",
    "show": "pictures of a grid, or of a pipeline's schedule",
    "presets": "grids that others use, by name; any of them as YAML",
    "diff": "what changes between two grids: sizes, names, neighbours, communicators",
    "check": "under torchrun or srun: start the grid and try every communicator",
    "bench": "under torchrun or srun: latency and bandwidth of every communicator",
    "dump": "where each rank of a job on this host is, and its last calls",
    "diagnose": "which rank a job waits for, and in which call",
    "trace": "what ranks have recorded: a table, a page, or a file for Perfetto",
    "verify": "whether what ranks have recorded can finish, by NCCL's rules and gloo's",
    "audit": "run a training script on several grids, and say where they part",
}


class _Parser(argparse.ArgumentParser):
    """argparse, whose errors are one line, with the nearest command, and which abbreviates no flag.

    Attributes:
        rare: flags that only `--help-all` shows, by their names in Python.
    """

    def __init__(self, **about: Any) -> None:
        super().__init__(**about, allow_abbrev=False)
        self.rare: frozenset[str] = frozenset()

    def format_help(self, whole: bool = False) -> str:
        hidden = [] if whole else [each for each in self._actions if each.dest in self.rare]
        helps = [each.help for each in hidden]
        try:
            for each in hidden:
                each.help = argparse.SUPPRESS
            return super().format_help()
        finally:
            for each, text in zip(hidden, helps, strict=True):
                each.help = text

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
        usage="commgrid [-h] [--version] COMMAND ...",
        description=_listed(),
        epilog="`commgrid COMMAND --help` has examples.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = _version() if "--version" in (words or ()) else VERSION
    parser.add_argument("--version", action="version", version=version)
    commands: Any = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", help=argparse.SUPPRESS, prog="commgrid"
    )
    known = [name for name in wanted if name in COMMANDS]
    for name in known:
        _add_command(commands, name)
    for name in () if known else COMMANDS:  # for the error of a word that is none of them
        commands.add_parser(name, add_help=False)
    return parser, commands.choices


def _add_command(commands: Any, name: str) -> None:
    """Adds a command: its help, `--json`, and the flags of its module."""
    module = importlib.import_module(f"commgrid.cli.commands.{name}")
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        description=module.DESCRIPTION,
        epilog=module.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON for machines")
    parser.add_argument("--help-all", action=_HelpAll, help="show the flags that few need, too")
    parser.set_defaults(run=module.run)
    module.add_options(parser)


class _HelpAll(argparse.Action):
    """`--help-all`: prints every flag, and ends."""

    def __init__(self, **about: Any) -> None:
        super().__init__(**about, nargs=0, default=argparse.SUPPRESS)

    def __call__(self, parser: Any, *_: object) -> None:
        print(parser.format_help(whole=True), end="")
        parser.exit()


def _listed() -> str:
    """The commands by what they are for."""
    lines = ["Plan, explain, check, measure and draw the communicators of a training job."]
    for title, names in HEADINGS.items():
        lines += ["", f"{title}:", *(f"  {name:<9} {COMMANDS[name]}" for name in names)]
    return "\n".join(lines)


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
    given: list[list[str]] = []  # each flag with its values
    for word in unknown:
        if word.startswith("-") or not given:
            given.append([word])
        else:
            given[-1].append(word)
    told = [
        " ".join(words)
        + (nearest(words[0].partition("=")[0], flags) if words[0].startswith("-") else "")
        for words in given
    ]
    theirs = "; the script's own come after --" if parser.prog.endswith(" audit") else ""
    parser.error(f"unrecognized arguments: {' '.join(told)}{theirs}")
