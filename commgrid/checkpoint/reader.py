"""Items from files: a checkpoint's folder as torch.distributed.checkpoint's metadata describes it.

Reading needs no communication: each rank reads the metadata, and its boxes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import groupby
from operator import itemgetter
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from commgrid.checkpoint.archive import DamagedError, Tensors, parts_of
from commgrid.checkpoint.trust import Unread, read_metadata, read_value
from commgrid.checkpoint.writer import ByteCount, Report
from commgrid.errors import CheckpointError
from commgrid.layout.box import slices
from commgrid.resharding.dtypes import keeps_numbers
from commgrid.resharding.item import Item, Value
from commgrid.resharding.layouts import Form

_OF_THE_JOB = ("extra.", "extra_per_rank.")
"""Beginnings of the names of the job's own values, without which weights load."""


def missing_file(folder: Path, ends: Mapping[str, int]) -> str | None:
    """The first file that is not there, or not as long as the metadata says; None: all are.

    Args:
        folder: the checkpoint's.
        ends: `Stored.ends`.
    """
    for name, end in sorted(ends.items()):
        path = folder / name
        size = path.stat().st_size if path.exists() else None
        if size is None or size < end:
            what = "is missing" if size is None else f"has {size:,} of {end:,} bytes"
            return f"{path} {what}"
    return None


def refuse_outside(index: Path, names: Iterable[str]) -> None:
    """Refuse an index that names files outside of its folder.

    Raises:
        CheckpointError: names the first.
    """
    for name in sorted(names):
        place = PurePath(name)
        if place.is_absolute() or ".." in place.parts:
            raise CheckpointError(
                f"{index} names a file outside of the folder, {place}; expected files in it, so "
                "that what is loaded is what was saved there"
            )


def forms_in(metadata: Metadata) -> Mapping[str, Form | None]:
    """The forms of the tensors in torch's metadata by key; None: a value."""
    return {
        key: Form.of(stored.size, stored.properties.dtype)
        if isinstance(stored, TensorStorageMetadata) else None
        for key, stored in metadata.state_dict_metadata.items()
    }  # fmt: skip


def check_has(forms: Mapping[str, Form | None], items: Iterable[Item | Value]) -> None:
    """Check that a checkpoint has items, in these shapes.

    Args:
        forms: of its tensors by key; None: a value.
        items: asked for.

    Raises:
        CheckpointError: names what is missing, has another shape, or a dtype whose numbers would
            not be the same.
    """
    missing, other, changed, own = [], [], [], ""
    wanted = list(items)
    for item in wanted:
        if item.key not in forms:
            missing.append(item.key)
        elif isinstance(item, Item):
            form, mine = forms[item.key], item.form
            if form is None:
                other.append(f"{item.key} is no tensor, here {item.shape}")
            elif form.shape != item.shape:
                other.append(f"{item.key} is {form.shape}, here {item.shape}")
                if item.repeats and form.shape[1:] == item.shape:  # a buffer
                    own = (
                        f"; if {form.shape[0]} ranks each had a buffer of their own, say so of the "
                        "model's with mark_buffers(…, own=…, merge=…)"
                    )
            elif not keeps_numbers(form.dtype, mine.dtype):
                changed.append(f"{item.key} is {form.dtype}, here {mine.dtype}")
    if missing:
        spare = sorted({*forms} - {item.key for item in wanted})
        near = "".join(f"; it has {name}" for name in get_close_matches(missing[0], spare, 1))
        raise CheckpointError(f"of another model: it has no {_some(missing)}{near}")
    if other:
        raise CheckpointError(f"of another model, whose shapes differ: {_some(other)}{own}")
    if changed:
        raise CheckpointError(
            f"of other dtypes, in which its numbers would be others: {_some(changed)}; load into "
            "a tensor of the same dtype, or a wider one, and convert it there"
        )


