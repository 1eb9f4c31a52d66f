"""One rank fails, and every other rank's error says which and why.

A rank that fails writes its error to the store and breaks its communicators' connections. Ranks
that wait for it get one of torch's errors, such as a closed connection. They read the store, break
their own connections, which wakes further ranks, and raise an error with the text that they read.

    rank 3: ValueError in forward ──► store ──► everyone's PeerFailedError names rank 3
    rank 3 killed ──► rank 2's connection closes, rank 2 writes that rank 3 is gone ──► everyone

On gloo that takes no time. NCCL waits on the device, where no connection is seen to close, so grids
on it are watched (`commgrid.health.detector`): a thread learns what happened, and wakes the main
thread, which gets an error of torch's then, and raises what the thread has learnt.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol

from commgrid.errors import CommGridError, GridDestroyedError, PeerFailedError, PeerTimeoutError
from commgrid.layout.rank_text import describe_ranks, pack, unpack
from commgrid.planning.spec import GridSpec
from commgrid.recording import remote
from commgrid.recording.places import Whereabouts, whereabouts
from commgrid.rendezvous.failure_round import Failure, failures_of
from commgrid.rendezvous.op import StoreLostError
from commgrid.rendezvous.timeouts import timeouts
from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.registry import _registry, get_grid, store_server
from commgrid.store.driver import StoreDriver
from commgrid.store.hosts import ranks_here, ranks_of_a_host
from commgrid.store.search import first_line
from commgrid.torch_compat import world as torch_world
from commgrid.torch_compat.peer_errors import is_peer_failure

_GUESSES = ("not answer", "came too late")  # ends of messages that only guess at the cause
_NAMED = 4  # calls in a message


class GoneError(PeerFailedError):
    """A rank that this one waited for is gone, or ends because of another that is.

    Args:
        said: the message.
        rank: which one.
    """

    def __init__(self, said: str, rank: int | None = None) -> None:
        super().__init__(said)
        self.rank = rank


@contextmanager
def named_failures(
    grid: HyperCommGrid | None = None,
    doing: Callable[[], str] | None = None,
    *,
    agreed: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """Within this block, a failure of any rank raises an error on all others that names the rank.

    All ranks of the grid enter it, such as around a training loop. After an error the grid is
    destroyed, since collectives may be half done; `initialize` makes the next one.

    Args:
        grid: None: the default one.
        doing: says what this rank was at, for the message.
        agreed: errors that all ranks raise alike, after which the grid is as good as before.

    Raises:
        PeerFailedError: another rank failed, is gone, or does not answer; from torch's error.

    Example:
        >>> import commgrid
        >>> grid = commgrid.initialize()
        >>> with named_failures():
        ...     raise ValueError("out of data")
        Traceback (most recent call last):
        ValueError: out of data
        >>> grid.is_destroyed
        True
        >>> commgrid.shutdown()
    """
    grid = grid or get_grid()
    if grid.is_destroyed:
        raise GridDestroyedError(f"grid {grid.name!r} was destroyed; make another one")
    try:
        yield
    except BaseException as error:
        if grid.is_destroyed or not torch_world.is_initialized():
            raise  # an inner block has told; or the program has ended torch.distributed itself
        watch = grid.watch
        waited = isinstance(error, RuntimeError | TimeoutError)
        learnt = grid.failure if waited else None
        peer = learnt is not None or isinstance(error, GoneError)
        peer = peer or is_peer_failure(error)
        if isinstance(error, agreed) and not peer:
            raise
        me, at = f"rank {grid.rank}", _at(error, doing, peer)
        board = FailureBoard(grid)
        # A failure only for ranks that wait for this one.
        if isinstance(error, SystemExit) and not error.code:
            said = board.post(f"{me} has left{at}: it called sys.exit")
            if watch is not None:
                watch.leave(said)
            grid.abort_after_failure()
            board.leave()
            raise
        if not peer:
            said = f"{me} failed{at}: {type(error).__name__}: {first_line(error)}"
            board.post(said)
            if watch is not None:
                watch.post(said)
            grid.abort_after_failure()
            if doing is not None:
                error.add_note(f"commgrid: {me} failed{at}")
            board.leave()
            raise
        seems_late = _says_late(error) or (learnt is not None and learnt.late)
        why = remote.at_failure(grid.identity, seems_late)
        if learnt is None and watch is not None and watch.read(timeouts().seen):
            learnt = grid.failure
        if learnt is not None and watch is not None:
            _registry.place.gone |= watch.ended
        if learnt is None:
            told = board.inquire(grid, error, at)
            late = board.late
        else:  # a gate has found it, where nothing watches
            told = learnt.text if watch is not None else board.post(learnt.text)
            late = learnt.late
        grid.abort_after_failure()
        who = f"{me} was{at}" if at else me
        told = _with_reason(told, why())
        board.leave()
        raise _peer_error(told, late, who) from error
    failure = grid.failure
    if failure is not None:
        # A collective that was woken has returned numbers that no rank has sent.
        grid.abort_after_failure()
        at = f" was in {doing()}" if doing is not None else ""
        raise _peer_error(failure.text, failure.late, f"rank {grid.rank}{at}")


def _at(error: BaseException, doing: Callable[[], str] | None, peer: bool) -> str:
    """Describe what this rank was doing; if it waited for another, with the group and the line."""
    found = whereabouts(error) if peer or doing is None else None
    parts = [] if doing is None else [f"in {doing()}"]
    if found is not None and (found.group or doing is None):
        parts.append(str(found))
    return f" {', '.join(parts)}" if parts else ""


def _says_late(error: BaseException) -> bool:
    return "timed out" in str(error).lower() or "timeout" in str(error).lower()


def _with_reason(told: str, reason: str) -> str:
    """Join the failure and the reason from the records, which replaces a guess at a silent rank."""
    if not reason:
        return told
    guess, _, seen = told.partition(": ")
    if guess.endswith(_GUESSES):
        return f"{reason}\nseen first: {seen}"
    return f"{told}; {reason}"


def _peer_error(told: str, late: bool, who: str) -> CommGridError:
    kind = PeerTimeoutError if late else PeerFailedError
    return kind(f"{told} ({who}; the grid was destroyed on this rank)")


def _tell_end(grid: HyperCommGrid, error: BaseException | None) -> None:
    """Leave a note that an error has ended this rank's program, for ranks that wait for it."""
    if error is not None:
        FailureBoard(grid).end(f"ended with {type(error).__name__}: {first_line(error)}")


