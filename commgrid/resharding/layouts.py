"""Layouts of ranks in few bytes: names, and the forms that many of them share.

A form is the shape of the full tensor, its dtype and the boxes that a rank has of it. Layers of one
kind have the same forms, so that a layout is a list of names, each with the number of its form, and
a few forms. Ranks with copies have the same layouts, and ranks that have other boxes of the same
tensors the same lists, so that the layouts of all ranks of a grid are a short table:

    rank 0   names A   forms (rows 0, 1)         A = [("blocks.0.up", 0), ("blocks.1.up", 0), …]
    rank 1   names A   forms (rows 2, 3)
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, NamedTuple

from commgrid.errors import TransferError
from commgrid.layout.axis_names import nearest
from commgrid.layout.box import Box, Shape, volume
from commgrid.layout.rank_text import describe_ranks
from commgrid.resharding.dtypes import dtype_of, keeps_numbers

if TYPE_CHECKING:
    import torch

_MOST_TOLD = 3
_LENGTH = 8  # bytes


@dataclass(frozen=True)
class Form:
    """Shape and dtype of a full tensor, and the boxes that a rank has of it.

    Args:
        shape: of the full tensor.
        dtype: as torch names it, without `torch.`.
        itemsize: bytes of an element.
        boxes: what the rank has of it; (): not said, as of a tensor in a checkpoint.
    """

    shape: Shape
    dtype: str
    itemsize: int
    boxes: tuple[Box, ...] = ()

    @classmethod
    def of(cls, shape: Iterable[int], dtype: torch.dtype, boxes: Iterable[Box] = ()) -> Form:
        """The form of a tensor of torch's."""
        return cls(tuple(shape), str(dtype).removeprefix("torch."), dtype.itemsize, tuple(boxes))

    def __str__(self) -> str:
        return f"shape {self.shape} and dtype {self.dtype}"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch has it."""
        return dtype_of(self.dtype)


class LayoutEntry(NamedTuple):
    """A tensor of a rank.

    Args:
        name: what it is called.
        form: how the rank holds it.
        source: the name of the tensor that it gets its numbers from; "": its own.
    """

    name: str
    form: Form
    source: str = ""


Names = list[tuple[str, int, str]]
"""Of each tensor its name, the number of its form, and the name that it gets its numbers from."""


def pack(entries: Sequence[LayoutEntry]) -> bytes:
    """Pack a rank's layout: forms, names, and the forms' length. Equal layouts are equal bytes."""
    forms: dict[Form, int] = {}
    names = [(e.name, forms.setdefault(e.form, len(forms)), e.source) for e in entries]
    described = _packed([(f.shape, f.dtype, f.itemsize, f.boxes) for f in forms])
    return described + _packed(names) + len(described).to_bytes(_LENGTH, "big")


def unpack(data: bytes) -> list[LayoutEntry]:
    """What `pack` packed."""
    described, names = _split(data)
    forms = _forms(described)
    return [LayoutEntry(name, forms[number], source) for name, number, source in _names(names)]


def _packed(value: object) -> bytes:
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 6)


def _split(data: bytes) -> tuple[bytes, bytes]:
    """The forms and the names of a layout, packed."""
    end = len(data) - _LENGTH
    length = int.from_bytes(data[end:], "big")
    return data[:length], data[length:end]


def _forms(data: bytes) -> list[Form]:
    return [
        Form(tuple(shape), dtype, itemsize, tuple((tuple(o), tuple(s)) for o, s in boxes))
        for shape, dtype, itemsize, boxes in json.loads(zlib.decompress(data))
    ]


def _names(data: bytes) -> Names:
    return [(name, number, source) for name, number, source in json.loads(zlib.decompress(data))]


@dataclass(frozen=True)
class GridLayouts:
    """The layouts of all ranks of a grid.

    Args:
        lists: the different lists of names, packed.
        packed: the different layouts: each one's place in `lists`, and its forms, packed.
        places: rank to the place of its layout in `packed`.
    """

    lists: tuple[bytes, ...]
    packed: tuple[tuple[int, bytes], ...]
    places: Mapping[int, int]

    @classmethod
    def of(cls, layouts: Mapping[int, bytes]) -> GridLayouts:
        """Collect every rank's packed layout, each distinct one once."""
        lists: dict[bytes, int] = {}
        kinds: dict[tuple[int, bytes], int] = {}
        known: dict[bytes, int] = {}
        places = {}
        for rank, data in layouts.items():
            if data not in known:
                forms, names = _split(data)
                layout = lists.setdefault(names, len(lists)), forms
                known[data] = kinds.setdefault(layout, len(kinds))
            places[rank] = known[data]
        return cls(tuple(lists), tuple(kinds), places)

    @cached_property
    def names(self) -> list[Names]:
        """The different lists of names."""
        return [_names(data) for data in self.lists]

    @cached_property
    def tables(self) -> list[list[Form]]:
        """The forms of each of the layouts."""
        return [_forms(data) for _, data in self.packed]

    @cached_property
    def layouts_with(self) -> list[list[int]]:
        """The places of the layouts that have each of the lists of names."""
        found: list[list[int]] = [[] for _ in self.lists]
        for place, (number, _) in enumerate(self.packed):
            found[number].append(place)
        return found

    @cached_property
    def ranks_of(self) -> list[tuple[int, ...]]:
        """The ranks that have each of the layouts."""
        found: list[list[int]] = [[] for _ in self.packed]
        for rank, place in self.places.items():
            found[place].append(rank)
        return [tuple(sorted(ranks)) for ranks in found]

    @cached_property
    def ranks_with(self) -> Callable[[frozenset[int]], tuple[int, ...]]:
        """A cached function of some layouts' places to the ranks that have any of them."""
        of = self.ranks_of
        return cache(lambda places: tuple(sorted(rank for place in places for rank in of[place])))

    @cached_property
    def kinds(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Name to the lists of names that have it, and the number of its form in each."""
        found: dict[str, list[tuple[int, int]]] = {}
        for place, names in enumerate(self.names):
            for name, number, _ in names:
                found.setdefault(name, []).append((place, number))
        return {name: tuple(kind) for name, kind in found.items()}

    def is_still(self, place: int, now: bytes) -> bool:
        """Whether a layout that was packed later is one of these."""
        number, forms = self.packed[place]
        return _split(now) == (forms, self.lists[number])

    def held_as(self, name: str) -> dict[int, Form]:
        """The layouts that have some of a tensor, and how each has it."""
        return {
            place: self.tables[place][number]
            for listed, number in self.kinds.get(name, ())
            for place in self.layouts_with[listed]
        }

    def places_of(self, name: str) -> list[tuple[Box, frozenset[int]]]:
        """Each box of a tensor that has elements, in order, and the layouts that have it."""
        found: dict[Box, set[int]] = {}
        for place, form in self.held_as(name).items():
            for box in filter(volume, form.boxes):
                found.setdefault(box, set()).add(place)
        return [(box, frozenset(places)) for box, places in sorted(found.items())]

    def held_by(self, rank: int) -> dict[str, Form]:
        """A rank's tensors, and how it has each."""
        place = self.places[rank]
        forms = self.tables[place]
        return {name: forms[number] for name, number, _ in self.names[self.packed[place][0]]}

    def holders(self, name: str) -> list[int]:
        """The ranks that have some of a tensor."""
        return sorted(rank for place in self.held_as(name) for rank in self.ranks_of[place])

    @property
    def digest(self) -> str:
        """A number that differs where any layout of any rank does."""
        found = hashlib.sha256(repr(sorted(self.places.items())).encode())
        for data in (*self.lists, repr(self.packed).encode()):
            found.update(hashlib.sha256(data).digest())
        return found.hexdigest()

    @cached_property
    def forms(self) -> dict[str, Form]:
        """Name to a form of every tensor, of which shape and dtype are the same on all ranks.

        Raises:
            TransferError: ranks say different things of one name.
        """
        found: dict[str, Form] = {}
        for listed, names in enumerate(self.names):
            tables = [self.tables[place] for place in self.layouts_with[listed]]
            alike = [  # of each number, whether it says one thing on all ranks with these names
                len({(form.shape, form.dtype) for form in forms}) == 1
                for forms in zip(*tables, strict=True)
            ]
            for name, number, _ in names:
                form = tables[0][number]
                first = found.setdefault(name, form)
                same = first is form or (first.shape, first.dtype) == (form.shape, form.dtype)
                if not same or not alike[number]:
                    raise TransferError(
                        f"{name} has {self._said(name)}; expected the same full tensor on all "
                        "ranks of a side"
                    )
        return found

    @cached_property
    def reads(self) -> dict[str, str]:
        """The other side's name of each tensor."""
        return {name: source or name for names in self.names for name, _, source in names}

    def difference(self, place: int, now: bytes) -> str:
        """The first difference of a layout that was packed later."""
        forms = self.tables[place]
        before = {name: forms[number] for name, number, _ in self.names[self.packed[place][0]]}
        after = {e.name: e.form for e in unpack(now)}
        for name in (*before, *after):
            if before.get(name) != after.get(name):
                was, is_ = (side.get(name) for side in (before, after))
                return (
                    f"{name} had {was or 'not been there'} and now has {is_ or 'gone'}"
                    if str(was) != str(is_) else f"this rank has other boxes of {name}"
                )  # fmt: skip
        return "its tensors come in another order"

    def _said(self, name: str) -> str:
        """The forms of a tensor that ranks have told."""
        said: dict[str, list[int]] = {}
        for place, form in self.held_as(name).items():
            said.setdefault(str(form), []).extend(self.ranks_of[place])
        return " and ".join(f"{form} on {describe_ranks(ranks)}" for form, ranks in said.items())


def check_sides(source: GridLayouts, target: GridLayouts, partly: bool) -> None:
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
        given = sources.get(read)
        if given is None or given.shape != form.shape or not keeps_numbers(given.dtype, form.dtype):
            needing = describe_ranks(target.holders(name))
            if given is None:
                raise TransferError(
                    f"{name} is on {needing} of the target, and the source has no {read}"
                    f"{nearest(read, list(sources))}; say with rename= what it is called there, or "
                    "with only= what is to be moved"
                )
            holding = describe_ranks(source.holders(read))
            if given.shape != form.shape:
                raise TransferError(
                    f"{name} has shape {given.shape} on {holding} of the source and {form.shape} "
                    f"on {needing} of the target; give both sides one model"
                )
            raise TransferError(
                f"{name} has dtype {given.dtype} on {holding} of the source and {form.dtype} on "
                f"{needing} of the target, which cannot hold its numbers; quantize them first, or "
                "give the target a tensor that can"
            )
    read_from = set(reads.values())
    unread = sorted(
        name for name in sources.keys() - read_from
        # State that the target has no place for is left, and a weight may be read from its copy.
        if not name.startswith("optimizer.") and f"optimizer.state.{name}.master" not in read_from
        and not counts_averages(name)
    )  # fmt: skip
    if unread and not partly:
        more = f" and {len(unread) - _MOST_TOLD} more" if len(unread) > _MOST_TOLD else ""
        raise TransferError(
            f"{', '.join(unread[:_MOST_TOLD])}{more} on "
            f"{describe_ranks(source.holders(unread[0]))} of the source is on no rank of the "
            "target; say with rename= what it is called there, or with only= what is to be moved"
        )


def counts_averages(name: str) -> bool:
    """Whether a tensor is the counter of torch's AveragedModel, and none of the model in it."""
    return name.rpartition(".")[2] == "n_averaged"
