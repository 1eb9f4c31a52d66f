"""Find what is wrong among ranks from their records: which rank waits for which, in which call.

    rank 1 ──► dp all_reduce 17 ──► rank 5 ──► none          rank 5 is the cause
    rank 0 ──► tp ──► rank 1 ──► dp ──► rank 0               a circle: a deadlock

    records ──► events, and where each thread stands ──► findings

Nothing here needs torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from commgrid.call_analysis.finding import Diagnosis, Finding
from commgrid.call_analysis.mismatch import mismatches
from commgrid.call_analysis.program import crossed_group
from commgrid.call_analysis.standing import Standings
from commgrid.call_analysis.straggler import slow_ranks
from commgrid.call_analysis.wait_end import consequences, deaths, ends, lasting
from commgrid.call_records import files as trace_files
from commgrid.call_records import flight_recorder
from commgrid.call_records.trace import Trace
from commgrid.errors import SpecError

PATIENCE = 1.0
"""Seconds for which a rank may wait before that is worth a word."""


def read(folder: Path) -> list[Trace]:
    """The records of all ranks in a folder, commgrid's or of torch's flight recorder, with stacks.

    Raises:
        SpecError: there are none, or a file is something else.
    """
    if not os.path.isdir(folder) or trace_files.has_traces(folder):
        found = trace_files.read(folder)  # which says what is wrong with it
    elif paths := flight_recorder.in_folder(folder):
        found = flight_recorder.read(paths)
    else:
        raise SpecError(
            f"{folder}: has no rank_*.ring and no dump of torch's flight recorder, whose names end "
            "in a rank; name the folder of COMMGRID_TRACE, of trace.save or of commgrid dump"
        )
    return with_stacks(folder, found)


def with_stacks(folder: Path, found: Iterable[Trace]) -> list[Trace]:
    """Records with the stacks beside them in a folder."""
    return [replace(trace, stacks=_stacks(folder, trace)) for trace in found]


def _stacks(folder: Path, trace: Trace) -> str:
    """The stacks of a rank that were written since its last call."""
    path = folder / f"rank_{trace.rank:05}.stacks"
    last = max((call.began for call in trace.calls), default=0.0)
    if not path.exists() or path.stat().st_mtime < last:
        return ""
    return path.read_text(encoding="utf-8", errors="replace")


def diagnose(
    found: Iterable[Trace], patience: float = PATIENCE, asked: float | None = None
) -> Diagnosis:
    """Find what is wrong among ranks, the first cause first.

    Args:
        found: the record of each rank.
        patience: seconds that a wait may last.
        asked: seconds in which ranks could have answered; None: their records are in a folder.
    """
    found = list(found)
    standings = Standings(found, asked)
    missing = standings.missing()
    waits = lasting(standings, patience)
    crossed = crossed_group(found)
    wrong = [] if crossed is None else [crossed]
    wrong += mismatches(standings.matched.events.values())
    known = {(each.group, each.members, each.turn) for each in wrong}
    late = [
        each for each in ends(standings, waits, patience)
        if (each.group, each.members, each.turn) not in known
    ]  # fmt: skip
    named = {rank for each in late if each.kind == "killed" for rank in each.ranks}
    late += [each for each in deaths(standings) if not named.issuperset(each.ranks)]
    causes = [*wrong, *sorted(late, key=_order)]
    if not causes and not missing:
        causes = [*slow_ranks(standings)]
    first, more = _by_culprit(causes)
    waiting: dict[int, set[int]] = {}
    for wait in waits:
        if wait.needs:
            waiting.setdefault(wait.rank, set()).update(wait.needs)
    return Diagnosis(
        tuple(sorted(standings.traces)), tuple(first),
        (*more, *consequences(waits, [*first, *more])), missing,
        {rank: tuple(sorted(others)) for rank, others in sorted(waiting.items())},
        standings.incomplete(), asked,
    )  # fmt: skip


def _by_culprit(findings: list[Finding]) -> tuple[list[Finding], list[Finding]]:
    """The first of each rank, and what else it has led to."""
    first: list[Finding] = []
    more: list[Finding] = []
    for each in findings:
        known = {rank for other in first for rank in other.ranks}
        (more if known and known >= set(each.ranks) else first).append(each)
    return first, more


def _order(finding: Finding) -> tuple[bool, bool, float]:
    """Killed ranks first, open questions last."""
    return finding.severity == "unknown", finding.kind != "killed", finding.since
