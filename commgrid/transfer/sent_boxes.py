"""Boxes that a source sends, some of them converted on the way, with bounded memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from commgrid.errors import SpecError, TransferError
from commgrid.layout.axis_names import nearest
from commgrid.layout.box import Box, Shape, common, slices, volume
from commgrid.layout.rank_text import describe_ranks
from commgrid.resharding.dtypes import unscaled
from commgrid.resharding.item import Chunk, Item
from commgrid.resharding.layouts import Form, GridLayouts
from commgrid.resharding.local_boxes import LocalBoxes
from commgrid.transfer.conversion import Convert, Converted, tried
from commgrid.transfer.models import Names


class _Piece(NamedTuple):
    """Blocks of a tensor that are converted at once.

    Args:
        tensor: of which.
        box: of the full one.
        is_whole: whether this rank holds all of it, without what others bring.
    """

    tensor: Converted
    box: Box
    is_whole: bool


class SentBoxes(LocalBoxes):
    """Boxes that a source sends: its tensors, or their conversions, made when they are looked at.

    Args:
        held: the source's tensors by the target's names.
        given: conversions, of which the first that does not return a tensor itself converts it.
        names: which are moved.
        room: bytes of converted tensors that are kept, unless one is larger.

    Attributes:
        split: boxes that are brought together before each run; their tensors have no numbers.
        groups: the results of one tensor, of which a target has all.
        patterns: of conversions, and whether each takes a tensor of this rank.

    Raises:
        SpecError: a conversion returns something else than tensors, two tensors become one name, or
            a name is left out.
    """

    is_lasting = False

    def __init__(self, held: LocalBoxes, given: Sequence[Convert], names: Names, room: int) -> None:
        super().__init__()
        self._held, self._room, self._size = held, room, 0
        self._pieces: dict[str, dict[Box, _Piece]] = {}
        self._made: dict[tuple[str, Box], dict[str, Tensor]] = {}
        self._devices: dict[str, torch.device] = {}
        self._together = LocalBoxes()
        self.split = LocalBoxes()
        self.groups: list[tuple[str, ...]] = []
        self.patterns: dict[str, bool] = {}
        for one in () if names.is_partial else given:  # which others may be for
            for pattern, is_used in one.patterns(held.names).items():
                self.patterns[pattern] = self.patterns.get(pattern, False) or is_used
        made_of: dict[str, str] = {}
        somewhere = next((c.data.device for item in held.items() for c in item.chunks), "cpu")
        for item in held.items():
            name, chunks = item.key, item.chunks
            device = chunks[0].data.device if chunks else torch.device(somewhere)
            each = (one for one in given if one.takes(name))
            tries = (tried(one, name, item.shape, item.dtype, device) for one in each)
            tensor = next(filter(None, tries), None)
            for output in tensor.outputs if tensor else (name,):
                _refuse_two_or_left_out(output, name, made_of.setdefault(output, name), names)
            if tensor is None:
                self.add(item)
                continue
            self.groups.append(tuple(tensor.outputs))
            self._devices[name] = device
            for chunk in chunks:
                self._add(tensor, chunk.box, item.dtype)

    def _add(self, tensor: Converted, box: Box, dtype: torch.dtype) -> None:
        """Adds what is made of a box, on the meta device: it has a shape, and no memory yet."""
        for piece, is_whole in tensor.pieces(box) if volume(box) else ():
            if not is_whole:
                self.split.add(_without_memory(tensor.name, tensor.shape, piece, dtype))
            for name, output in tensor.outputs.items():
                made = output.box(piece)
                self.add(_without_memory(name, output.shape, made, output.dtype))
                self._pieces.setdefault(name, {})[made] = _Piece(tensor, piece, is_whole)

    @property
    def told(self) -> ToldSent:
        """The message to other ranks."""
        return ToldSent(self.layout, self.split.layout, self.groups, self.patterns)

    def begin(self) -> LocalBoxes:
        """Returns memory for the blocks that are brought together."""
        self._together = LocalBoxes()
        self._together.is_lasting = False
        for item in self.split.items():
            self._together.add(item.empty(device=self._devices[item.key]))
        return self._together

    def end(self) -> None:
        """Gives back all memory; the numbers of the next run are others."""
        self._together = LocalBoxes()
        self._made.clear()
        self._size = 0

    def view(self, name: str, box: Box) -> Tensor:
        """The part of a tensor that a box is; what is converted is made now."""
        for at, piece in self._pieces.get(name, {}).items():
            if common(at, box) == box:
                return self._convert(piece)[name][slices(box, at[0])]
        return super().view(name, box)

    def tensors(self, name: str) -> list[Tensor]:
        """This rank's boxes of a tensor, each once."""
        pieces = self._pieces.get(name, {}).values()
        return [self._convert(piece)[name] for piece in pieces] or super().tensors(name)

    @torch.no_grad()
    def _convert(self, piece: _Piece) -> dict[str, Tensor]:
        key = piece.tensor.name, piece.box
        made = self._made.pop(key, None)
        if made is None:
            held = self._held if piece.is_whole else self._together
            made = piece.tensor.made_of(held.view(*key))
            self._size += _bytes(made)
        self._made[key] = made  # the last used comes last
        while self._size > self._room and len(self._made) > 1:
            self._size -= _bytes(self._made.pop(next(iter(self._made))))
        return made


