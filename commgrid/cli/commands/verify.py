"""`commgrid verify`: whether ranks that issue what a trace holds all come to an end."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from commgrid.call_analysis.finding import without_record
from commgrid.call_analysis.program import from_traces, whole
from commgrid.call_analysis.standing import Standings
from commgrid.call_analysis.verification import Verdict, check
from commgrid.call_records import files as trace_files
from commgrid.cli.output import give
from commgrid.errors import SpecError

DESCRIPTION = "Decides from traces of a step whether every rank can finish it."
EXAMPLES = """examples:
  COMMGRID_TRACE=runs/trace torchrun --nproc-per-node 8 train.py --steps 1
  commgrid verify runs/trace
  commgrid verify runs/trace --backend nccl --strict

A run over gloo that came to its end may not over NCCL, where calls of one communicator run one
after another. Exit status: 0: all finish; 1: ranks would wait for ever, and the calls are named;
2: the traces cannot be read, or are incomplete; 3: all that is known finishes, and not all is.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder of COMMGRID_TRACE")
    parser.add_argument(
        "--backend", choices=("nccl", "gloo"), help="whose rules (default: both's, one by one)"
    )
    parser.add_argument(
        "--strict", action="store_true",
        help="also 1 where calls of two communicators have to run at once, which NCCL's guide does "
        "not promise",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    if args.strict and args.backend == "gloo":
        raise SpecError("--strict is about NCCL's guide; leave --backend gloo out")
    traces = trace_files.read(args.folder)
    standings = Standings(traces)
    absent, known = standings.missing(), whole(standings)
    left_out = sum(len(a.calls) - len(b.calls) for a, b in zip(traces, known, strict=True))
    made = from_traces(known)
    rules = [args.backend] if args.backend else ["nccl", "gloo"]
    # Programs that finish under strict rules do so under the others, which only let calls begin
    # earlier; unless messages meet by tags, which gloo alone looks at.
    strict = check(made, "strict")
    is_plain = strict.finishes and not any(call.tag for t in known for call in t.calls)
    found = [replace(strict, rules=r) if is_plain else check(made, r) for r in rules]
    judged = [*found, strict] if args.strict else found
    finishes = all(each.finishes for each in judged)
    give(
        args,
        lambda: {
            "ranks": found[0].ranks, "calls": found[0].calls, "finishes": finishes,
            "missing": list(absent), "not_checked": left_out,
            "verdicts": [each.as_dict() for each in (*found, strict)],
        },
        lambda: _as_text(found, strict) + _not_checked(absent, left_out),
    )  # fmt: skip
    return 1 if not finishes else 3 if absent or left_out else 0


def _as_text(found: list[Verdict], strict: Verdict) -> str:
    """Rules under which all finish on one line, then each other with its reason, then warnings."""
    fine = [each for each in found if each.finishes]
    parts = []
    if fine:
        whose = " and ".join(f"{each.rules}'s" for each in fine)
        parts.append(
            f"{fine[0].ranks:,} ranks, {fine[0].calls:,} calls: all finish under {whose} rules"
        )
    parts += [_reason(each) for each in found if not each.finishes]
    if not strict.finishes and fine and fine[0].rules == "nccl":
        parts.append(
            "careful: over nccl they finish only where calls of two communicators run at once, "
            f"which its guide does not promise; {_reason(strict)}"
        )
    return "\n\n".join(parts)


def _not_checked(absent: tuple[int, ...], left_out: int) -> str:
    if absent:
        return (
            f"\n\nnot checked: {without_record(absent, None)}; nor are the calls they take part in"
        )
    if left_out:
        return (
            f"\n\nnot checked: {left_out:,} calls whose other sides are not known; the job runs or "
            "was stopped, a rank ended its recording or receives from any source, or a "
            "communicator was not recorded"
        )
    return ""


def _reason(verdict: Verdict) -> str:
    return f"{verdict}\n\n{verdict.draw()}"
