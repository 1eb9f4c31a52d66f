"""Sums of gradients during backward, bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from commgrid.collectives.asynchronous import Pending, start_all_reduce_, start_reduce_scatter_
from commgrid.data_parallel.bucket import Bucket
from commgrid.data_parallel.slot import Slot
from commgrid.errors import GridDestroyedError
from commgrid.runtime.grid import HyperCommGrid

_IN_FLIGHT = 2  # buckets whose exchange buffers exist at once on the CPU


class Reductions:
    """The sums of a step's gradients, each started when its bucket and those before are complete.

    Args:
        buckets: in launch order, the same on all ranks.
        grid: whose groups are used.
        defers: whether all sums start in `finish` only.
    """

    def __init__(self, buckets: Sequence[Bucket], grid: HyperCommGrid, *, defers: bool) -> None:
        self._buckets, self._grid, self._defers = buckets, grid, defers
        self._next, self._has_begun = 0, False
        self._in_flight: list[Bucket] = []
        self.sending: Callable[[Sequence[Slot]], object] = lambda slots: None
        """Called with the slots of a bucket that is complete and about to be summed."""

    def arrived(self, bucket: Bucket, slot: Slot) -> None:
        """Records a complete gradient, and starts the sums of complete buckets.

        Args:
            bucket, slot: of the gradient.
        """
        bucket.missing.discard(slot)
        self._has_begun = True
        if not self._defers and not bucket.missing:
            self._launch(all_of_them=False)

    def finish(self) -> None:
        """Starts the sums of the remaining buckets, and waits for all."""
        self._launch(all_of_them=True)
        for bucket in self._buckets:
            bucket.wait()

    def abandon(self) -> None:
        """Ends a step that is given up."""
        if self._has_begun:  # other ranks may have launched a bucket that is incomplete here
            self._launch(all_of_them=True)
        for bucket in self._buckets:
            bucket.wait()
        self.reset()

    def reset(self) -> None:
        """Prepares for the next backward."""
        for bucket in self._buckets:
            bucket.missing = set(bucket.slots)
        self._in_flight.clear()
        self._next, self._has_begun = 0, False

    def _launch(self, *, all_of_them: bool) -> None:
        if self._grid.is_destroyed:
            raise GridDestroyedError(
                f"grid {self._grid.name!r} of this GradientReducer was destroyed; close() the "
                "reducer and make a new one, also if a grid of that name exists again"
            )
        self._grid.refuse_if_failed()
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if bucket.missing and not all_of_them:
                return
            self._next += 1
            bucket.fill()
            self.sending(bucket.slots)
            if bucket.shared is not None:
                bucket.pending = self._start_shared(bucket, bucket.shared)
            elif bucket.group.size() > 1:
                bucket.pending = self._start(bucket)
            if bucket.pending is not None:
                bucket.hide()

    def _start_shared(self, bucket: Bucket, sharers: ProcessGroup) -> Pending:
        """The sum over the copies of other stages, and only then the sum over other data."""
        adding = start_all_reduce_(bucket.gradient, sharers)

        def then() -> Tensor:
            return self._start(bucket).wait() if bucket.group.size() > 1 else bucket.gradient

        return Pending(adding.work, then, adding.group)

    def _start(self, bucket: Bucket) -> Pending:
        if not bucket.shard:
            return start_all_reduce_(bucket.gradient, bucket.group)
        if bucket.gradient.device.type == "cpu":
            while len(self._in_flight) >= _IN_FLIGHT:
                self._in_flight.pop(0).wait()
            self._in_flight.append(bucket)
        return start_reduce_scatter_(bucket.gradient, bucket.group)
