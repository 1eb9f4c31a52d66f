"""The command line, a module for each command."""

# PYTHON_ARGCOMPLETE_OK

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

from commgrid.cli.output import guarded
from commgrid.cli.parser import complete, parsers, refuse
from commgrid.errors import CommGridError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status, 2 where the input is wrong."""
    _write_what_it_can()
    return guarded(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    parser, commands = parsers(words)
    complete(parser)
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
            refuse(commands[args.command], unknown)
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
