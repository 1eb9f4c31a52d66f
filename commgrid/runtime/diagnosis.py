"""Who differs, who is missing: what a rank finds out when an agreement fails, and says.

Every rank of a meeting leaves a mark in the store: where it is, and its document where that is not
the first one's. An examiner reads them all and writes a verdict, from which each rank makes its
error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

from commgrid.errors import CommGridError, GridMismatchError, PeerFailedError, PeerTimeoutError


class Store(Protocol):
    """What is used of a `torch.distributed.Store`."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, value: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


class Examiner:
    """Reads and writes marks, and concludes from all of them who it is about.

    Args:
        store: shared by all ranks of the world.
        name: what they meet for, the grid's name.
        rank: this process's global rank.
        ranks: the ranks that should come.
    """

    def __init__(self, store: Store, name: str, rank: int, ranks: range) -> None:
        self._store, self._name, self._rank, self._ranks = store, name, rank, ranks

    def mark(self, base: str, phase: str, document: str) -> None:
        """Writes where this rank is: in which meeting and phase, with which document."""
        mark = {"at": base, "phase": phase, "document": document}
        self._store.set(f"{self._name}/rank/{self._rank}", json.dumps(mark))

    def read_mark(self, rank: int) -> dict[str, str]:
        """What a rank wrote last; empty if it never did."""
        key = f"{self._name}/rank/{rank}"
        return dict(json.loads(self._store.get(key))) if self._store.check([key]) else {}

    def verdict(self, base: str, phase: str = "compare") -> dict[str, Any]:
        """The verdict of a meeting's phase, empty while there is none."""
        key = f"{base}/{phase}/verdict"
        return dict(json.loads(self._store.get(key))) if self._store.check([key]) else {}

    def mismatch(self, base: str, first: str) -> dict[str, Any]:
        """A verdict with every document and the ranks that hold it, and the meetings of this name
        that some of them wait in because their ranks begin with another one."""
        holders: dict[str, list[int]] = {}
        meetings = {base}
        for rank in self._everyone(first):
            mark = self.read_mark(rank)
            if not mark:
                continue
            if mark["at"] != base:
                verdict = self.verdict(mark["at"])
                if base in verdict.get("meetings", ()):
                    return verdict  # reached there at this moment, about this meeting too
                if verdict:
                    continue  # of a meeting that is over
                meetings.add(mark["at"])
            document = mark["document"] or self._store.get(f"{mark['at']}/document").decode()
            holders.setdefault(document, []).append(rank)
        return {
            "kind": "mismatch",
            "holders": list(holders.items()),
            "meetings": sorted(meetings),
        }

    def _everyone(self, first: str) -> list[int]:
        """The ranks that any document seen here speaks of."""
        spans = [self._ranks, range(*json.loads(first)["ranks"])] if first else [self._ranks]
        return sorted({rank for span in spans for rank in span} | {self._rank})

    def absence(self, base: str, phase: str, first: str) -> dict[str, Any]:
        """The verdict when time is up: who is missing, or waits for somebody else."""
        if phase == "compare":
            found = self.mismatch(base, first)
            if len(found["holders"]) > 1:
                return found
        arrived: list[int] = []
        missing: list[int] = []
        for rank in self._everyone(first):
            mark = self.read_mark(rank)
            here = mark.get("at") == base and mark.get("phase") in (phase, "ready")
            (arrived if here else missing).append(rank)
        return {"kind": "absent", "phase": phase, "missing": missing, "arrived": arrived}

    def error(self, verdict: dict[str, Any]) -> CommGridError:
        """The error that a verdict is on this rank."""
        name = f"grid {self._name!r}"
        if verdict["kind"] == "failed":
            return PeerFailedError(f"{name}: rank {verdict['rank']} failed: {verdict['error']}")
        if verdict["kind"] == "mismatch":
            return GridMismatchError(f"{name}: {describe_mismatch(verdict['holders'])}")
        missing, arrived = describe_ranks(verdict["missing"]), describe_ranks(verdict["arrived"])
        if self._rank in verdict["missing"]:
            return PeerTimeoutError(
                f"{name}: {missing} came too late; {arrived} had given up waiting"
            )
        did = "arrive" if verdict["phase"] == "compare" else f"get as far as {verdict['phase']!r}"
        return PeerTimeoutError(
            f"{name}: {missing} did not {did} within startup_timeout ({arrived} did); is every "
            "process running, and does each call initialize with this name and these ranks?"
        )


def describe_ranks(ranks: list[int]) -> str:
    """Ranks in words, runs joined.

    >>> describe_ranks([0, 1, 2, 4]), describe_ranks([3]), describe_ranks([])
    ('ranks 0-2, 4', 'rank 3', 'no rank')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    listed = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}" if ranks else "no rank"


def describe_mismatch(holders: list[tuple[str, list[int]]]) -> str:
    """Which keys differ, and who says what, the few named before the many."""
    flat = [(_flatten(json.loads(document)), ranks) for document, ranks in holders]
    keys = dict.fromkeys(key for document, _ in flat for key in document)
    parts = []
    for key in keys:
        said: dict[str, list[int]] = {}
        for document, ranks in flat:
            said.setdefault(repr(document.get(key, "not given")), []).extend(ranks)
        if len(said) > 1:
            fewest_first = sorted(said.items(), key=lambda item: len(item[1]))
            listed = " and ".join(f"{value} on {describe_ranks(r)}" for value, r in fewest_first)
            parts.append(f"{key} is {listed}")
    # Nothing differs but the order, which is the order in which groups are created.
    text = "; ".join(parts) or "the rows of groups come in different orders"
    return f"ranks disagree: {text}; give every rank the same"


def _flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat.update(_flatten(item, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = item
    return flat
