"""`python -m megatron_adapter names | scan PATH`."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter

from commgrid.cli.output import guarded
from commgrid.errors import CommGridError
from megatron_adapter.names import MEGATRON_GROUPS, as_text
from megatron_adapter.scan import scan


def main() -> None:
    sys.exit(guarded(_run))


def _run() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_adapter", description="Megatron-core's groups on a commgrid grid."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    names = commands.add_parser("names", help="which commgrid group each of Megatron's is")
    reads = commands.add_parser(
        "scan",
        help="where code reads Megatron's global parallel state",
        description="Lists reads of Megatron's global parallel state, as file:line: name. Exits "
        "with 1 if there are any.",
    )
    reads.add_argument("path", metavar="PATH", help="a Python file, or a folder of them")
    for command in (names, reads):
        command.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    if args.command == "scan":
        return _scan(args.path, args.json)
    print(json.dumps([row._asdict() for row in MEGATRON_GROUPS]) if args.json else as_text())
    return 0


def _scan(path: str, as_json: bool) -> int:
    try:
        found = scan(path)
    except CommGridError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    if as_json:
        rows = [{"path": str(read.path), "line": read.line, "name": read.name} for read in found]
        print(json.dumps(rows))
        return int(bool(found))
    for read in found:
        print(read)
    counts = Counter(read.name for read in found)
    listed = ", ".join(f"{name} {count}" for name, count in counts.most_common(5))
    print(f"{len(found)} reads of Megatron's global parallel state" + (f": {listed}" * bool(found)))
    return int(bool(found))


if __name__ == "__main__":
    main()
