"""Items to files and back, through torch.distributed.checkpoint's own writer, reader and metadata.

Every rank knows what it has to write, so plans are not gathered before; only what was written is,
for the metadata. Reading needs no communication: each rank reads the metadata, and
its boxes.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from commgrid.checkpoint.boxes import Chunk
from commgrid.checkpoint.items import Item, Shared, Value
from commgrid.checkpoint.trust import read_metadata, read_value
from commgrid.errors import CheckpointError
from commgrid.planning.dtypes import keeps_numbers
from commgrid.replicas import digest
from commgrid.torch_compat.archive import DamagedError, Tensors, parts_of

Report = Callable[[int, int], object]
"""Told how many of this rank's bytes are done, and how many there are."""


@dataclass(frozen=True)
class Written:
    """A description of one rank's file, for the metadata.

    Args:
        plan: its items.
        results: where they are.
        repeats: of the keys that several stages may have, what this rank has: equal values have
            equal digests.
        paths: each key's name in the nested dict.
        others: compressed, the keys that it has and leaves to ranks with copies.
    """

    plan: SavePlan
    results: list[WriteResult]
    repeats: dict[str, str]
    paths: dict[str, tuple[str, ...]]
    others: bytes


# -- writing -----------------------------------------------------------------------------


def write(
    folder: Path,
    items: Iterable[Item | Value],
    number: int,
    report: Report,
) -> Written:
    """Writes this rank's file.

    Args:
        folder: is there already.
        items: this rank's, of which it writes its share.
        number: the rank's, in the file's name.
        report: as `Report`.
    """
    mine: list[Item | Value] = []
    left: list[Item | Value] = []
    for item in items:
        (mine if item.writes else left).append(item)
    planner = _Writes(mine, report)
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    writer.set_up_storage_writer(number == 0)
    plan = writer.prepare_local_plan(SavePlan(planner.held))
    plan = writer.prepare_global_plan([SavePlan([])] * number + [plan])[number]
    planner.count(plan.items)
    results: list[WriteResult] = []
    if plan.items:
        results = writer.write_data(plan, planner).wait()
    planner.finish()
    others = planner.other_names(results)
    written = [*plan.items, *(WriteItem(one.index, WriteItemType.BYTE_IO) for one in others)]
    return Written(
        replace(plan, items=written), [*results, *others],
        {item.key: _digest(item) for item in [*mine, *left] if item.repeats},
        {item.key: item.path for item in mine},
        zlib.compress("\n".join(item.key for item in left).encode()),
    )  # fmt: skip


def _digest(item: Item | Value) -> str:
    """Of a value that pickles in one way only, such as a text, or of a tensor's bits."""
    if isinstance(item, Value):
        return repr(item.value)
    return ", ".join(f"{chunk.offset}: {int(digest(chunk.data)):x}" for chunk in item.chunks)


def write_metadata(folder: Path, found: Mapping[int, Written], compares: bool = True) -> int:
    """Writes what makes a checkpoint of the files, by the rank that has heard of all of them.

    Args:
        folder: where they are.
        found: what each rank has written.
        compares: whether what several stages have must be equal; False: one rank's is taken.

    Returns:
        How many bytes the ranks have written.

    Raises:
        CheckpointError: two ranks have different parameters or buffers of one name, or some part of
            one was written by no rank.
    """
    seen: dict[tuple[str, Any], tuple[int, WriteItem]] = {}
    plans, results = [], []
    for rank, written in found.items():
        kept = []
        for item in written.plan.items:
            key = item.index.fqn
            first, theirs = seen.setdefault((key, item.index.offset), (rank, item))
            if first == rank:
                kept.append(item)
            elif key not in written.repeats or theirs.tensor_data != item.tensor_data:
                raise CheckpointError(
                    f"ranks {first} and {rank} each have a {key} of their own; what is on "
                    "different stages needs different names, those of the whole model, or "
                    "mark_parameters(…, shared=…); ranks that differ in data only need the same "
                    "parameters and optimizer state"
                )
        plans.append(replace(written.plan, items=kept))
        places = {item.index for item in kept}
        results.append([result for result in written.results if result.index in places])
    metadata: Metadata = create_default_global_save_plan(plans)[1]
    _check_whole(metadata)
    _check_all(metadata, found)
    if compares:
        _check_repeats(found)
    paths = {key: path for written in found.values() for key, path in written.paths.items()}
    metadata = replace(metadata, planner_data=paths)
    for place in {result.storage_data.relative_path for one in results for result in one}:
        if not (folder / place).exists():
            raise CheckpointError(
                f"{folder / place} was written, but not where this rank looks; save to a folder on "
                "a file system that all nodes share"
            )
    _write_for_megatron(folder)
    FileSystemWriter(folder).finish(metadata, results)
    return sum(result.size_in_bytes for written in found.values() for result in written.results)


