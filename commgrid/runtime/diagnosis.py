"""Who differs, who is missing: what one rank finds out when an agreement fails, for all to say.

The examiner reads the rolls of a meeting and writes a verdict: a message, and the few facts that a
rank needs beside it. The others read that one key, so that a failure costs a rank the same at
16,384 ranks as at 8.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from commgrid.errors import CommGridError, GridMismatchError, PeerFailedError, PeerTimeoutError
from commgrid.planning.rank_lists import describe_ranks, pack, unpack
from commgrid.planning.ranks import RankTuple
from commgrid.runtime.roll import Roll, Store

MOST_DOCUMENTS = 8
"""So many documents that differ from the first are told apart; more are counted together."""
CALL, LIMIT = "initialize with this name and these ranks", "startup_timeout"
"""What ranks do to come to a meeting, and what the user limits its time with: a grid's start."""
_LONGEST_MESSAGE = 4000


def ranks_entry(ranks: Sequence[int]) -> list[int] | dict[str, str]:
    """Ranks as a document holds them: short, whatever their number, and different for other orders.

    >>> ranks_entry(range(4)), ranks_entry((0, 1, 2, 4))
    ([0, 4, 1], {'set': '0-2,4', 'order': 'rising'})
    """
    if isinstance(ranks, range):
        return [ranks.start, ranks.stop, ranks.step]
    order = "rising" if list(ranks) == sorted(ranks) else str(RankTuple(ranks))
    return {"set": pack(ranks), "order": order}


def ranks_of(document: str) -> Sequence[int]:
    """The ranks that a document speaks of, rising."""
    entry = json.loads(document)["ranks"]
    return range(*entry) if isinstance(entry, list) else sorted(unpack(entry["set"]))


