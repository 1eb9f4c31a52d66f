"""Items to files, through torch.distributed.checkpoint's own writer and metadata.

Every rank knows what it has to write, so plans are not gathered before; only what was written is,
for the metadata. `reader` reads.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from commgrid.checkpoint.remote import sync_file, writer_to
from commgrid.checkpoint.trust import storable
from commgrid.equality.digest import digest
from commgrid.errors import CheckpointError
from commgrid.layout.box import Shape
from commgrid.resharding.item import Chunk, Item, Value
from commgrid.resharding.naming import SharedNames, shared_in, ties_of, twins

Report = Callable[[int, int], object]
"""Told how many of this rank's bytes are done, and how many there are."""


class ByteCount:
    """Bytes done, and bytes to do in all, told to a `Report`."""

    def __init__(self, report: Report) -> None:
        self._report, self._done, self.total = report, 0, 0

    def add(self, size: int) -> None:
        """Count bytes as done."""
        self._done += size
        self._report(self._done, self.total)

    def finish(self) -> None:
        """Report that all is done."""
        self._report(self.total, self.total)


@dataclass(frozen=True)
class Written:
    """A description of one rank's file, for the metadata.

    Args:
        plan: its items.
        results: where they are.
        repeats: digests of boxes that several stages may have, by key and offset.
        others: compressed, the keys that it has and leaves to ranks with copies.
        tied: the names of its weights of which other stages have copies.
    """

    plan: SavePlan
    results: list[WriteResult]
    repeats: dict[tuple[str, Shape], str]
    others: bytes
    tied: SharedNames


def write(
    folder: Path,
    items: Sequence[Item | Value],
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
    writer = writer_to(folder)
    writer.set_up_storage_writer(number == 0)
    plan = writer.prepare_local_plan(SavePlan(planner.held))
    plan = writer.prepare_global_plan([SavePlan([])] * number + [plan])[number]
    planner.count(plan.items)
    results: list[WriteResult] = []
    if plan.items:
        try:
            results = writer.write_data(plan, planner).wait()
        except Exception as error:
            raise _cause_on_disk(error, folder) from error
    planner.bytes.finish()
    others = planner.other_names(results)
    written = [*plan.items, *(WriteItem(one.index, WriteItemType.BYTE_IO) for one in others)]
    return Written(
        replace(plan, items=written), [*results, *others],
        dict(chain.from_iterable(_digests(item) for item in [*mine, *left] if item.repeats)),
        zlib.compress("\n".join(item.key for item in left).encode()),
        shared_in(items),
    )  # fmt: skip


def _cause_on_disk(error: BaseException, folder: Path) -> BaseException:
    """The file system's own error, such as a full disk, of which torch raises what followed."""
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OSError) and cause.errno):
        cause = cause.__cause__ or cause.__context__
    if not isinstance(cause, OSError):
        return error
    return OSError(cause.errno, cause.strerror, cause.filename or str(folder))


def _digests(item: Item | Value) -> Iterator[tuple[tuple[str, Shape], str]]:
    """Of a value that pickles in one way only, such as a text, or of the bits of each box."""
    if isinstance(item, Value):
        yield (item.key, ()), repr(item.value)
        return
    for chunk in item.chunks:
        yield (item.key, chunk.offset), f"{int(digest(chunk.data)):x}"


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
            key, offset = item.index.fqn, tuple(item.index.offset or ())
            first, theirs = seen.setdefault((key, offset), (rank, item))
            if first == rank:
                kept.append(item)
            elif (key, offset) not in written.repeats or theirs.tensor_data != item.tensor_data:
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
    results.append(_complete(metadata, found, list(chain(*results))))
    if compares:
        _check_repeats(found)
    paths = {key: (*key.split(".", 1),) for key in metadata.state_dict_metadata}
    metadata = replace(metadata, planner_data=paths)
    for place in {result.storage_data.relative_path for one in results for result in one}:
        if not (folder / place).exists():
            raise CheckpointError(
                f"{folder / place} was written, but not where this rank looks; save to a folder on "
                "a file system that all nodes share"
            )
    _write_for_megatron(folder)
    writer_to(folder).finish(metadata, results)
    return sum(result.size_in_bytes for written in found.values() for result in written.results)


def _write_for_megatron(folder: Path) -> None:
    """Write the two files by which Megatron-core's `dist_checkpointing.load` knows the format."""
    said = {
        "sharded_backend": "torch_dist", "sharded_backend_version": 1,
        "common_backend": "torch", "common_backend_version": 1,
    }  # fmt: skip
    with (folder / "metadata.json").open("w") as file:
        file.write(json.dumps(said))
        sync_file(file)
    with (folder / "common.pt").open("wb") as common:
        torch.save({}, common)
        sync_file(common)


