"""Shapes, dtype and plans of a bridge's calls, concluded from all ranks' facts.

Each rank tells the others its facts. From all of them every rank concludes the same: a plan for
each way, or one error that all of them raise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from commgrid.bridge.plan import BridgeMessage, Positions, messages, one_by_one
from commgrid.bridge.sides import Cut, GridSide
from commgrid.equality.digest import digest
from commgrid.errors import GridMismatchError, ShapeError, SpecError
from commgrid.layout.rank_text import describe_ranks

DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
"""The dtypes that can cross."""


@dataclass(frozen=True)
class Facts:
    """One rank's part in a call.

    Args:
        is_source: whether it is on the source's stage.
        records: whether autograd is recording.
        shape, dtype: of its tensor, if it gave one.
        needs_grad: whether that one needs a gradient.
        complaint: what is wrong, as words after "gave"; "": nothing.
        digest: of the tensor's bits, if copies are compared.
    """

    is_source: bool
    records: bool
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    needs_grad: bool = False
    complaint: str = ""
    digest: int = field(default=0, compare=False)

    @classmethod
    def of(cls, x: object, is_source: bool, device: torch.device, compares: bool = False) -> Facts:
        """Make this rank's facts."""
        records, complaint = torch.is_grad_enabled(), ""
        if not isinstance(x, Tensor | None):
            complaint = "something else than a tensor; the source's ranks call bridge(x) with one"
        elif x is None and is_source:
            complaint = (
                "no tensor, though it is on the source's stage; the source's ranks call bridge(x)"
            )
        elif x is not None and not is_source:
            complaint = "a tensor, though it is not on the source's stage; others call bridge(None)"
        elif x is not None and x.dtype not in DTYPES:
            takes = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            complaint = f"a tensor of {x.dtype}; a bridge takes {takes}"
        elif x is not None and x.device.type != device.type:
            complaint = f"a tensor on {x.device}; the bridge's communicator sends from {device}"
        if complaint or not isinstance(x, Tensor):
            return cls(is_source, records, complaint=complaint)
        return cls(
            is_source, records, tuple(x.shape), x.dtype, records and x.requires_grad,
            digest=int(digest(x)) if compares else 0,
        )  # fmt: skip

    @property
    def said(self) -> str:
        return f"{self.shape} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Contract:
    """The messages of every call, as long as shapes stay.

    Args:
        facts: this rank's.
        dtype: of all tensors.
        needs_grad: whether gradients take the way back.
        dims: along which messages are cut.
        arrives: shape of this rank's result; None: it has none.
        forward, backward: its messages.
    """

    facts: Facts
    dtype: torch.dtype
    needs_grad: bool
    dims: tuple[int, ...]
    arrives: tuple[int, ...] | None
    forward: tuple[BridgeMessage, ...]
    backward: tuple[BridgeMessage, ...]


def conclude(
    about: str, told: Mapping[int, Facts], source: GridSide, target: GridSide, rank: int
) -> Contract:
    """Conclude the messages from all ranks' facts; if they do not fit, all raise the same error.

    Raises:
        ShapeError: a rank gave no tensor or one it should not, or shapes or dtypes do not fit.
        GridMismatchError: ranks gave copies that differ.
        SpecError: ranks differ in whether gradients are wanted, or the tensor has not the dims.
    """
    for one, facts in told.items():
        if facts.complaint:
            raise ShapeError(f"{about}: nothing can cross, since rank {one} gave {facts.complaint}")
    lead = _check_alike(about, told, source.ranks)
    needs_grad = _needs_grad(about, told, source.ranks, target.ranks)
    own, theirs = (_dims(about, side.cuts, len(lead.shape)) for side in (source, target))
    dims = tuple(sorted({*own, *theirs}))
    shapes = {one: told[one].shape for one in source.ranks}
    whole, lengths = _whole(about, shapes, source, own)
    _check_copies(about, told, source)
    held = _held(f"{about}: source", source, own, dims, whole, lengths)
    wanted = _held(f"{about}: target", target, theirs, dims, whole, None)
    senders, receivers = source.side.spread(own, dims), target.side.spread(theirs, dims)
    arrives = None
    if rank in receivers.places:
        sized = list(whole)
        for dim, place, held_there in zip(dims, receivers.places[rank], wanted, strict=True):
            sized[dim] = sum(stop - start for start, stop in held_there[place])
        arrives = tuple(sized)
    back = messages(receivers, senders, wanted, held, rank) if needs_grad else ()
    assert lead.dtype is not None
    return Contract(
        told[rank], lead.dtype, needs_grad, dims, arrives,
        messages(senders, receivers, held, wanted, rank), back,
    )  # fmt: skip


