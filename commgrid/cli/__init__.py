"""The command line: `commgrid plan`, `commgrid explain`, `commgrid check`, `commgrid show`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from commgrid.cli import check, explain, plan, show
from commgrid.errors import CommGridError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status, 0 or 2 where the input is wrong."""
    parser = argparse.ArgumentParser(
        prog="commgrid",
        description="Plan, explain and check the communicators of a training job.",
        epilog="`commgrid COMMAND --help` has examples.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (plan, explain, check, show):
        module.add_parser(commands)
    args = parser.parse_args(argv)
    try:
        status: int = args.run(args)
    except CommGridError as error:
        print(f"commgrid {args.command}: {error}", file=sys.stderr)
        return 2
    return status
