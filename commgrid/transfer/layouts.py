"""What ranks hold of a model, in few bytes: names, and the forms that many of them share.

A form is the shape of the full tensor, its dtype and the boxes that a rank has of it. Layers of one
kind have the same forms, and ranks with copies have the same layouts, so that the layouts of all
ranks of a grid are a short table.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from commgrid.errors import TransferError
from commgrid.planning.boxes import Box, Shape
from commgrid.planning.names import nearest
from commgrid.planning.rank_lists import describe_ranks

_MOST_TOLD = 3


@dataclass(frozen=True)
class Form:
    """How a rank holds a tensor.

    Args:
        shape: of the full tensor.
        dtype: as torch names it, without `torch.`.
        itemsize: bytes of an element.
        boxes: what the rank has of it.
    """

    shape: Shape
    dtype: str
    itemsize: int
    boxes: tuple[Box, ...]

    def __str__(self) -> str:
        return f"shape {self.shape} and dtype {self.dtype}"


class Entry(NamedTuple):
    """A tensor of a rank.

    Args:
        name: what it is called.
        form: how the rank holds it.
        source: the name of the tensor that it gets its numbers from; "": its own.
    """

    name: str
    form: Form
    source: str = ""


def pack(entries: Sequence[Entry]) -> bytes:
    """A rank's layout as bytes, equal where layouts are."""
    forms: dict[Form, int] = {}
    names = [(e.name, forms.setdefault(e.form, len(forms)), e.source) for e in entries]
    described = [(f.shape, f.dtype, f.itemsize, f.boxes) for f in forms]
    return zlib.compress(json.dumps([described, names], separators=(",", ":")).encode(), 6)


def unpack(data: bytes) -> list[Entry]:
    """What `pack` packed."""
    described, names = json.loads(zlib.decompress(data))
    forms = [
        Form(tuple(shape), dtype, itemsize, tuple((tuple(o), tuple(s)) for o, s in boxes))
        for shape, dtype, itemsize, boxes in described
    ]
    return [Entry(name, forms[number], source) for name, number, source in names]


@dataclass(frozen=True)
class Side:
    """The layouts of all ranks of a grid.

    Args:
        packed: the different ones.
        places: rank to the place of its layout in `packed`.
    """

    packed: tuple[bytes, ...]
    places: Mapping[int, int]

    @classmethod
    def of(cls, layouts: Mapping[int, bytes]) -> Side:
        """The side of ranks and their packed layouts."""
        kinds: dict[bytes, int] = {}
        places = {rank: kinds.setdefault(data, len(kinds)) for rank, data in layouts.items()}
        return cls(tuple(kinds), places)

    @cached_property
    def layouts(self) -> list[list[Entry]]:
        """The different layouts."""
        return [unpack(data) for data in self.packed]

    @cached_property
    def ranks_of(self) -> list[tuple[int, ...]]:
        """The ranks that have each of the layouts."""
        found: list[list[int]] = [[] for _ in self.packed]
        for rank, place in self.places.items():
            found[place].append(rank)
        return [tuple(sorted(ranks)) for ranks in found]

    def holders(self, name: str) -> list[int]:
        """The ranks that have some of a tensor."""
        return sorted(
            rank
            for ranks, entries in zip(self.ranks_of, self.layouts, strict=True)
            if any(entry.name == name for entry in entries)
            for rank in ranks
        )

    @property
    def digest(self) -> str:
        """A number that differs where any layout of any rank does."""
        found = hashlib.sha256(repr(sorted(self.places.items())).encode())
        for data in self.packed:
            found.update(hashlib.sha256(data).digest())
        return found.hexdigest()

    @cached_property
    def forms(self) -> dict[str, Form]:
        """Name to a form of every tensor, of which shape and dtype are the same on all ranks.

        Raises:
            TransferError: ranks say different things of one name.
        """
        found: dict[str, Form] = {}
        for entries in self.layouts:
            for name, form, _ in entries:
                first = found.setdefault(name, form)
                if first is not form and (first.shape, first.dtype) != (form.shape, form.dtype):
                    raise TransferError(
                        f"{name} has {self._said(name)}; expected the same full tensor on all "
                        "ranks of a side"
                    )
        return found

    @cached_property
    def reads(self) -> dict[str, str]:
        """Name to what the tensor is called on the other side."""
        return {e.name: e.source or e.name for entries in self.layouts for e in entries}

    def difference(self, place: int, now: bytes) -> str:
        """What a layout that was packed later has otherwise than one of these."""
        before = {e.name: e.form for e in self.layouts[place]}
        after = {e.name: e.form for e in unpack(now)}
        for name in (*before, *after):
            if before.get(name) != after.get(name):
                was, is_ = (forms.get(name) for forms in (before, after))
                return (
                    f"{name} had {was or 'not been there'} and now has {is_ or 'gone'}"
                    if str(was) != str(is_) else f"this rank has other boxes of {name}"
                )  # fmt: skip
        return "its tensors come in another order"

    def _said(self, name: str) -> str:
        """What ranks say of a tensor."""
        said: dict[str, list[int]] = {}
        for ranks, entries in zip(self.ranks_of, self.layouts, strict=True):
            for entry in entries:
                if entry.name == name:
                    said.setdefault(str(entry.form), []).extend(ranks)
        return " and ".join(f"{form} on {describe_ranks(ranks)}" for form, ranks in said.items())