_registry.at_exit.append(_tell_end)


class Identified(Protocol):
    """A grid of this rank, or the card of another one."""

    @property
    def identity(self) -> str: ...
    @property
    def spec(self) -> GridSpec: ...


class FailureBoard:
    """The first failure among the ranks of one grid, as they read it at the store.

    Args:
        grid: this rank's, or the card of one that it is not in.

    Attributes:
        late: whether `inquire` has found that a rank came too late, which may live.
    """

    def __init__(self, grid: Identified) -> None:
        self.late = False
        self._ranks = ranks = tuple(sorted(grid.spec.grid_ranks))
        me = torch_world.world_rank()
        self._failure = Failure(failures_of(grid.identity), me, ranks)
        self._driver = StoreDriver(torch_world.world_store(), len(ranks))
        self._rank, self._absent = me, set[int]()
        # On a watched grid ranks learn of a failure without the store.
        self._is_read = getattr(grid, "watch", None) is None

    def post(self, text: str) -> str:
        """Write the failure unless there is an earlier one; return the first."""
        try:
            return self._driver.run(self._failure.post(text))
        except StoreLostError:  # with the rank that served it
            return text

    def end(self, how: str) -> None:
        """Say that this rank's program has ended, for ranks that wait for it."""
        with suppress(StoreLostError):
            self._driver.run(self._failure.end(how.encode()))
        self._driver.close()

    def leave(self) -> None:
        """Leave with the failure; the rank that serves the store waits for others to read it."""
        server = _server_rank()
        if self._is_read and server in self._ranks:
            with suppress(StoreLostError):
                self._driver.run(self._failure.leave(self._absent, server == self._rank))
        self._driver.close()

    def told_by(self, ranks: Sequence[int]) -> str | None:
        """The failure if there is one, or if one of `ranks` has begun to ask for its cause."""
        members = [rank for rank in ranks if rank in self._ranks]
        until = time.monotonic() + timeouts().arrive + timeouts().leave
        try:
            return self._driver.run(self._failure.told_by(members, until))
        except StoreLostError:
            return None
        finally:
            self._driver.close()

    def inquire(self, grid: HyperCommGrid, error: BaseException, at: str) -> str:
        """Find the failed rank if this one only knows that a rank is gone or silent.

        The grid is aborted, so that ranks that wait for this one call `inquire` too. Ranks that do
        not are named; see `commgrid.rendezvous.failure_round`.

        Args:
            error: this rank's.
            at: where it was, for the message.
        """
        where = whereabouts(error)
        waited_for = _waited_for(error, where)
        mine = f"rank {grid.rank}{at} got {first_line(error)}"
        words = json.dumps({
            "rank": grid.rank, "at": at, "waited_for": sorted(waited_for), "saw": mine,
            "knows": f"{error}" if isinstance(error, GoneError) else "", "late": _says_late(error),
            "call": where.operation if where is not None and where.ranks else "",
        })  # fmt: skip
        try:
            known = self._driver.run(self._failure.read(0.0))
            if known is None:
                self._driver.run(self._failure.report(words.encode()))
            _abort(grid, error)
            if known is None:
                blame = partial(_blame, error, grid.rank)
                known = self._driver.run(self._failure.find_out(blame))
            self._absent = unpack(known.get("absent", ""))
            _registry.place.gone |= unpack(known.get("gone", ""))
            self.late = bool(known.get("late"))
            return str(known["text"])
        except StoreLostError as lost:
            _abort(grid, error)
            self.late = _says_late(error)
            return _store_is_gone(grid, lost.silent, waited_for, mine)
        finally:
            self._driver.close()