class Boxes(DefaultLoadPlanner):
    """Planner: the boxes that items are read into, and their bytes, counted as they are filled."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self._data: dict[MetadataIndex, Tensor] = {}
        self.bytes = ByteCount(report)

    def reads(self, place: str, item: Item, stored: TensorStorageMetadata) -> list[ReadItem]:
        """Return the reads that fill an item's boxes.

        Args:
            place: what `dest_index` names, a text that differs for each item.
            item: with memory to read into.
            stored: its tensor in the metadata.
        """
        self._data |= {MetadataIndex(place, chunk.offset): chunk.data for chunk in item.chunks}
        self.bytes.total += sum(chunk.data.nbytes for chunk in item.chunks)
        boxes = [chunk.stored for chunk in item.chunks]
        return [
            replace(read, dest_index=MetadataIndex(place, read.dest_index.offset))
            for read in create_read_items_for_chunk_list(item.key, stored, boxes)
        ]

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._data[index]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        self.bytes.add(tensor.nbytes)


class Stored:
    """A checkpoint's folder, and what its metadata says.

    Args:
        folder: the checkpoint's.
        trusted: whether what is in it may run code.

    Raises:
        CheckpointError: it has no metadata, or what is in it cannot be read.
    """

    def __init__(self, folder: Path, trusted: bool = False) -> None:
        self.folder, self._reader = folder, FileSystemReader(folder)
        self._trusted = trusted
        try:
            self._metadata = read_metadata(folder / ".metadata", trusted)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{folder} has no .metadata, which is written last: half a checkpoint, or none; "
                "load an earlier step"
            ) from error
        except Exception as error:  # pickle raises any type
            raise CheckpointError(f"{folder}/.metadata cannot be read: {error}") from error
        self.forms = forms_in(self._metadata)
        files = {info.relative_path for info in self._metadata.storage_data.values()}
        refuse_outside(folder / ".metadata", files)

    @property
    def paths(self) -> Mapping[str, tuple[Any, ...]]:
        """Each key's place in the nested dict that was saved, of those that torch has flattened."""
        told: Any = self._metadata.planner_data
        found = told.items() if isinstance(told, Mapping) else ()
        return {key: path for key, path in found if isinstance(path, tuple)}

    @property
    def step(self) -> int | None:
        """The step that it says it is of."""
        if "step" not in self.forms or self.forms["step"] is not None:
            return None
        said = self.read([Value(("step",))], lambda *_: None)["step"]
        return said if isinstance(said, int) else None

    @property
    def ends(self) -> dict[str, int]:
        """Bytes that each file has at least, by its name."""
        found: dict[str, int] = {}
        for info in self._metadata.storage_data.values():
            end = info.offset + info.length
            found[info.relative_path] = max(found.get(info.relative_path, 0), end)
        return found

    def check_files(self) -> None:
        """Look whether every file is there, and as long as the metadata says.

        Raises:
            CheckpointError: names the first that is not.
        """
        if (missing := missing_file(self.folder, self.ends)) is not None:
            raise CheckpointError(f"half a checkpoint: {missing}")

    def read(self, items: Iterable[Item | Value], report: Report) -> dict[str, Any]:
        """Fills the items' boxes; returns the values by key.

        Raises:
            CheckpointError: a file that cannot be read.
        """
        planner = _Reads(items, self._metadata, report, self._trusted)
        try:
            for content, reads in self._archives(planner.plan):
                planner.take(content, reads)
        except CheckpointError as error:
            raise CheckpointError(f"{self.folder}: {error}") from error
        except Exception as error:  # torch raises what it comes upon
            raise CheckpointError(f"{self.folder} cannot be read: {error}") from error
        planner.bytes.finish()
        found = {key: planner.values[first] for key, first in planner.names.items()}
        for key, value in found.items():  # which may have one place with a value of the job's
            if isinstance(value, Unread) and not key.startswith(_OF_THE_JOB):
                raise CheckpointError(f"{self.folder}: {value.why}")
        return found

    def _archives(self, plan: Iterable[ReadItem]) -> Iterator[tuple[memoryview, list[ReadItem]]]:
        """Read each archive once, one after the other, into the same memory; with its reads.

        Whole archives are read, also where a part of one is needed, so that its checksum can be
        compared.
        """
        needed: dict[tuple[str, int], list[ReadItem]] = {}
        for read in plan:
            info = self._metadata.storage_data[read.storage_index]
            needed.setdefault((info.relative_path, info.offset), []).append(read)
        infos = {
            place: self._metadata.storage_data[reads[0].storage_index]
            for place, reads in needed.items()
        }
        memory = bytearray(max((info.length for info in infos.values()), default=0))
        for name, places in groupby(sorted(needed), key=itemgetter(0)):
            with (self.folder / name).open("rb", buffering=0) as file:
                for place in places:
                    info = infos[place]
                    content = memoryview(memory)[: info.length]
                    file.seek(info.offset)
                    done = 0
                    while done < info.length:
                        count = file.readinto(content[done:])
                        if not count:
                            raise CheckpointError(
                                f"{name} ended while it was read; load an earlier step"
                            )
                        done += count
                    yield self._as_saved(content, info), needed[place]

    def _as_saved(self, content: memoryview, info: Any) -> memoryview:
        """The bytes that torch.save wrote, which a writer's extensions may have compressed."""
        transforms = getattr(info, "transform_descriptors", None)
        if not transforms:
            return content
        read, raw = self._reader.transforms.transform_load_stream, io.BytesIO(content)
        return memoryview(bytearray(read(None, transforms, raw).read(-1)))  # type: ignore[arg-type]


