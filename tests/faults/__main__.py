"""Prints the fault matrix, a line for each row; or soaks, or fuzzes."""

from __future__ import annotations

import argparse
import os
import sys

from commgrid.testing import run_on_ranks
from tests.faults.expected import line, table, wrong
from tests.faults.jobs import AT_ONCE, ROWS, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("words", nargs="*", help="only rows with all of these, such as SIGSTOP")
    parser.add_argument("--table", action="store_true", help="a Markdown table at the end")
    parser.add_argument("--times", type=int, default=1, help="how often each row is run")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="how many rows")
    parser.add_argument("--verbose", action="store_true", help="what each survivor has seen")
    parser.add_argument("--soak", action="store_true", help="1,000 grids and 10,000 steps instead")
    parser.add_argument("--fuzz", type=int, metavar="N", help="so many mad command lines instead")
    args = parser.parse_args()
    if args.soak or args.fuzz:
        return _soak() if args.soak else _fuzz(args.fuzz)
    # As in conftest.py: a store's server looks up who connects, for 5 s where nobody answers.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    rows = [row for row in ROWS if all(word in str(row) for word in args.words)]
    outcomes, problems = [], []
    for outcome in run(rows * args.times, args.at_once):
        outcomes.append(outcome)
        problems += wrong(outcome)
        print(line(outcome), flush=True)
        for rank, seen in outcome.survivors.items() if args.verbose else ():
            print(f"    rank {rank}, {seen.raised:.1f} s, {seen.kind}: {seen.message}")
    if args.table:
        print(table(sorted(outcomes, key=lambda one: ROWS.index(one.row))))
    print(*problems, f"{len(outcomes)} rows, {len(problems)} problems", sep="\n")
    return 1 if problems else 0


def _soak() -> int:
    from tests.faults.soak import grown, soak

    ranks = run_on_ranks(soak, 4, 1000, 10_000, backend=None, launcher="torchrun", timeout=3000)
    problems = []
    for rank, found in enumerate(ranks):
        for what, seen in found.items():
            named = zip(("files", "threads", "MiB", "keys"), zip(*seen, strict=True), strict=True)
            for name, numbers in named:
                print(f"rank {rank}, {what}: {name} {' '.join(f'{n:g}' for n in numbers)}")
            problems += grown(seen)
    print(*problems, f"{len(problems)} problems", sep="\n")
    return 1 if problems else 0


def _fuzz(cases: int) -> int:
    from tests.faults.fuzz import fuzz

    each = 1000
    seeds = [(seed, min(each, cases - each * seed)) for seed in range(-(-cases // each))]
    found = [
        one for job in seeds for one in run_on_ranks(fuzz, 1, *job, backend=None, timeout=900)[0]
    ]
    print(*found, f"{cases} cases, {len(found)} problems", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
