"""Carriage: the plans of a transfer carried out on this rank, in one run after the other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch.distributed import ProcessGroup

from commgrid.resharding.local_boxes import LocalBoxes
from commgrid.resharding.plan import Message, TransferPlan
from commgrid.resharding.transport import Carrier, most_of
from commgrid.transfer.shared_devices import Sharing


class Carriage:
    """Buffers and messages of one run serve the next where the tensors are still the same.

    Args:
        group: of the ranks of both sides.
        ranks: its ranks, in its order.
        rank: this one.
        device: that messages travel on.
        max_bytes: of buffers at once.
        timeout: seconds that a message may take.
        sharing: which ranks are on this rank's GPU.
    """

    def __init__(
        self,
        group: ProcessGroup,
        ranks: Sequence[int],
        rank: int,
        device: torch.device,
        max_bytes: int,
        timeout: float,
        sharing: Sharing,
    ) -> None:
        self._group, self._ranks, self._rank, self._device = group, ranks, rank, device
        self._max_bytes, self._timeout, self._sharing = max_bytes, timeout, sharing
        self._messages: dict[TransferPlan, list[Message]] = {}  # the same in every run
        self._carriers: dict[TransferPlan, Carrier] = {}

    def carry(self, plan: TransferPlan, source: LocalBoxes, target: LocalBoxes) -> None:
        """Carry out a plan, and wait until all ranks have done so.

        Args:
            plan: the same on all ranks.
            source, target: what this rank holds.

        Raises:
            GoneError: a rank is gone, or does not answer.
        """
        if plan not in self._messages:
            self._messages[plan] = plan.messages(self._rank, most_of(self._max_bytes))
        carrier = self._carriers.get(plan)
        if carrier is None or not carrier.holds(source, target):
            carrier = Carrier(
                self._group, self._ranks, self._device, source, target, self._max_bytes,
                self._messages[plan], partial(plan.copies, self._rank), self._timeout,
                self._sharing.ranks, self._sharing.device,
            )  # fmt: skip
            if source.is_lasting and target.is_lasting:
                self._carriers[plan] = carrier
        carrier.carry()
        carrier.meet()