class ToldSent(NamedTuple):
    """One rank's message about what it sends.

    Args:
        layout: of the boxes that it sends.
        split: of the blocks that are brought together for it.
        groups, patterns: see `SentBoxes`.
    """

    layout: bytes
    split: bytes
    groups: list[tuple[str, ...]]
    patterns: dict[str, bool]


@dataclass(frozen=True)
class SentLayouts:
    """Layouts of the boxes that all ranks of a source send.

    Args:
        side: their layouts.
        split: those of blocks that are brought together first.
        groups: see `SentBoxes`.
    """

    side: GridLayouts
    split: GridLayouts = field(default_factory=lambda: GridLayouts.of({}))
    groups: frozenset[tuple[str, ...]] = frozenset()

    def converted(self, ranks: Sequence[int], told: Sequence[ToldSent | None]) -> SentLayouts:
        """The layouts where ranks convert.

        Raises:
            TransferError: a rank of the source has no convert=, and others have; or a pattern takes
                no tensor.
        """
        by_rank = {rank: one for rank, one in zip(ranks, told, strict=True) if one is not None}
        without = sorted(self.side.places.keys() - by_rank)
        if without:
            raise TransferError(
                f"convert= is given on {describe_ranks(sorted(by_rank)) or 'the target'} and not "
                f"on {describe_ranks(without)} of the source; give it on all ranks of the source"
            )
        used: dict[str, bool] = {}
        for one in by_rank.values():
            for pattern, is_used in one.patterns.items():
                used[pattern] = used.get(pattern, False) or is_used
        unused = next((pattern for pattern, is_used in used.items() if not is_used), None)
        if unused is not None:
            raise TransferError(
                f"convert= has only={unused!r}, which is the name of no tensor of the source"
                f"{nearest(unused, self.side.forms)}; leave it out, or correct it"
            )
        return SentLayouts(
            GridLayouts.of({rank: one.layout for rank, one in by_rank.items()}),
            GridLayouts.of({rank: one.split for rank, one in by_rank.items()}),
            frozenset(group for one in by_rank.values() for group in one.groups),
        )


def _refuse_two_or_left_out(output: str, name: str, other: str, names: Names) -> None:
    if other != name:
        raise SpecError(
            f"convert= makes {output} of both {other} and {name}; give each a name of its own"
        )
    if not names.takes(output):
        raise SpecError(f"only= leaves out {output}, which convert= makes of {name}; add its name")


def _without_memory(name: str, shape: Shape, box: Box, dtype: torch.dtype) -> Item:
    chunk = Chunk(box[0], torch.empty(box[1], dtype=dtype, device="meta"))
    return Item((name,), shape, [chunk], dtype)


def _bytes(made: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in made.values())


def check_groups(groups: Iterable[Sequence[str]], target: Collection[str]) -> None:
    """Refuse a target with some of the results of one tensor, and not all.

    Raises:
        TransferError: names both.
    """
    for group in groups:
        there = [name for name in group if name in target]
        if there and len(there) < len(group):
            missing = next(name for name in group if name not in target)
            raise TransferError(
                f"convert= makes {missing} and {there[0]} of one tensor, and the target has only "
                f"{there[0]}; give the target both"
            )


def check_scales(
    scales: Mapping[str, Collection[str]], sent: Mapping[str, Form], target: GridLayouts
) -> None:
    """Refuse numbers of eight bits that would go into wider floats without their scale.

    Args:
        scales: of tensors of the source, by name.
        sent: the tensors that the source sends.
        target: what its ranks hold.

    Raises:
        TransferError: names both.
    """
    taken = set(target.reads.values())
    for name, form in target.forms.items() if scales else ():
        read = target.reads[name]
        if read in scales and read in sent:
            scale = unscaled(sent[read].dtype, form.dtype, scales[read], taken)
            if scale:
                raise TransferError(
                    f"{name} is {sent[read].dtype} in the source, to be multiplied by {scale}, "
                    f"which is not moved, and {form.dtype} in the target; move both, or give the "
                    "source a convert= that returns the product"
                )