def _blame(
    error: BaseException, me: int, absent: Sequence[int], words: Mapping[int, bytes]
) -> dict[str, Any]:
    """Describe a failure by the absent ranks, and by the ranks that the others waited for.

    Args:
        error: of the rank that decides, `me`.
        words: of all that have reported, and of absent ranks whose program has ended.

    Returns:
        The `text`, which ranks are `gone`, and whether the failure is that a rank was `late`. One
        that was waited for in vain may live.
    """
    ended = {rank: words[rank].decode() for rank in absent if rank in words}
    said = {rank: json.loads(each) for rank, each in words.items() if rank not in ended}
    reports = [said[me], *(each for rank, each in said.items() if rank != me)]
    missing, late = set(absent), any(each["late"] for each in reports)
    gone = missing & set().union(*(each["waited_for"] for each in reports)) or missing
    if late:  # a host out of reach says nothing; a process that ends is seen
        gone |= _whole_hosts(gone, missing)
    gone = gone - ended.keys() or gone  # ranks that ended in order may have come to the call before
    return {"text": _told(gone, ended, reports), "gone": "" if late else pack(gone), "late": late}


def _told(gone: set[int], ended: Mapping[int, str], reports: Sequence[Mapping[str, Any]]) -> str:
    """The text of a failure.

    Args:
        gone: the absent ranks to name.
        ended: how the programs of absent ranks have ended.
        reports: of the others; first that of the rank that decides.
    """
    for each in reports:
        if each["knows"] and (not gone or gone == {*each["waited_for"]}):
            return str(each["knows"])
    if not gone:
        guess = f"a connection failed, or a rank came too late: {reports[0]['saw']}"
        return _each_other(reports) or guess
    mine = next((e["saw"] for e in reports if gone & {*e["waited_for"]}), reports[0]["saw"])
    if gone <= ended.keys() and len({ended[rank] for rank in gone}) == 1:
        return f"{describe_ranks(gone)} {ended[min(gone)]}: {mine}"
    return f"{no_answer_of(gone)}: {mine}"


