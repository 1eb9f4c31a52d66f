"""Late call: a call that a rank has waited for too long, and what the other members say of it.

rank 0   call 4 on dp is late ──► asks the members
rank 1   ──► has made 4 calls on it, and waits itself
rank 2   ──► has made 3, waits for nothing, and is at train.py:31 in step
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

from commgrid.health.channel import Message
from commgrid.health.frames import is_programs
from commgrid.layout.rank_text import describe_ranks
from commgrid.rendezvous.timeouts import timeouts

_NAMED = 4


class Watched(Protocol):
    """One communicator, as the watch sees it; see `torch_compat.groups.CalledGroup`."""

    @property
    def name(self) -> str: ...
    @property
    def ranks(self) -> Sequence[int]: ...
    def error(self) -> str: ...
    def calls(self) -> int: ...
    def held(self) -> int: ...
    def waits(self) -> bool | None: ...


class LateCall:
    """The late call of one rank, if there is one, and its answers to others about theirs.

    Args:
        rank: this one.
        timeout: seconds that a call may take.
        tell: tells all ranks of the grid a message.
    """

    def __init__(self, rank: int, timeout: float, tell: Callable[[Message], object]) -> None:
        self._rank, self._timeout, self._tell = rank, timeout, tell
        self._on: Watched | None = None
        self._asked_at = 0.0
        self._waiting: set[int] = set()  # ranks with a late call
        self._answers: list[Message] = []
        self._held: dict[str, tuple[int, float]] = {}  # by communicator, a call and since when
        self._left: list[str] = []  # why ranks have left whom others may wait for

    def look(self, communicators: Sequence[Watched]) -> tuple[str, bool] | None:
        """Look for a failed or late call; return the failure once members have answered.

        Returns:
            Its text, and whether the lost rank may be alive; None: there is none, or not yet.
        """
        if self._on is not None:
            waited = time.monotonic() - self._asked_at
            patience = timeouts().answer if self._unanswered() else timeouts().settle
            return self._conclusion(self._on) if waited > patience else None
        for each in communicators:
            error = each.error() or ("timeout" if self._is_held(each) else "")
            if not error:
                continue
            self._asked_at, self._on = time.monotonic(), each
            if error == "timeout":
                self._waiting.add(self._rank)
                self._tell({
                    "kind": "late", "group": each.name, "ranks": list(each.ranks),
                    "calls": self._number(each),
                })  # fmt: skip
            break
        return None

    def hear(self, message: Message, communicators: Sequence[Watched]) -> None:
        """Handle a message of another rank."""
        kind = message["kind"]
        if kind == "late":
            self._waiting.add(int(message["by"]))
            self._answer(message, communicators)
        elif kind == "where" and self._rank in message["ranks"]:
            self._stands(message, communicators, "", behind=True)
        elif kind == "stands":
            self._answers.append(message)
        elif kind == "left":
            self._left.append(str(message["text"]))

    def where(self, ranks: Sequence[int]) -> str:
        """Ask ranks for the line of their main threads; return the answers: `it is at a.py:7`."""
        self._tell({"kind": "where", "ranks": list(ranks)})
        until = time.monotonic() + timeouts().seen
        found: dict[int, str] = {}
        while len(found) < len(ranks) and time.monotonic() < until:
            time.sleep(timeouts().poll)
            answers = list(self._answers)
            mine = [a for a in answers if a["for"] == self._rank and not a["call"]]
            found = {a["rank"]: a["where"] for a in mine if a["rank"] in ranks}
        return _places(found, len(ranks) > 1)

    def _is_held(self, each: Watched) -> bool:
        """Whether a thread was blocked for longer than `timeout` in a call not yet enqueued."""
        number, now = each.held(), time.monotonic()
        before, since = self._held.get(each.name, (0, now))
        if not number or number != before:
            since = now
        self._held[each.name] = number, since
        return bool(number) and now - since > self._timeout

    @staticmethod
    def _number(each: Watched) -> int:
        return max(each.calls(), each.held())

    def _answer(self, late: Message, communicators: Sequence[Watched]) -> None:
        """Say whether this rank has come to a call that another has waited for too long."""
        for each in communicators:
            if each.name == late["group"] and list(each.ranks) == late["ranks"]:
                behind = each.calls() < late["calls"]
                self._stands(late, communicators, f"call {late['calls']} on {each.name}", behind)
                return

    def _stands(
        self, question: Message, communicators: Sequence[Watched], call: str, behind: bool
    ) -> None:
        waits = {each.waits() for each in communicators}
        told = {
            "kind": "stands", "rank": self._rank, "for": int(question["by"]), "call": call,
            "behind": behind, "where": where_is(),
            "waits": True if True in waits else None if None in waits else False,
        }  # fmt: skip
        self._answers.append(told)
        self._tell(told)

    def _unanswered(self) -> set[int]:
        """Members of the group with the late call that have not answered."""
        assert self._on is not None
        if self._rank not in self._waiting:
            return set()
        mine = [a for a in self._answers if a["behind"] or a["for"] == self._rank]
        return set(self._on.ranks) - {self._rank} - {a["rank"] for a in mine if a["call"]}

    def _conclusion(self, on: Watched) -> tuple[str, bool]:
        """Interpret a backend's own error by the answers of the other ranks."""
        if self._left:
            return self._left[0], False
        if self._rank not in self._waiting:
            text = f"a member of {on.name} is gone: rank {self._rank} has lost its connection"
            return text, False
        answers = [each for each in self._answers if each["call"]]
        behind = [each for each in answers if each["behind"]]
        waiting = self._waiting | {each["rank"] for each in answers if each["waits"]}
        if behind:
            return who_is_behind(behind, waiting, self._timeout), True
        idle = {
            each["rank"]: each["where"]
            for each in answers
            if each["for"] == self._rank and each["waits"] is False
        }
        silent = self._unanswered()
        if silent:
            why = f"{describe_ranks(silent)} did not answer how many calls they have made on it"
        elif idle:
            verb = "wait" if len(idle) > 1 else "waits"
            why = f"{describe_ranks(idle)} {verb} for nothing; {_places(idle, len(idle) > 1)}"
        else:
            why = (
                "every member has made as many calls on it, so one of them made another call, or "
                "waits in another group"
            )
        return (
            f"a call or message on {on.name}, for which rank {self._rank} has waited "
            f"{self._timeout:.3g} s after call {self._number(on)}, did not end: {why}"
            + ("" if idle else "; COMMGRID_TRACE=1 records the calls"),
            True,
        )