def _check_alike(about: str, told: Mapping[int, Facts], ranks: Sequence[int]) -> Facts:
    """The first source rank's facts, where all have its dtype and number of dims."""
    lead = told[ranks[0]]
    for one in ranks:
        if told[one].dtype != lead.dtype or len(told[one].shape) != len(lead.shape):
            raise ShapeError(
                f"{about}: rank {ranks[0]} gave a tensor of {lead.said}, rank {one} of "
                f"{told[one].said}; expected one dtype and number of dims on the source's ranks"
            )
    return lead


def _check_copies(about: str, told: Mapping[int, Facts], source: GridSide) -> None:
    """Refuse copies of which one would be sent for all, and others have other numbers."""
    for ranks in source.side.copies.values():
        for one in ranks:
            if told[one].digest != told[ranks[0]].digest:
                raise GridMismatchError(
                    f"{about}: {describe_ranks([ranks[0], one])} gave tensors that should be "
                    "copies and differ; one of them would have been sent for both. Cut the tensor "
                    "along the axis between them, or give one sum on all; where kernels are not "
                    "deterministic, make the bridge with compare=False"
                )


def _needs_grad(
    about: str, told: Mapping[int, Facts], source: Sequence[int], target: Sequence[int]
) -> bool:
    wanting = [one for one in source if told[one].needs_grad]
    recording = [one for one in target if told[one].records]
    for what, having, ranks in (
        ("a tensor that needs a gradient", wanting, source),
        ("autograd recording", recording, target),
    ):
        if 0 < len(having) < len(ranks) and (wanting and recording):
            without = describe_ranks(set(ranks) - set(having))
            raise SpecError(
                f"{about}: {describe_ranks(having)} came with {what}, {without} without; the "
                "gradients' way back needs all of them, or none"
            )
    return bool(wanting and recording)


def _dims(about: str, cuts: Sequence[Cut], count: int) -> list[int]:
    """The cuts' dims, counted from the front."""
    found = []
    for cut in cuts:
        if not -count <= cut.dim < count:
            raise SpecError(
                f"{about}: dim={cut.dim} of group {cut.group!r}, but the source's tensors have "
                f"{count} dims; expected {-count} to {count - 1}"
            )
        found.append(cut.dim % count)
    if len(set(found)) < len(found):
        raise SpecError(
            f"{about}: groups {', '.join(repr(cut.group) for cut in cuts)} cut one dim; name a "
            "group along all their axes instead, such as 'dp_cp'"
        )
    return found


def _whole(
    about: str, shapes: Mapping[int, tuple[int, ...]], source: GridSide, own: Sequence[int]
) -> tuple[list[int], list[tuple[int, ...]]]:
    """The shape of the whole tensor, and for each cut the lengths at its places."""
    first = source.ranks[0]
    whole = list(shapes[first])
    lengths = [[0] * size for size in source.sizes]
    by: list[dict[int, int]] = [{} for _ in own]  # the rank that each length is of
    for rank in source.ranks:
        for dim, length in enumerate(shapes[rank]):
            if dim not in own:
                if length != whole[dim]:
                    raise ShapeError(_differ(about, dim, first, rank, shapes))
                continue
            cut = own.index(dim)
            place = source.side.places[rank][cut]
            lead = by[cut].setdefault(place, rank)
            if shapes[lead][dim] != length:
                raise ShapeError(_differ(about, dim, lead, rank, shapes))
            lengths[cut][place] = length
    for dim, many in zip(own, lengths, strict=True):
        whole[dim] = sum(many)
    return whole, [tuple(many) for many in lengths]


def _held(
    about: str,
    side: GridSide,
    own: Sequence[int],
    dims: Sequence[int],
    whole: Sequence[int],
    lengths: Sequence[Sequence[int]] | None,
) -> Positions:
    """The positions of each place of a side, along each dim that either side cuts."""
    held = []
    for dim in dims:
        if dim not in own:
            held.append(one_by_one([whole[dim]]))
            continue
        at = own.index(dim)
        known = None if lengths is None else lengths[at]
        try:
            held.append(side.cuts[at].held(whole[dim], known, side.sizes[at]))
        except ShapeError as error:
            raise ShapeError(f"{about}: {error}") from error
    return tuple(held)


def _differ(
    about: str, dim: int, one: int, other: int, shapes: Mapping[int, tuple[int, ...]]
) -> str:
    return (
        f"{about}: rank {one} gave a tensor of shape {shapes[one]}, rank {other} of "
        f"{shapes[other]}; they hold the same positions of dim {dim}, whose lengths must be equal"
    )