def _kind(dtype: str) -> int:
    """0 to 3: bool, whole numbers, floating point, complex; the higher holds the lower."""
    for kind, beginnings in enumerate((("complex",), ("float", "bfloat"), ("int", "uint"))):
        if dtype.startswith(beginnings):
            return 3 - kind
    return 0


def check_sides(source: Side, target: Side, partly: bool) -> None:
    """Refuses sides that are not of one model.

    Args:
        partly: whether the target need not have everything that the source has.

    Raises:
        TransferError: names tensor and ranks.
    """
    sources, targets, reads = source.forms, target.forms, target.reads
    if not targets:
        raise TransferError("the target has no tensors; give a model, or other names to only=")
    for name, form in targets.items():
        read = reads[name]
        needing = describe_ranks(target.holders(name))
        if read in sources and sources[read].shape == form.shape:
            if _kind(sources[read].dtype) > _kind(form.dtype):
                raise TransferError(
                    f"{name} has dtype {sources[read].dtype} on "
                    f"{describe_ranks(source.holders(read))} of the source and {form.dtype} on "
                    f"{needing} of the target, which cannot hold its numbers; quantize them first, "
                    "or give the target a tensor that can"
                )
            continue
        if read not in sources:
            raise TransferError(
                f"{name} is on {needing} of the target, and the source has no {read}"
                f"{nearest(read, list(sources))}; say with rename= what it is called there, or "
                "with only= what is to be moved"
            )
        raise TransferError(
            f"{name} has shape {sources[read].shape} on {describe_ranks(source.holders(read))} of "
            f"the source and {form.shape} on {needing} of the target; give both sides one model"
        )
    read_from = set(reads.values())
    unread = sorted(
        name for name in sources.keys() - read_from
        # Of optimizers a target takes what it has a place for, and weights may come from copies.
        if not name.startswith("optimizer.") and f"optimizer.state.{name}.master" not in read_from
    )  # fmt: skip
    if unread and not partly:
        more = f" and {len(unread) - _MOST_TOLD} more" if len(unread) > _MOST_TOLD else ""
        raise TransferError(
            f"{', '.join(unread[:_MOST_TOLD])}{more} on "
            f"{describe_ranks(source.holders(unread[0]))} of the source is on no rank of the "
            "target; say with rename= what it is called there, or with only= what is to be moved"
        )
