"""Findings of a diagnosis: each a cause or a consequence, in words and as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from commgrid.layout.rank_text import describe_ranks as said

Severity = Literal["error", "warning", "unknown"]

_SEVERITIES: dict[str, Severity] = {
    "slow rank": "warning", "missing rank": "unknown", "silent rank": "unknown",
    "possible deadlock": "unknown",
}  # fmt: skip
_CIRCLES = ("deadlock", "crossed transfers", "possible deadlock")
_EXCLUDED = ("ended early", "killed", "stopped", "slow rank")  # kinds


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, or that waits for what is.

    Args:
        kind: `skipped call`, `other order`, `deadlock`, …; docs/debugging.md lists all.
        ranks: whose doing it is.
        group: the communicator's names, comma-separated.
        members: its ranks.
        operation, turn: of the call, and its place among those of the communicator.
        where: file, line and function of the calls that matter, the culprit's first.
        waiting: the ranks that wait.
        since: when it began, in seconds of the wall clock.
        seconds: the longest wait; None: no rank waits, or it is not known.
        text: all of it in words.
    """

    kind: str
    ranks: tuple[int, ...]
    group: str
    members: tuple[int, ...]
    operation: str
    turn: int
    where: tuple[str, ...]
    waiting: tuple[int, ...]
    since: float
    seconds: float | None
    text: str

    @property
    def severity(self) -> Severity:
        """`error`: ranks hang, or go wrong; `warning`: slow; `unknown`: records cannot tell."""
        return _SEVERITIES.get(self.kind, "error")

    @property
    def is_circle(self) -> bool:
        """Whether its ranks wait for each other."""
        return self.kind in _CIRCLES

    @property
    def exclude(self) -> tuple[int, ...]:
        """The ranks to leave out when restarting; none of them waits for others."""
        return self.ranks if self.kind in _EXCLUDED else ()

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {**asdict(self), "severity": self.severity, "exclude": list(self.exclude)}


@dataclass(frozen=True)
class Diagnosis:
    """Everything wrong among ranks, the first cause first.

    Args:
        ranks: of which there are records.
        causes: findings that follow from no other; the first is the one to look at.
        consequences: who waits for them.
        missing: ranks of which there are none.
        waiting: of each rank that waits, for whom.
        incomplete: ranks of which the records end before calls that others have issued.
        asked: seconds in which ranks could have answered; None: their records are in a folder.
    """

    ranks: tuple[int, ...]
    causes: tuple[Finding, ...]
    consequences: tuple[Finding, ...]
    missing: tuple[int, ...]
    waiting: dict[int, tuple[int, ...]]
    incomplete: tuple[int, ...] = ()
    asked: float | None = None

    def __bool__(self) -> bool:
        """Whether anything is wrong, or waits for ranks of which there are no records."""
        return bool(self.causes)

    @property
    def is_open(self) -> bool:
        """Whether nothing is known to be wrong, and records do not tell that all is right."""
        is_known = any(each.severity != "unknown" for each in self.causes)
        return not is_known and bool(self.missing or self.incomplete or self.causes)

    @property
    def severity(self) -> Severity | None:
        """The worst of the causes'; None: there is none."""
        found = {each.severity for each in self.causes}
        worst: tuple[Severity, ...] = ("error", "warning", "unknown")
        return next((each for each in worst if each in found), None)

    def behind(self, rank: int) -> list[int]:
        """Return a rank, and the ranks that wait for it directly or by way of others.

        >>> waiting = {0: (1,), 1: (0,), 2: (1,), 3: (4,)}
        >>> Diagnosis((), (), (), (), waiting).behind(0)
        [0, 1, 2]
        """
        found, more = set[int](), {rank}
        while more:
            found |= more
            more = {each for each, others in self.waiting.items() if found & {*others}} - found
        return sorted(found)

    def as_dict(self) -> dict[str, Any]:
        """As `commgrid diagnose --json` prints it."""
        return {
            "ranks": list(self.ranks),
            "missing": list(self.missing),
            "incomplete": list(self.incomplete),
            "severity": self.severity,
            "exclude": sorted({rank for each in self.causes for rank in each.exclude}),
            "causes": [each.as_dict() for each in self.causes],
            "consequences": [each.as_dict() for each in self.consequences],
            "waiting": {str(rank): list(others) for rank, others in self.waiting.items()},
        }

    def __str__(self) -> str:
        if not self.causes:
            told = f"no fault found in the records of {said(self.ranks)}"
            unknown = [without_record(self.missing, self.asked)] if self.missing else []
            if self.incomplete:
                unknown.append(f"the record of {said(self.incomplete)} ends before others' calls")
            return f"{told}; not checked: {'; '.join(unknown)}" if unknown else told
        lines = [self.causes[0].text]
        lines += [f"also: {each.text}" for each in self.causes[1:_MOST]]
        lines += [f"then: {each.text}" for each in self.consequences[:_MOST]]
        left = max(len(self.causes) - _MOST, 0) + max(len(self.consequences) - _MOST, 0)
        return "\n".join([*lines, f"and {left} more"] if left else lines)


_MOST = 8


def without_record(ranks: Sequence[int], asked: float | None) -> str:
    """Ranks that have no record, in words.

    Args:
        ranks: which.
        asked: seconds in which they could have answered; None: a folder was read.

    Example:
        >>> without_record((1, 2), None), without_record((1,), 3.0)
        ('ranks 1-2 have no record there', 'rank 1 did not answer in 3 s')
    """
    if asked is not None:
        return f"{said(ranks)} did not answer in {asked:g} s"
    return f"{said(ranks)} {'has' if len(ranks) == 1 else 'have'} no record there"


def lasted(seconds: float) -> str:
    """A time in words.

    >>> lasted(0.25), lasted(31.4)
    ('0.2 s', '31 s')
    """
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
