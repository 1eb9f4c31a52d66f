"""The communicator of a bridge: which rank has which tensor, messages, and absent ranks.

One call of a bridge is one exchange: a rank starts all its sends and receives at once and waits for
what it receives. No wait is endless:

- What a rank sends in a call it has before the call; so nothing that it sends waits for something
  that it receives in the same call.
- Between two ranks messages are taken in the order in which they were sent, and every rank calls
  forwards in one order and backwards in one order. Where the two grids share no rank these are two
  separate ways, and may be mixed as each side likes; on shared ranks all keep one order of calls.
- What was sent is waited for in the backward of the same call, when receivers have answered, or
  when it is `MOST_AHEAD` calls old: a source may run so many calls ahead of its target.

So look at the earliest call that is not over: all it waits for are sends of ranks that have come to
it or will come, since what they do before are earlier calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor

from commgrid.bridge.contract import Facts
from commgrid.collectives.objects import gathered
from commgrid.errors import CommGridError
from commgrid.grid_pairs.pair_group import PairGroup
from commgrid.grid_pairs.pairing import Card
from commgrid.health.culprit import who_is_missing
from commgrid.layout.rank_text import describe_ranks
from commgrid.rendezvous.timeouts import timeouts
from commgrid.runtime.named_failures import FailureBoard, GoneError
from commgrid.store.search import first_line
from commgrid.torch_compat import groups as torch_groups
from commgrid.torch_compat import world as torch_world
from commgrid.torch_compat.messages import can_send, start_transfers, version_of
from commgrid.torch_compat.peer_errors import is_peer_failure

MOST_AHEAD = 16
"""So many calls a rank's messages may be on their way: gloo does not say when they have left."""


Addressed = tuple[Tensor, int]
"""A tensor, and the global rank that it goes to or comes from."""

_Leaving = tuple[dist.Work, Tensor, int, int | None]
"""What has been sent: until when, which tensor to whom, and its version then."""