def _write_for_megatron(folder: Path) -> None:
    """Write the two files by which Megatron-core's `dist_checkpointing.load` knows the format."""
    said = {
        "sharded_backend": "torch_dist", "sharded_backend_version": 1,
        "common_backend": "torch", "common_backend_version": 1,
    }  # fmt: skip
    with (folder / "metadata.json").open("w") as file:
        file.write(json.dumps(said))
        file.flush()
        os.fsync(file.fileno())
    with (folder / "common.pt").open("wb") as common:
        torch.save({}, common)
        common.flush()
        os.fsync(common.fileno())


def _check_all(metadata: Metadata, found: Mapping[int, Written]) -> None:
    for rank, written in found.items():
        for key in zlib.decompress(written.others).decode().split("\n"):
            if key and key not in metadata.state_dict_metadata:
                raise CheckpointError(
                    f"rank {rank} has a {key}, and left it to a rank with a copy of it, which has "
                    "none; copies need one name, and ranks that differ in data only the same "
                    "parameters and optimizer state"
                )


def _check_repeats(found: Mapping[int, Written]) -> None:
    first: dict[str, tuple[int, str]] = {}
    for rank, written in found.items():
        for key, value in written.repeats.items():
            other, theirs = first.setdefault(key, (rank, value))
            if value != theirs:
                raise CheckpointError(
                    f"{key} differs between ranks {other} and {rank}, of which one would have been "
                    "saved for all; what several stages have under one name is equal on them: give "
                    "buffers other names, or register them with persistent=False"
                )


def _check_whole(metadata: Metadata) -> None:
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            held = sum(math.prod(chunk.sizes) for chunk in stored.chunks)
            if held != math.prod(stored.size):
                raise CheckpointError(
                    f"the ranks of the grid hold {held} elements of {key}, which is of shape "
                    f"{tuple(stored.size)}; save is for all ranks of the grid, with the same model"
                )


class _Writes(DefaultSavePlanner):
    """Hands out the items' data, and counts it."""

    def __init__(self, items: Iterable[Item | Value], report: Report) -> None:
        super().__init__()
        self.held: list[WriteItem] = []
        self._data: dict[MetadataIndex, Any] = {}
        self._names: dict[Shared, list[MetadataIndex]] = {}
        self._report, self._done, self._total = report, 0, 0
        for item in items:
            if isinstance(item, Value):
                index, value = MetadataIndex(item.key), item.value
                if isinstance(value, Shared):
                    names = self._names.setdefault(value, [])
                    names.append(index)
                    if len(names) > 1:
                        continue
                    value = value.value
                self.held.append(WriteItem(index, WriteItemType.BYTE_IO))
                self._data[index] = value
                continue
            for chunk in item.chunks:
                index = MetadataIndex(item.key, chunk.offset)
                self.held.append(_write_item(item, chunk, index))
                self._data[index] = chunk.data

    def other_names(self, results: Iterable[WriteResult]) -> list[WriteResult]:
        """Where the other names of shared values find them: where the first one is."""
        places = {result.index: result.storage_data for result in results}
        return [
            WriteResult(other, 0, places[first])
            for first, *others in self._names.values()
            for other in others
        ]

    def count(self, items: Iterable[WriteItem]) -> None:
        """Adds up what there is to write."""
        data = (self._data[item.index] for item in items)
        self._total = sum(one.nbytes for one in data if isinstance(one, Tensor))

    def finish(self) -> None:
        """Reports that all is written."""
        self._report(self._total, self._total)

    def lookup_object(self, index: MetadataIndex) -> Any:
        data = self._data[index]
        if isinstance(data, Tensor):
            self._report(self._done, self._total)
            self._done += data.nbytes
        return data