def who_is_behind(answers: Sequence[Message], waiting: Collection[int], seconds: float) -> str:
    """Describe the rank that the others wait for, among the ranks that are behind in some call.

    Args:
        answers: of each rank that is behind: the `rank`, the `call`, the rank that waits for it
            (`for`), and where it is (`where`).
        waiting: ranks that wait for some call themselves.
        seconds: how long they have waited.

    Example:
        >>> answers = [
        ...     {"rank": 2, "call": "call 4 on dp", "for": 0, "where": "at a.py:7 in f"},
        ...     {"rank": 3, "call": "call 4 on dp", "for": 1, "where": "at train.py:5 in step"},
        ... ]
        >>> print(who_is_behind(answers, {0, 1, 3}, 30))
        rank 2 has not come to call 4 on dp, for which rank 0 has waited 30 s; it is at a.py:7 in f
    """
    causes = [each for each in answers if each["rank"] not in waiting]
    if causes:
        first = min(causes, key=lambda each: (each["for"], each["rank"]))
        behind = {each["rank"]: each["where"] for each in causes if each["for"] == first["for"]}
        verb = "have" if len(behind) > 1 else "has"
        return (
            f"{describe_ranks(behind)} {verb} not come to {first['call']}, for which rank "
            f"{first['for']} has waited {seconds:.3g} s; {_places(behind, len(behind) > 1)}"
        )
    each_other = "; ".join(
        f"rank {each['for']} in {each['call']} for rank {each['rank']}, which is {each['where']}"
        for each in sorted(answers, key=lambda each: (each["for"], each["rank"]))[:_NAMED]
    )
    return f"ranks have waited {seconds:.3g} s for each other: {each_other}"


def _places(found: dict[int, Any], several: bool) -> str:
    return "; ".join(
        f"{f'rank {rank}' if several else 'it'} is {where}"
        for rank, where in sorted(found.items())[:_NAMED]
    )


def where_is() -> str:
    """Where this process's main thread is: its innermost line outside torch, commgrid, Python."""
    frame = innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and not is_programs(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "not in its main thread"
    code = frame.f_code
    return f"at {Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