class BridgeLinks:
    """The ranks on a bridge and their communicator; made on all of them at once.

    Args:
        group: over them, which connects all of them.
        cards: of both grids.
        device: where tensors are received; None: CUDA where the communicator has it.
    """

    def __init__(
        self, group: PairGroup, cards: Iterable[Card], device: torch.device | str | None
    ) -> None:
        self.about, self.ranks = group.name, group.ranks
        self._pair_group, self._group, self._cards = group, group.group, tuple(cards)
        self.device = torch_groups.devices_of(self._group)[-1]
        if device is not None:
            self.device = torch.device(device)
        self._position = {rank: i for i, rank in enumerate(self.ranks)}
        self._leaving: dict[str, list[_Leaving]] = {}

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor to be filled."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def can_send(self, dtype: torch.dtype) -> bool:
        """Whether the communicator sends tensors of a dtype."""
        return can_send(dtype, self._group, self.device)

    def tell(self, facts: Facts, call: str) -> dict[int, Facts]:
        """Every rank's facts; collective.

        Raises:
            GoneError: a rank did not come; it is named.
        """
        self._check_watch(call)
        try:
            return dict(zip(self.ranks, gathered(facts, self._group), strict=True))
        except RuntimeError as error:
            if not is_peer_failure(error):
                raise
            self._check_watch(call, error)
            self._check_grids(call, error, self.ranks)
            late = f"commgrid/bridge/late/{self._pair_group.key}/{call}"
            raise GoneError(
                f"{self.about}: {who_is_missing(late, self.ranks, call)} ({first_line(error)})"
            ) from error

    def exchange(
        self, call: str, leaving: Sequence[Addressed], arriving: Sequence[Addressed]
    ) -> None:
        """Sends tensors and fills others; returns when the latter are there.

        Args:
            call: which one this is, such as `forward 3`.
            leaving: with the ranks that they go to; contiguous, and none without elements.
            arriving: with the ranks that they come from, likewise.

        Raises:
            GoneError: a rank that one is awaited from is gone, or did not call; it is named.
        """
        sends, recvs = (
            [(tensor, self._position[rank]) for tensor, rank in many]
            for many in (leaving, arriving)
        )
        self._check_watch(call)
        awaited = [rank for _, rank in arriving]
        suspects = [*(rank for _, rank in leaving), *awaited]

        def refused(error: RuntimeError, peer: int | None) -> Exception:
            return self._explain(error, suspects if peer is None else [self.ranks[peer]], call)

        works = start_transfers(self._group, sends, recvs, refused)
        try:
            one_by_one = len(works) == len(sends) + len(recvs)
            waits = works[len(sends) :] if one_by_one else works
            for i, work in enumerate(waits):
                suspects = [awaited[i]] if one_by_one else suspects
                work.wait()
        except RuntimeError as error:
            raise self._explain(error, suspects, call) from error
        self._check_watch(call)  # a wait that a failure ended leaves numbers that no rank sent
        if one_by_one and sends:
            left = self._leaving.setdefault(call, [])
            for work, (tensor, rank) in zip(works[: len(sends)], leaving, strict=True):
                left.append((work, tensor, rank, version_of(tensor)))
        while len(self._leaving) > MOST_AHEAD:
            self.let_leave(next(iter(self._leaving)))

    def let_leave(self, call: str) -> None:
        """Waits until all tensors of a call are sent.

        Raises:
            GoneError: the receiver is gone, or did not call.
            CommGridError: it was changed meanwhile, so that something else has left.
        """
        left = self._leaving.pop(call, [])
        for work, _, peer, _ in left:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._explain(error, [peer], call) from error
        if any(version_of(tensor) != version for _, tensor, _, version in left):
            raise CommGridError(
                f"{self.about}: a tensor that {call} was sending was changed in place before it "
                "had left; clone it before, or change it after backward or bridge.finish()"
            )

    def finish(self) -> None:
        """Waits until all tensors are sent."""
        for call in list(self._leaving):
            self.let_leave(call)

    def close(self, *, wait: bool) -> None:
        """Destroys the communicator, not twice.

        Args:
            wait: whether to wait for messages on their way. Without it, as after a failure, ranks
                that wait for this one get an error.
        """
        if not wait or self._pair_group.failure() is not None:
            self._leaving.clear()
        self._pair_group.end(broken=not wait, finish=self._finish_with_living)

    def _finish_with_living(self) -> None:
        with suppress(GoneError):  # a receiver has ended before this rank
            self.finish()

    # -- when something is wrong ----------------------------------------------------------

    def _explain(self, error: RuntimeError, suspects: Sequence[int], call: str) -> RuntimeError:
        """The error to raise for one of torch's.

        Args:
            suspects: the ranks that it may come from.
            call: what this rank was at.
        """
        if not is_peer_failure(error):
            return error
        self._check_watch(call, error)
        gone = sorted(set(suspects))
        self._check_grids(call, error, gone)
        one_of = "one of " if len(gone) > 1 else ""
        return GoneError(
            f"{self.about}: {one_of}{describe_ranks(gone)} is gone or has not come to {call}: rank "
            f"{torch_world.world_rank()} got {first_line(error)}; "
            "every rank on either stage calls the bridge equally often, and its backward"
        )

    def _check_watch(self, call: str, error: RuntimeError | None = None) -> None:
        """Raises what is known of ranks that are gone or have failed.

        Args:
            call: what this rank was at.
            error: what it got there, to which the watch may have more to say in a moment.
        """
        learnt = self._pair_group.failure(0.0 if error is None else timeouts().seen)
        if learnt is not None:
            raise self._because(learnt, call, error) from error

    def _check_grids(self, call: str, error: RuntimeError, suspects: Sequence[int]) -> None:
        """Raises the failure of either grid, if that is why a suspect has closed its connection."""
        for card in self._cards:
            learnt = FailureBoard(card).told_by(suspects)
            if learnt is not None:
                raise self._because(learnt, call, error) from error

    def _because(self, learnt: str, call: str, error: RuntimeError | None) -> GoneError:
        got = "" if error is None else f" and got {first_line(error)}"
        return GoneError(
            f"{learnt} (in {self.about}: rank {torch_world.world_rank()} was in {call}{got})"
        )