def _write_item(item: Item, chunk: Chunk, index: MetadataIndex) -> WriteItem:
    sizes = torch.Size(chunk.data.shape)
    properties = TensorProperties(dtype=item.dtype)
    box = ChunkStorageMetadata(offsets=torch.Size(chunk.offset), sizes=sizes)
    data = TensorWriteData(chunk=box, properties=properties, size=torch.Size(item.shape))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


# -- reading -----------------------------------------------------------------------------


def check_has(keys: Mapping[str, Any], items: Iterable[Item | Value]) -> None:
    """Check that items are in torch's metadata, in these shapes.

    Raises:
        CheckpointError: names what is missing, has another shape, or a dtype whose numbers would
            not be the same.
    """
    missing, other, changed = [], [], []
    for item in items:
        stored = keys.get(item.key)
        if stored is None:
            missing.append(item.key)
        elif isinstance(item, Item):
            whole = isinstance(stored, TensorStorageMetadata)
            shape = tuple(stored.size) if whole else "no tensor"
            if shape != item.shape:
                other.append(f"{item.key} is {shape}, here {item.shape}")
            elif whole:
                dtypes = [
                    str(d).removeprefix("torch.") for d in (stored.properties.dtype, item.dtype)
                ]
                if not keeps_numbers(*dtypes):
                    changed.append("{} is {}, here {}".format(item.key, *dtypes))
    if missing:
        raise CheckpointError(f"of another model: it has no {_some(missing)}")
    if other:
        raise CheckpointError(f"of another model, whose shapes differ: {_some(other)}")
    if changed:
        raise CheckpointError(
            f"of other dtypes, in which its numbers would be others: {_some(changed)}; load into "
            "a tensor of the same dtype, or a wider one, and convert it there"
        )


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
                f"{folder} has no .metadata, which is written last: half a checkpoint, or none"
            ) from error
        except Exception as error:  # pickle raises any type
            raise CheckpointError(f"{folder}/.metadata cannot be read: {error}") from error
        self.keys: Mapping[str, Any] = self._metadata.state_dict_metadata
        for name in {info.relative_path for info in self._metadata.storage_data.values()}:
            place = PurePath(name)
            if place.is_absolute() or ".." in place.parts:
                raise CheckpointError(
                    f"{folder}/.metadata names a file outside of the folder, {place}; expected "
                    "files in it, so that what is loaded is what was saved there"
                )

    def check_files(self) -> None:
        """Looks whether every file is there, and as long as the metadata says.

        Raises:
            CheckpointError: names the first that is not.
        """
        ends: dict[str, int] = {}
        for info in self._metadata.storage_data.values():
            end = info.offset + info.length
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), end)
        for name, end in sorted(ends.items()):
            path = self.folder / name
            size = path.stat().st_size if path.exists() else None
            if size is None or size < end:
                what = "is missing" if size is None else f"has {size:,} of {end:,} bytes"
                raise CheckpointError(f"half a checkpoint: {path} {what}")

    def check(self, items: Iterable[Item | Value]) -> None:
        """Looks whether it has these, in these shapes.

        Raises:
            CheckpointError: names what is missing, or has another shape.
        """
        check_has(self.keys, items)

    def read(self, items: Iterable[Item | Value], report: Report) -> dict[str, Any]:
        """Fills the items' boxes; returns the values by key.

        Raises:
            CheckpointError: a file that cannot be read.
        """
        planner = _Reads(items, self._metadata, report, self._trusted)
        try:
            for archive in self._archives(planner):
                planner.take(archive)
        except CheckpointError as error:
            raise CheckpointError(f"{self.folder}: {error}") from error
        except Exception as error:  # torch raises what it comes upon
            raise CheckpointError(f"{self.folder} cannot be read: {error}") from error
        planner.finish()
        return {key: planner.values[first] for key, first in planner.names.items()}

    def _archives(self, planner: _Reads) -> Iterator[Archive]:
        """Read each archive once, one after the other, into the same memory.

        Whole archives are read, also where a part of one is needed, so that its checksum can be
        compared.
        """
        needed: dict[tuple[str, int], list[ReadItem]] = {}
        for read in planner.plan:
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
                            raise CheckpointError(f"{name} ended while it was read")
                        done += count
                    reads = needed[place]
                    checks = any(read.dest_index.fqn in planner.checked for read in reads)
                    yield Archive(self._as_saved(content, info), reads, checks)

    def _as_saved(self, content: memoryview, info: Any) -> memoryview:
        """The bytes that torch.save wrote, which a writer's extensions may have compressed."""
        transforms = getattr(info, "transform_descriptors", None)
        if not transforms:
            return content
        read, raw = self._reader.transforms.transform_load_stream, io.BytesIO(content)
        return memoryview(bytearray(read(None, transforms, raw).read(-1)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Archive:
    """An archive of torch.save's, and the boxes to read from it.

    Args:
        content: its bytes, until the next archive is read.
        reads: boxes of one tensor, or one value.
        checks: whether this rank compares its checksums; False: a rank that reads it too does.
    """

    content: memoryview
    reads: list[ReadItem]
    checks: bool

    def tensor(self, tensors: Tensors) -> Tensor:
        """Return the tensor in it, in the same memory.

        Args:
            tensors: makes it.

        Raises:
            CheckpointError: it has other bytes than were written, or more than a tensor.
        """
        key = self.reads[0].storage_index.fqn
        parts = self._parts(key)
        try:
            return tensors.of(self.content, parts)
        except (pickle.UnpicklingError, TypeError) as error:
            raise CheckpointError(
                f"{key} holds no tensor, but a pickle that names other things, and loading it "
                "could run code of whoever wrote the file; or it is broken"
            ) from error
        except (IndexError, EOFError) as error:  # of bytes that begin as no archive does
            raise _damaged(key, "its beginning") from error

    def value(self, trusted: bool) -> Any:
        """Return the value in it; arguments and errors as of `trust.read_value`."""
        key = self.reads[0].storage_index.fqn
        self._parts(key)
        return read_value(key, io.BytesIO(self.content), trusted)

    def _parts(self, key: str) -> Mapping[str, memoryview]:
        try:
            return parts_of(self.content, self.checks)
        except DamagedError as part:
            raise _damaged(key, f"the checksum of {part}") from part


def _damaged(key: str, part: str) -> CheckpointError:
    return CheckpointError(
        f"{key} is damaged: {part} is not as torch.save wrote it; load an earlier step, or copy "
        "the files again"
    )


class _Reads:
    """Says which boxes are needed, takes them in, and counts them."""

    def __init__(
        self, items: Iterable[Item | Value], stored: Metadata, report: Report, trusted: bool
    ) -> None:
        self._trusted, self._tensors = trusted, Tensors()
        self.values: dict[str, Any] = {}
        self.names: dict[str, str] = {}  # key to the first key of the same place
        first: dict[tuple[str, int], str] = {}
        tensors: Mapping[str, Any] = stored.state_dict_metadata
        self.plan: list[ReadItem] = []
        self._data: dict[MetadataIndex, Tensor] = {}
        self.checked: set[str] = set()  # places whose checksum this rank compares
        self._report, self._done, self._total = report, 0, 0
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
            boxes = [
                ChunkStorageMetadata(torch.Size(c.offset), torch.Size(c.data.shape))
                for c in item.chunks
            ]
            # Two items may be read from one key, a weight and its fp32 copy: their places differ.
            place = f"{number}"
            if item.writes:
                self.checked.add(place)
            for read in create_read_items_for_chunk_list(item.key, tensors[item.key], boxes):
                target = MetadataIndex(place, read.dest_index.offset)
                self.plan.append(replace(read, dest_index=target))
            for chunk in item.chunks:
                self._data[MetadataIndex(place, chunk.offset)] = chunk.data
                self._total += chunk.data.nbytes

    def finish(self) -> None:
        """Reports that all is read."""
        self._report(self._total, self._total)

    def take(self, archive: Archive) -> None:
        """Copies what was read to where it is needed."""
        first = archive.reads[0]
        if first.type is LoadItemType.BYTE_IO:
            self.values[first.dest_index.fqn] = archive.value(self._trusted)
            return
        stored = archive.tensor(self._tensors)
        for read in archive.reads:
            target = _box(self._data[read.dest_index], read.dest_offsets, read.lengths)
            target.copy_(_box(stored, read.storage_offsets, read.lengths))
            self._done += target.nbytes
            self._report(self._done, self._total)


def _box(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def sync(folder: Path) -> None:
    """Makes the names in a folder last, as fsync does the bytes of a file."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