def _damaged(key: str, part: str) -> CheckpointError:
    return CheckpointError(
        f"{key} is damaged: {part} is not as torch.save wrote it; load an earlier step, or copy "
        "the files again"
    )


class _Reads(Boxes):
    """Plans the reads of items, and copies what archives hold to their boxes."""

    def __init__(
        self, items: Iterable[Item | Value], stored: Metadata, report: Report, trusted: bool
    ) -> None:
        super().__init__(report)
        self._trusted, self._tensors = trusted, Tensors()
        self.values: dict[str, Any] = {}
        self.names: dict[str, str] = {}  # key to the first key of the same place
        first: dict[tuple[str, int], str] = {}
        tensors: Mapping[str, Any] = stored.state_dict_metadata
        self.plan: list[ReadItem] = []
        self.checked: set[str] = set()  # places whose checksum this rank compares
        for number, item in enumerate(items):
            if isinstance(item, Value):
                index, nothing = MetadataIndex(item.key), torch.Size((0,))
                info = stored.storage_data[index]
                known = first.setdefault((info.relative_path, info.offset), item.key)
                self.names[item.key] = known
                if known != item.key:
                    continue
                self.checked.add(item.key)
                self.plan.append(
                    ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)
                )
                continue
            # Two items may be read from one key, a weight and its fp32 copy: their places differ.
            place = f"{number}"
            if item.writes:
                self.checked.add(place)
            self.plan += self.reads(place, item, tensors[item.key])

    def take(self, content: memoryview, reads: Sequence[ReadItem]) -> None:
        """Copies what was read to where it is needed.

        Args:
            content: the bytes of an archive of torch.save's.
            reads: boxes of the one tensor in it, or its value.

        Raises:
            CheckpointError: it has other bytes than were written, or more than a tensor.
        """
        key = reads[0].storage_index.fqn
        checks = any(read.dest_index.fqn in self.checked for read in reads)
        try:  # where this rank does not compare checksums, a rank that reads it too does
            parts = parts_of(content, checks)
        except DamagedError as part:
            raise _damaged(key, f"the checksum of {part}") from part
        if reads[0].type is LoadItemType.BYTE_IO:
            self.values[reads[0].dest_index.fqn] = self._value(key, content)
            return
        stored = self._tensor(key, content, parts)
        for read in reads:
            size, start = tuple(read.lengths), (0,) * len(read.lengths)
            target = self.resolve_tensor(read)
            target.copy_(stored[slices((tuple(read.storage_offsets), size), start)])
            self.commit_tensor(read, target)

    def _tensor(self, key: str, content: memoryview, parts: Mapping[str, memoryview]) -> Tensor:
        """The tensor in an archive, in the same memory."""
        try:
            return self._tensors.of(content, parts)
        except (pickle.UnpicklingError, TypeError) as error:
            raise CheckpointError(
                f"{key} holds no tensor, but a pickle that names other things, and loading it "
                "could run its author's code; or it is broken"
            ) from error
        except (IndexError, EOFError) as error:  # of bytes that begin as no archive does
            raise _damaged(key, "its beginning") from error

    def _value(self, key: str, content: memoryview) -> Any:
        """The value in an archive; Unread where that fails."""
        try:
            return read_value(key, io.BytesIO(content), self._trusted)
        except CheckpointError as error:
            return Unread(str(error))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"