class Examiner:
    """Concludes who it is about from what ranks have left at the store.

    Args:
        store: shared by all ranks of the world; not waited on.
        name: what they meet for, the grid's name.
        rank: this process's global rank.
        document: this rank's.
        about: what messages speak of, as a Meeting has it.
        call, limit: as a Meeting takes them.
    """

    def __init__(
        self, store: Store, name: str, rank: int, document: str, about: str, call: str, limit: str
    ) -> None:
        self._store, self._name, self._rank, self._document = store, name, rank, document
        self._about, self._call, self.limit = about, call, limit

    # -- what ranks leave ---------------------------------------------------------------

    def differs(self, base: str) -> None:
        """Leaves this rank's document, which is not the first one's."""
        found = (
            k
            for k in range(1, MOST_DOCUMENTS + 1)
            if self._store.compare_set(f"{base}/document/{k}", "", self._document).decode()
            == self._document
        )
        kind = next(found, MOST_DOCUMENTS + 1)
        self._store.add(f"{base}/differing", 1)
        Roll(self._store, f"{base}/holders/{kind}", ()).come(self._rank)

    def open_room(self, room: str) -> None:
        """Lists a room of this name, where ranks of other grids' ranges look for missing ones."""
        mine = f"{self._rank}"
        if self._store.compare_set(f"{room}/listed", "", mine).decode() == mine:
            number = self._store.add(f"{self._name}/rooms", 1)
            self._store.set(f"{self._name}/rooms/{number}", room)

    def enter_lobby(self, room: str, number: int) -> None:
        """Says that this rank waits for the one that opens a room's next meeting."""
        self.open_room(room)
        base = f"{room}/{number}/lobby"
        self._store.compare_set(f"{base}/document", "", self._document)
        Roll(self._store, base, ()).come(self._rank)

    # -- what an examiner finds ---------------------------------------------------------

    def absence(self, room: str, number: int, phase: str, opened: str) -> dict[str, Any]:
        """The verdict when time is up: who is missing, or waits for somebody else.

        Args:
            phase: how far the meeting has come; `lobby` where nobody has opened it.
            opened: the document it was opened with, or this rank's.
        """
        base = f"{room}/{number}"
        everyone = self._everyone(base, opened)
        here = set(Roll(self._store, f"{base}/{phase}", ()).here(everyone))
        missing = [rank for rank in everyone if rank not in here]
        if phase in ("compare", "lobby"):
            holders, meetings = self._holders(base, opened, sorted(here)), [base]
            for other, document, found in self._elsewhere(room, missing) if missing else ():
                holders.append((document, found))
                meetings.append(other)
            if len(holders) > 1:
                return self._mismatch(holders, meetings)
        return self._absent(phase, missing, sorted(here))

    def mismatch(self, room: str, number: int, opened: str) -> dict[str, Any]:
        """The verdict where all are here and some differ: every document and who holds it."""
        base = f"{room}/{number}"
        here = Roll(self._store, f"{base}/compare", ()).here(self._everyone(base, opened))
        return self._mismatch(self._holders(base, opened, here), [base])

    def disagreement(self, opened: str) -> dict[str, Any]:
        """What this rank is told where the others have agreed without it."""
        holders = [(opened, list(ranks_of(opened))), (self._document, [self._rank])]
        return self._mismatch(holders, [])

    def everyone_is_here(self, base: str, opened: str) -> bool:
        """Whether all ranks that any document here speaks of have come."""
        everyone = self._everyone(base, opened)
        return len(Roll(self._store, f"{base}/compare", ()).here(everyone)) == len(everyone)

    def _documents(self, base: str) -> Iterator[tuple[int, str]]:
        """Those that differ from the first, by number."""
        for kind in range(1, MOST_DOCUMENTS + 1):
            key = f"{base}/document/{kind}"
            if not self._store.check([key]):
                return
            yield kind, self._store.get(key).decode()

    def _everyone(self, base: str, opened: str) -> list[int]:
        """The ranks that any document of a meeting speaks of."""
        texts = [opened, self._document, *(text for _, text in self._documents(base))]
        return sorted({self._rank}.union(*(ranks_of(text) for text in set(texts))))

    def _holders(self, base: str, opened: str, here: list[int]) -> list[tuple[str, list[int]]]:
        """Each document and the ranks that have come with it; an empty one for all the others."""
        found: list[tuple[str, list[int]]] = []
        if self._store.check([f"{base}/differing"]):
            kinds = [*self._documents(base), (MOST_DOCUMENTS + 1, "")]
            for kind, text in kinds:
                holding = Roll(self._store, f"{base}/holders/{kind}", ()).here(here)
                found += [(text, holding)] if holding else []
        others = {rank for _, ranks in found for rank in ranks}
        rest = [rank for rank in here if rank not in others]
        return [(opened, rest), *found] if rest else found

    def _elsewhere(self, room: str, missing: list[int]) -> Iterator[tuple[str, str, list[int]]]:
        """Meetings of this name, by other first ranks, in which some of the missing ranks are."""
        for index in range(1, self._store.add(f"{self._name}/rooms", 0) + 1):
            key = f"{self._name}/rooms/{index}"
            other = self._store.get(key).decode() if self._store.check([key]) else room
            if other == room:
                continue
            base = f"{other}/{latest(self._store, other)[0]}"
            if self._store.check([f"{base}/compare/verdict"]):
                continue
            for place, key in (("compare", f"{base}/opening"), ("lobby", f"{base}/lobby/document")):
                if not self._store.check([key]):
                    continue
                text = self._store.get(key).decode()
                if place == "compare":
                    text = json.loads(text).get("document", "")
                found = Roll(self._store, f"{base}/{place}", ()).here(missing)
                if found and text:
                    yield base, text, found
                    break

    # -- verdicts and errors ------------------------------------------------------------

    def _mismatch(
        self, holders: list[tuple[str, list[int]]], meetings: list[str]
    ) -> dict[str, Any]:
        return {
            "kind": "mismatch",
            "message": _shortened(describe_mismatch(holders)),
            "meetings": meetings,
            "present": sum(len(ranks) for _, ranks in holders),
        }

    def _absent(self, phase: str, missing: list[int], here: list[int]) -> dict[str, Any]:
        if not missing:
            who = f"rank {here[0]}" if phase == "compare" else "the last of them"
            return {
                "kind": "absent", "missing": "", "present": len(here),
                "message": f"{describe_ranks(here)} have all come, and {who}, who says so to the "
                f"others, has not answered until {self.limit} was over; has its process ended?",
            }  # fmt: skip
        arrived = phase in ("compare", "lobby")
        did = "arrive" if arrived else f"get as far as {phase!r}"
        return {
            "kind": "absent",
            "missing": pack(missing),
            "present": len(here),
            "message": _shortened(
                f"{describe_ranks(missing)} did not {did} within {self.limit} "
                f"({describe_ranks(here)} did); is every process running, and does each call "
                f"{self._call}?"
            ),
            "late": _shortened(
                f"{describe_ranks(missing)} came too late; {describe_ranks(here)} had given up "
                "waiting"
            ),
        }

    def error(self, verdict: Mapping[str, Any]) -> CommGridError:
        """The error that a verdict is on this rank."""
        if verdict["kind"] == "absent":
            late = self._rank in unpack(verdict["missing"])
            return PeerTimeoutError(f"{self._about}: {verdict['late' if late else 'message']}")
        kinds: dict[str, type[CommGridError]] = {
            "mismatch": GridMismatchError, "failed": PeerFailedError,
        }  # fmt: skip
        return kinds[verdict["kind"]](f"{self._about}: {verdict['message']}")


def latest(store: Store, room: str) -> tuple[int, bool]:
    """The number of a room's meeting that is open or next, and whether it was opened already."""
    key = f"{room}/latest"
    if not store.check([key]):
        return 1, False
    number, _, over = store.get(key).decode().partition(" ")
    return (int(number) + 1, False) if over else (int(number), True)


def describe_mismatch(holders: Iterable[tuple[str, Sequence[int]]]) -> str:
    """Which keys differ, and who says what, the few named before the many.

    Args:
        holders: documents and the ranks that hold them; an empty one stands for several others.
    """
    listed = list(holders)
    flat = [(_flatten(json.loads(text)), ranks) for text, ranks in listed if text]
    uncounted = [rank for text, ranks in listed if not text for rank in ranks]
    keys = dict.fromkeys(key for document, _ in flat for key in document)
    parts = []
    for key in keys:
        said: dict[str, list[int]] = {}
        for document, ranks in flat:
            said.setdefault(repr(document.get(key, "not given")), []).extend(ranks)
        if len(said) > 1:
            fewest_first = sorted(said.items(), key=lambda item: len(item[1]))
            told = " and ".join(f"{value} on {describe_ranks(r)}" for value, r in fewest_first)
            parts.append(f"{key} is {told}")
    if uncounted:
        parts.append(f"{describe_ranks(uncounted)} differ in further ways")
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


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]} …"
