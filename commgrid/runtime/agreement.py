"""Every rank holds the same description, or every rank says who differs or is missing.

Ranks that want to make one thing together meet at the store. The first to come
leaves its document, the others compare theirs with it, the last one to come writes the
verdict that all of them read. In the good case a rank makes a fixed number of store
calls however many ranks there are; only when something is wrong does one look at every
rank to name the ones it is about.

A meeting is one *incarnation*, and each good one gets a number that no other meeting at
this store has, so whatever is named after it never meets its predecessor.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from commgrid.errors import CommGridError, PeerTimeoutError
from commgrid.runtime.diagnosis import Examiner, Store

_DIFFERS = 1 << 32  # added to the count of arrivals by a rank whose document differs
_LINGER_SECONDS = 2.0
_SLICE_SECONDS = 2.0
_EXAMINER_SECONDS = 10.0


class Meeting:
    """The ranks of one grid at the store, from comparing documents to being ready.

    Args:
        store: shared by all ranks of the world.
        name: what they meet for, the grid's name.
        rank: this process's global rank.
        ranks: the ranks that should come.
        document: plain values, equal on all of them.
        deadline: `time.monotonic()` until which to wait.
    """

    def __init__(
        self,
        store: Store,
        *,
        name: str,
        rank: int,
        ranks: range,
        document: Mapping[str, Any],
        deadline: float,
    ) -> None:
        self._store, self._name, self._rank, self._ranks = store, name, rank, ranks
        self._deadline = deadline
        # What is kept back from waiting on a peer, to find out afterwards whom it was about.
        self._margin = min(1.0, max(deadline - time.monotonic(), 0.0) / 4)
        self._left = False
        self._examiner = Examiner(store, name, rank, ranks)
        # Grids on separate ranks may share a name: they have different first ranks.
        self._room, self._base = f"{name}@{ranks[0]}", ""
        text = json.dumps({**document, "ranks": [ranks.start, ranks.stop, ranks.step]})
        try:
            self.incarnation = int(self._guarded(lambda: self._compare(text)))
        except CommGridError:
            raise
        except BaseException as error:  # Ctrl-C: counted as present, this rank must say it is not
            self.give_up("compare", error)
            raise

    # -- the steps ----------------------------------------------------------------------

    def _compare(self, document: str) -> int:
        """Six store calls: which incarnation, whose document, a mark, the count, the verdict."""
        number = self._store.compare_set(f"{self._room}/current", "", "0").decode()
        self._base = f"{self._room}/{number}"
        first = self._store.compare_set(f"{self._base}/document", "", document).decode()
        differs = first != document
        self._examiner.mark(self._base, "compare", document if differs else "")
        expected = max(len(self._ranks), len(range(*json.loads(first)["ranks"])))
        arrived = self._store.add(f"{self._base}/arrived", 1 + differs * _DIFFERS)
        if arrived % _DIFFERS >= expected:
            if arrived >= _DIFFERS:
                self._conclude_everywhere(self._examiner.mismatch(self._base, first))
            else:
                made = self._store.add("incarnations", 1)
                self._conclude("compare", {"kind": "agreed", "incarnation": made})
        verdict = self._await_verdict("compare", first)
        if differs:  # ranks of a smaller grid agreed before this one was counted
            holders = [(first, list(range(*json.loads(first)["ranks"]))), (document, [self._rank])]
            raise self._examiner.error({"kind": "mismatch", "holders": holders})
        return int(verdict["incarnation"])

    def meet(self, phase: str) -> None:
        """Returns when every rank has come to this phase; four store calls.

        Raises:
            PeerTimeoutError: a rank did not; it is named.
            PeerFailedError: a rank said so by `give_up`.
        """
        self._guarded(lambda: self._meet(phase))

    def _meet(self, phase: str) -> None:
        self._examiner.mark(self._base, phase, "")
        if self._store.add(f"{self._base}/{phase}", 1) == len(self._ranks):
            self._conclude(phase, {"kind": "agreed"})
        self._await_verdict(phase, "")

    def give_up(self, phase: str, error: BaseException) -> BaseException:
        """Tells the ranks that wait in `phase` why this one will not come.

        Returns:
            The error that says best what happened: another rank's failure or absence
            where this rank's own timeout is a consequence of it, else `error` itself.
        """
        if self._left or not self._base:
            return error
        try:
            verdict = self._examiner.verdict(self._base, phase)
            if not verdict:
                verdict = self._blame(phase, error)
                self._conclude(phase, verdict)
                verdict = self._examiner.verdict(self._base, phase)
            self._leave(verdict)
        except RuntimeError:
            return error  # the store is gone, and with it everybody who could be told
        consequence = isinstance(error, PeerTimeoutError) and verdict.get("rank") != self._rank
        return self._examiner.error(verdict) if consequence else error

    def _blame(self, phase: str, error: BaseException) -> dict[str, Any]:
        """A verdict about this rank; where it was kept waiting, about those who kept it."""
        if isinstance(error, PeerTimeoutError):
            self._examiner.mark(self._base, phase, "")
            time.sleep(self._margin / 2)  # the others were kept as long, and mark themselves now
            verdict = self._examiner.absence(self._base, phase, "")
            if verdict["missing"]:
                return verdict
        return {"kind": "failed", "rank": self._rank, "error": f"{type(error).__name__}: {error}"}

    def patience(self) -> float:
        """Seconds to wait for peers outside a meeting; leaves time to name who did not come."""
        return max(self.remaining() - self._margin, 0.01)

    def remaining(self) -> float:
        """Seconds until the deadline, never less than a moment."""
        return max(self._deadline - time.monotonic(), 0.01)

    # -- the store ----------------------------------------------------------------------

    def _conclude(self, phase: str, verdict: dict[str, Any], base: str = "") -> None:
        """Writes the verdict of a phase, unless another rank has written one."""
        base = base or self._base
        if phase == "compare":
            # The next meeting must start afresh before anyone learns that this one is over.
            room, _, number = base.rpartition("/")
            self._store.compare_set(f"{room}/current", number, str(int(number) + 1))
        self._store.compare_set(f"{base}/{phase}/verdict", "", json.dumps(verdict))

    def _conclude_everywhere(self, verdict: dict[str, Any], phase: str = "compare") -> None:
        """The same, also for ranks of this meeting that wait in another one by mistake."""
        for base in verdict.get("meetings", [self._base]):
            self._conclude(phase, verdict, base)

    def _await_verdict(self, phase: str, first: str) -> dict[str, Any]:
        if not self._wait(phase, self.remaining()):
            # One rank looks who is missing; the others need not all ask the store about everyone.
            examiner = self._store.add(f"{self._base}/{phase}/examiner", 1) == 1
            if examiner or not self._wait(phase, _EXAMINER_SECONDS):
                self._conclude_everywhere(self._examiner.absence(self._base, phase, first), phase)
        verdict: dict[str, Any] = json.loads(self._store.get(f"{self._base}/{phase}/verdict"))
        if verdict["kind"] != "agreed":
            self._leave(verdict)
            raise self._examiner.error(verdict)
        return verdict

    def _wait(self, phase: str, seconds: float) -> bool:
        """Whether there is a verdict within so many seconds."""
        until = time.monotonic() + seconds
        while True:
            # In slices, since nothing interrupts torch's wait, not even Ctrl-C.
            slice_ends = min(until, time.monotonic() + _SLICE_SECONDS)
            left = max(slice_ends - time.monotonic(), 0.01)
            try:
                self._store.wait([f"{self._base}/{phase}/verdict"], timedelta(seconds=left))
                return True
            except RuntimeError:
                if time.monotonic() < slice_ends - 0.05:
                    raise  # not a timeout: the store is gone
            if time.monotonic() >= until - 0.05:
                return False

    def _leave(self, verdict: Mapping[str, Any]) -> None:
        """Lets everyone read a bad verdict before rank 0, whose process often serves the store,
        raises and takes the store away."""
        if self._left:
            return
        self._left = True
        left = self._store.add(f"{self._base}/left", 1)  # the last call that most ranks make
        if self._rank == 0:
            present = self._store.add(f"{self._base}/arrived", 0) % _DIFFERS
            if verdict.get("phase", "compare") != "compare":
                present -= len(verdict["missing"])  # they came once, and will not read this
            until = time.monotonic() + _LINGER_SECONDS
            while left < present and time.monotonic() < until:
                time.sleep(0.01)
                left = self._store.add(f"{self._base}/left", 0)

    def _guarded(self, step: Any) -> Any:
        try:
            return step()
        except CommGridError:
            raise
        except RuntimeError as error:  # torch's DistNetworkError and DistStoreError among them
            raise PeerTimeoutError(
                f"grid {self._name!r}: the store of torch.distributed stopped answering "
                f"({str(error).splitlines()[0]}); has the process that serves it, usually rank 0 "
                "or the launcher, ended?"
            ) from error
