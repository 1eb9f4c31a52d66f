"""One rank fails, and every other rank's error says which and why.

A rank that fails writes so in the store and breaks its communicators' connections. Those who wait
for it get an error of torch's, such as a closed connection, look in the store, and raise what
stands there; breaking theirs, they wake those who wait for them. On gloo that takes no time; NCCL
waits on the device, where torch's own watchdog ends what waits for a rank that is gone.

    rank 3: ValueError in forward ──► store ──► everyone's PeerFailedError names rank 3
    rank 3 killed ──► rank 2's connection closes, rank 2 writes that rank 3 is gone ──► everyone
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from commgrid.errors import GridDestroyedError, PeerFailedError, PeerTimeoutError
from commgrid.planning.rank_lists import describe_ranks
from commgrid.runtime import torch_world
from commgrid.runtime.registry import get_grid
from commgrid.runtime.roll import Coming, Line, Roll

if TYPE_CHECKING:
    from commgrid.runtime.grid import HyperCommGrid

_ROLL_CALL_SECONDS = 2.0
_PATIENCE_SECONDS = 2.0  # for the one who knows more than that a connection closed
_POLL_SECONDS = 0.05


class GoneError(PeerFailedError):
    """A certain rank is gone; raised where that is known from who was waited for."""


def who_is_missing(at: str, ranks: Iterable[int], what: str) -> str:
    """After a collective that failed on all who came: they say so, and the others are missing.

    Nothing of it costs anything while all goes well.

    Args:
        at: what the collective is called at the store.
        ranks: who takes part.
        what: what it is, for the message.
    """
    every = tuple(sorted(ranks))
    with suppress(RuntimeError):  # the store has gone with the rank that served it
        store = torch_world.world_store()
        roll, line = Roll(store, at, every), Line(store, len(every))
        all_came = roll.come(torch_world.world_rank()) is Coming.LAST
        if all_came:
            store.set(f"{at}/all", "")
        else:
            all_came = line.within(f"{at}/all", _ROLL_CALL_SECONDS)
        line.close()
        if not all_came:
            here = roll.here(every)
            others = "others have" if len(here) > 1 else "this rank has"
            missing = describe_ranks(set(every) - set(here))
            return f"{missing} did not come to {what}, to which {others} come"
    return f"a rank is gone or did not answer in {what}"


@contextmanager
def named_failures(
    grid: HyperCommGrid | None = None, doing: Callable[[], str] | None = None
) -> Iterator[None]:
    """Within it, the failure of any rank of the grid is an error on every other that names it.

    All ranks of the grid enter it, such as around a training loop. After an error the grid is
    destroyed, since collectives may be half done; `initialize` makes the next one.

    Args:
        grid: None: the default one.
        doing: says what this rank was at, for the message.

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
        left = isinstance(error, SystemExit) and not error.code
        if left or grid.is_destroyed:  # no failure, or one that an inner block has told
            raise
        me = f"rank {grid.rank}"
        at = f" in {doing()}" if doing is not None else ""
        board = FailureBoard(grid)
        told: str | None = None
        if isinstance(error, GoneError):
            told = board.post(f"{error}")
        elif torch_world.is_peer_failure(error):
            told = board.read(_PATIENCE_SECONDS) or board.post(
                f"a rank is gone or does not answer: {me}{at} got {torch_world.first_line(error)}"
            )
        else:
            board.post(f"{me} failed{at}: {type(error).__name__}: {torch_world.first_line(error)}")
        grid.abort()
        if told is None:
            if at:
                error.add_note(f"commgrid: {me} failed{at}")
            raise
        raise _peer_error(told, f"{me} was{at}" if at else me, error) from error


def _peer_error(told: str, who: str, error: BaseException) -> Exception:
    late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
    kind = PeerTimeoutError if late else PeerFailedError
    return kind(f"{told} ({who}; the grid was destroyed on this rank)")


class FailureBoard:
    """Where the ranks of one grid write the first failure among them."""

    def __init__(self, grid: HyperCommGrid) -> None:
        self._key = f"commgrid/failures/{grid.identity}"

    def post(self, text: str) -> str:
        """Writes it, unless somebody was first; what now stands there."""
        try:
            return bytes(torch_world.world_store().compare_set(self._key, "", text)).decode()
        except (RuntimeError, ValueError):  # the store has gone with the rank that served it
            return text

    def read(self, patience: float) -> str | None:
        """What stands there, waiting up to `patience` seconds for somebody to write it."""
        deadline = time.monotonic() + patience
        with suppress(RuntimeError, ValueError):
            store = torch_world.world_store()
            while True:
                if store.check([self._key]):
                    return bytes(store.get(self._key)).decode()
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL_SECONDS)
        return None