def _each_other(reports: Sequence[Mapping[str, Any]]) -> str:
    """Say where ranks wait in vain for each other, first those that few wait with; "": they do not.

    If all ranks of a call are in it, its connections have failed, and others wait for them.
    """
    calls: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for each in sorted(reports, key=lambda each: int(each["rank"])):
        calls.setdefault((each["call"], *map(str, each["waited_for"])), []).append(each)
    complete = any(len(those) == len(those[0]["waited_for"]) for those in calls.values())
    if complete or not all(each["call"] for each in reports):
        return ""
    if not any(each["late"] for each in reports):  # a closed connection is no wait in vain
        return ""
    few = sorted(calls.values(), key=len)
    where = [f"{describe_ranks(r['rank'] for r in those)}{those[0]['at']}" for those in few]
    return (
        f"ranks wait for each other: {'; '.join(where[:_NAMED])}; let all ranks of a group make "
        "the same calls in the same order"
    )


def _store_is_gone(grid: HyperCommGrid, silent: bool, waited_for: set[int], mine: str) -> str:
    """Describe a failure with which the store was lost."""
    if _server_rank() == grid.rank:  # its own thread did not answer in time
        return f"{no_answer_of(waited_for - {grid.rank})}: {mine}"
    others = _cut_off(grid) - {_server_rank()} if silent else set()
    if others:
        return (
            f"{describe_ranks(others)} and {_store_server()}, which serves the store, are gone or "
            f"cannot be reached from here: {mine}"
        )
    return f"{_store_server()} is gone or does not answer, which serves the store: {mine}"


def blamed(error: RuntimeError, ranks: Iterable[int], waited: str, who: str = "") -> RuntimeError:
    """Return the error to raise for one of torch's that other ranks have caused; else the same.

    Args:
        ranks: that it may come from.
        waited: for the message: what this rank waited for.
        who: names them; "": by their numbers.
    """
    if not is_peer_failure(error):
        return error
    named = sorted({*ranks})
    who = who or f"{'one of ' * (len(named) > 1)}{describe_ranks(named)}"
    said = f"{who} is gone or does not answer: {waited} ({first_line(error)})"
    return GoneError(said, named[0] if len(named) == 1 else None)


def no_answer_of(ranks: set[int]) -> str:
    """Say that ranks are gone or do not answer; of an empty set, that some rank is.

    >>> no_answer_of({3}), no_answer_of({2, 3})
    ('rank 3 is gone or does not answer', 'ranks 2-3 are gone or do not answer')
    """
    how = "are gone or do" if len(ranks) > 1 else "is gone or does"
    return f"{describe_ranks(ranks) if ranks else 'a rank'} {how} not answer"


def _waited_for(error: BaseException, where: Whereabouts | None) -> set[int]:
    """The ranks that this one may have waited for, at the place of its error."""
    if isinstance(error, GoneError):
        return set() if error.rank is None else {error.rank}
    return set(where.ranks) if where is not None else set()


def _cut_off(grid: HyperCommGrid) -> set[int]:
    """The ranks of other hosts, if the store that does not answer is on one of them.

    As far as torchrun's variables tell; without them, and on a single host, there are none.
    """
    here = ranks_here(grid.rank)
    server = _server_rank() or 0  # torchrun's agent that serves the store is on rank 0's host
    return set() if not here or server in here else set(grid.spec.grid_ranks) - set(here)


def _whole_hosts(gone: set[int], missing: set[int]) -> set[int]:
    """All ranks of the hosts of `gone` ranks, if every rank of the host is missing.

    torchrun numbers the ranks of one host one after the other.
    """
    size = ranks_of_a_host()
    if not size:
        return set()
    hosts = [set(range(first, first + size)) for first in {rank // size * size for rank in gone}]
    return set().union(*(host for host in hosts if host <= missing))


def _abort(grid: HyperCommGrid, error: BaseException) -> None:
    """Abort the grid; add a note to `error` if that fails."""
    try:
        grid.abort_after_failure()
    except (RuntimeError, ValueError) as failed:
        error.add_note(f"grid.abort() failed after it: {type(failed).__name__}: {failed}")


def _server_rank() -> int | None:
    """The rank that serves the store; None: torchrun's agent does."""
    server = store_server()  # of a standby store it may be rank 0 too
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return None if by_agent and server is None else server or 0


def _store_server() -> str:
    server = _server_rank()
    return "torchrun's agent" if server is None else f"rank {server}"