def _complete(
    metadata: Metadata, found: Mapping[int, Written], results: Sequence[WriteResult]
) -> list[WriteResult]:
    """Give tied weights that are written once their other names; return where these are.

    Raises:
        CheckpointError: a rank left something to others, and none has written it.
    """
    ties = ties_of(written.tied for written in found.values())
    more: list[WriteResult] = []
    stored = metadata.state_dict_metadata
    for rank, written in found.items():
        for key in zlib.decompress(written.others).decode().split("\n"):
            if not key or key in stored:
                continue
            twin = next((each for each in twins(key, ties) if each in stored), None)
            if twin is None:
                raise CheckpointError(
                    f"rank {rank} has a {key}, and left it to a rank with a copy of it, which has "
                    "none; copies need one name, and ranks that differ in data only the same "
                    "parameters and optimizer state"
                )
            stored[key] = stored[twin]
            more += [
                WriteResult(replace(one.index, fqn=key), 0, one.storage_data)
                for one in results if one.index.fqn == twin
            ]  # fmt: skip
    return more


def _check_repeats(found: Mapping[int, Written]) -> None:
    first: dict[tuple[str, Shape], tuple[int, str]] = {}
    for rank, written in found.items():
        for place, value in written.repeats.items():
            other, theirs = first.setdefault(place, (rank, value))
            if value != theirs:
                raise CheckpointError(
                    f"{place[0]} differs between ranks {other} and {rank}, of which one would have "
                    "been saved for all; what several stages have under one name is equal on them: "
                    "give buffers other names, or register them with persistent=False"
                )


def _check_whole(metadata: Metadata) -> None:
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            held = sum(math.prod(chunk.sizes) for chunk in stored.chunks)
            if held != math.prod(stored.size):
                shapes = sorted({tuple(chunk.sizes) for chunk in stored.chunks})
                uneven = (
                    f"; slices have one length on all ranks, and these have shapes "
                    f"{' and '.join(map(str, shapes[:3]))}"
                )
                raise CheckpointError(
                    f"the ranks of the grid hold {held} elements of {key}, which is of shape "
                    f"{tuple(stored.size)}{uneven if len(shapes) > 1 else ''}; save is for all "
                    "ranks of the grid, with the same model"
                )


class _Writes(DefaultSavePlanner):
    """Hands out the items' data, and counts it."""

    def __init__(self, items: Sequence[Item | Value], report: Report) -> None:
        super().__init__()
        self.held: list[WriteItem] = []
        self._data: dict[MetadataIndex, Any] = {}
        self._names: dict[int | str, list[MetadataIndex]] = {}
        self.bytes, self._under_way = ByteCount(report), 0
        for item in items:
            if isinstance(item, Value):
                # An option of a group has a name for each of its parameters. Other values are
                # stored once for each name: modules may change what they load.
                is_option = item.key.startswith("optimizer.param_groups.")
                index = MetadataIndex(item.key)
                names = self._names.setdefault(id(item.value) if is_option else item.key, [])
                names.append(index)
                if len(names) == 1:
                    self.held.append(WriteItem(index, WriteItemType.BYTE_IO))
                    self._data[index] = storable(item.value)
                continue
            for chunk in item.chunks:
                index = MetadataIndex(item.key, chunk.offset)
                self.held.append(_write_item(item, chunk, index))
                self._data[index] = chunk.data

    def other_names(self, results: Iterable[WriteResult]) -> list[WriteResult]:
        """Where the other names of one value find it: where the first one is."""
        places = {result.index: result.storage_data for result in results}
        return [
            WriteResult(other, 0, places[first])
            for first, *others in self._names.values()
            for other in others
        ]

    def count(self, items: Iterable[WriteItem]) -> None:
        """Adds up what there is to write."""
        data = (self._data[item.index] for item in items)
        self.bytes.total = sum(one.nbytes for one in data if isinstance(one, Tensor))

    def lookup_object(self, index: MetadataIndex) -> Any:
        data = self._data[index]
        if isinstance(data, Tensor):
            self.bytes.add(self._under_way)  # when the next is asked for, one has been written
            self._under_way = data.nbytes
        return data


def _write_item(item: Item, chunk: Chunk, index: MetadataIndex) -> WriteItem:
    properties, size = TensorProperties(dtype=item.dtype), torch.Size(item.shape)
    data = TensorWriteData(chunk=chunk.stored, properties=properties, size=size)
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)
