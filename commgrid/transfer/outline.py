"""Outline of a transfer: what ranks tell each other of both sides, and the plan that all make."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch.distributed import ProcessGroup

from commgrid.collectives.objects import at_first
from commgrid.errors import TransferError
from commgrid.resharding.layouts import GridLayouts
from commgrid.resharding.local_boxes import refuse_shared_memory
from commgrid.resharding.naming import Tied, ties_of, ties_of_all
from commgrid.resharding.plan import TransferPlan
from commgrid.resharding.transport import message_device
from commgrid.transfer.sent_boxes import SentLayouts, check_groups, check_scales
from commgrid.transfer.shared_boxes import SharedBoxes, check_replicas
from commgrid.transfer.sides import SourceSide, TargetSide


@dataclass(frozen=True)
class Outline:
    """A transfer as all of its ranks know it.

    Args:
        source, target: layouts of both sides.
        sent: layouts of the boxes that the source sends.
        plan: the messages between ranks.
        blocks: the messages between the source's ranks that bring together what cuts split; None:
            nothing is converted.
        device: of messages.
        shared: boxes of the source of which ranks have copies; None: these are not compared.
        has_members: whether the source may be an ensemble.
        has_twins: whether a rank of the source has two tensors that are one weight of the target.
        all_offer: whether all ranks of the source have an optimizer.
    """

    source: GridLayouts
    target: GridLayouts
    sent: SentLayouts
    plan: TransferPlan
    blocks: TransferPlan | None
    device: torch.device
    shared: SharedBoxes | None
    has_members: bool
    has_twins: bool
    all_offer: bool

    @classmethod
    def of(
        cls,
        source: SourceSide,
        target: TargetSide,
        group: ProcessGroup,
        ranks: Sequence[int],
        compares: bool,
    ) -> Outline:
        """Tell all ranks of both sides, and plan; collective over the group.

        Args:
            source, target: this rank's parts of both sides.
            group: of the ranks of both.
            ranks: these, in the group's order.
            compares: whether this rank asks to compare copies.

        Raises:
            TransferError: on all ranks: the sides do not fit, or the plans differ.
        """
        source.ties = target.ties = at_first(
            group, lambda: (source.tied(), target.tied(), bool(source.given)), _ties_of, _failed
        )
        telling = partial(_Told.of, compares=compares)
        gathered = partial(_Sides.of, ranks)
        first = at_first(group, lambda: telling(source), gathered, _failed)
        compared = all(one.compares for one in first.told)
        shared = SharedBoxes(first.layouts, group) if compared else None
        sent = SentLayouts(first.layouts)
        if any(one.converts for one in first.told):
            sent = at_first(
                # None: this rank is not on the source, or has no convert=.
                group, lambda: source.sent and source.sent.told, partial(sent.converted, ranks),
                _failed,
            )  # fmt: skip
        offers = first.offers
        target.take_offer(sent.side.forms, chain.from_iterable(offers))

        def hear(told: list[_Told]) -> _Sides:
            found = gathered(told)
            check_replicas(
                found.layouts, dict(zip(ranks, (one.place for one in told), strict=True))
            )
            return found

        second = at_first(group, lambda: telling(target), hear, _failed)
        target.check_offer(chain.from_iterable(second.offers))
        hosts = dict(zip(ranks, (one.host for one in first.told), strict=True))
        partly = any(one.partly for one in second.told)
        plans: list[TransferPlan] = []

        def plan() -> str:
            refuse_shared_memory(source.held, target.held)
            if second.layouts.forms and target.grid is not None:
                target.names.check_used(second.layouts.forms)
            check_groups(sent.groups, second.layouts.forms)
            check_scales(first.scales, sent.side.forms, second.layouts)
            plans.append(TransferPlan(sent.side, second.layouts, hosts, partly=partly))
            if sent.split.forms:
                plans.append(TransferPlan(first.layouts, sent.split, hosts, partly=True))
            return "".join(each.digest for each in plans)

        at_first(group, plan, partial(_check_same, ranks), _failed)
        return cls(
            first.layouts, second.layouts, sent, plans[0], plans[1] if plans[1:] else None,
            message_device(group, first.devices | second.devices), shared,
            any(one.members for one in first.told), any(one.twins for one in first.told),
            len(offers) == len(first.layouts.places),
        )  # fmt: skip


@dataclass(frozen=True)
class _Told:
    """One rank's message about one side.

    Args:
        layout: of its tensors; None: it is not on that side.
        host: where it runs.
        devices: of its tensors.
        more: of the source its optimizer's values that are no tensors, of the target the
            parameters that its optimizer updates; None: it has none.
        partly: whether only= was given.
        compares: whether copies are to be compared.
        members: whether the source may be an ensemble.
        place: a side's, as `OneSide` has it.
        converts: whether convert= was given.
        scales: as `SourceSide` has them.
        twins: whether it has two tensors that are one weight of the target.
    """

    layout: bytes | None
    host: str
    devices: frozenset[str]
    more: tuple[str, ...] | None
    partly: bool
    compares: bool
    members: bool
    place: tuple[int, ...]
    converts: bool
    scales: Mapping[str, list[str]]
    twins: bool

    @classmethod
    def of(cls, side: SourceSide | TargetSide, compares: bool) -> _Told:
        """Look at a side."""
        held = side.hold()
        layout = held.layout if held is not None else None
        parts = held.parts if held is not None else ()
        devices = frozenset(part.tensor.device.type for part in parts)
        flags = side.names.is_partial, compares, side.has_members
        source = side if isinstance(side, SourceSide) else None
        return cls(
            layout, socket.gethostname(), devices, side.more, *flags, side.place,
            source is not None and bool(source.given), source.scales if source is not None else {},
            source is not None and source.has_twins,
        )  # fmt: skip


@dataclass(frozen=True)
class _Sides:
    """All ranks' messages about one side, in the order of ranks, and their layouts."""

    told: Sequence[_Told]
    layouts: GridLayouts

    @classmethod
    def of(cls, ranks: Sequence[int], told: Sequence[_Told]) -> _Sides:
        by_rank = zip(ranks, told, strict=True)
        layouts = {rank: one.layout for rank, one in by_rank if one.layout is not None}
        return cls(told, GridLayouts.of(layouts))

    @property
    def offers(self) -> list[tuple[str, ...]]:
        """Messages about optimizers, of the ranks that have one."""
        return [one.more for one in self.told if one.more is not None]

    @property
    def scales(self) -> dict[str, list[str]]:
        """The source's tensors with scales beside them, of all ranks."""
        return {name: scales for one in self.told for name, scales in one.scales.items()}

    @property
    def devices(self) -> frozenset[str]:
        """Those of all tensors."""
        return frozenset(device for one in self.told for device in one.devices)


def _ties_of(told: Sequence[tuple[Tied, Tied, bool]]) -> list[set[str]]:
    """The names of each weight that either side has tied; none where the source converts."""
    sources, targets, converts = zip(*told, strict=True)
    if any(converts):
        return []
    return ties_of([], [*ties_of_all(sources), *ties_of_all(targets)])


def _failed(told: str) -> TransferError:
    return TransferError(f"nothing was moved: {told}")


def _check_same(ranks: Sequence[int], digests: Sequence[str]) -> None:
    """Check that all ranks have made one plan, before anything moves."""
    for rank, each in zip(ranks, digests, strict=True):
        if each != digests[0]:
            raise TransferError(
                f"the plan has digest {digests[0][:12]} on rank {ranks[0]} "
                f"and {each[:12]} on rank {rank}; run one version of commgrid on all"
            )
