"""Safetensors folders, the format of Hugging Face's models: load and export."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

from commgrid.checkpoint.folder import SUFFIX, find, json_of, local, safetensors_files
from commgrid.checkpoint.foreign_names import MODEL, Renamed
from commgrid.checkpoint.reader import Boxes, Stored, forms_in
from commgrid.checkpoint.remote import is_remote
from commgrid.checkpoint.writer import Report
from commgrid.equality.lost_numbers import Lost, lost_numbers, refuse_lost
from commgrid.errors import CheckpointError, SpecError
from commgrid.resharding.dtypes import scales_beside
from commgrid.resharding.item import Item, Value, whole
from commgrid.resharding.layouts import Form
from commgrid.resharding.model_state import chunks_of
from commgrid.resharding.name_tables.table import SCALES
from commgrid.resharding.naming import Naming, Rename

_BLOCKS = "_blocks"
_SIDES = (128, 64, 256, 32, 512, 16)
"""Of square blocks; the shapes of a weight and its scales fit one of these at most."""


def has_scales(model: nn.Module | Sequence[nn.Module]) -> bool:
    """Return whether a model has weights of eight bits itself, and so holds their scales too."""
    tensors = (t for chunk in chunks_of(model) for t in (*chunk.parameters(), *chunk.buffers()))
    return any(t.is_floating_point() and t.itemsize < 2 for t in tensors)


class _Reader(QuantizedHuggingFaceStorageReader):
    """torch's reader of the files that belong together; a weight with scales is their product.

    Attributes:
        factors: by weight the scales that it is multiplied by after it was read, one number or one
            for each index of some dims; their names and metadata.
    """

    def __init__(self, folder: Path, scales: bool) -> None:
        super().__init__(str(folder))
        self._scales, self._folder = scales, folder
        self.factors: dict[str, tuple[str, TensorStorageMetadata]] = {}
        self.fs: Any = self  # torch's reader lists files with self.fs.ls

    def ls(self, _: str) -> list[str]:
        return safetensors_files(self._folder)

    def read_metadata(self) -> Metadata:
        """Return the files' metadata; weights with scales have the dtype of the product."""
        metadata: Metadata = super().read_metadata()
        keys: dict[str, Any] = metadata.state_dict_metadata
        shapes = {}
        self._refuse_twice(keys)
        self._take_factors(keys)
        for weight, scale in self._weight_scale_mapping.items():
            stored, start = keys[weight], torch.Size([0] * len(keys[weight].size))
            stored.properties.dtype = self.target_dtype
            stored.chunks = [ChunkStorageMetadata(start, stored.size)]
            metadata.storage_data[MetadataIndex(weight, start)] = self._places[weight]
            if not weight.endswith(_BLOCKS):
                shapes[weight] = stored.size, keys[scale].size
        if shapes:
            self.block_size = _block_size(shapes, self._folder / "config.json")
        for scale in self._weight_scale_mapping.values():
            del keys[scale]
        return metadata

    def _refuse_twice(self, keys: Mapping[str, Any]) -> None:
        """Refuse a tensor that several files hold.

        Raises:
            CheckpointError: names the tensor and the files.
        """
        from safetensors import safe_open

        for key, stored in keys.items():
            if len({chunk.offsets for chunk in stored.chunks}) == len(stored.chunks):
                continue
            names = []
            for path in self.ls(""):
                with safe_open(path, framework="pt") as file:
                    names += [Path(path).name] if key in set(file.keys()) else []
            raise CheckpointError(
                f"{key} is in {' and '.join(names)} of {self._folder}; leave one of these in the "
                "folder, or one index that lists the files of one model"
            )

    def _take_factors(self, keys: dict[str, Any]) -> None:
        """Take out of the names scales that are no blocks'."""
        pairs = {key.removesuffix("_scale"): key for key in keys if key.endswith("_scale")}
        pairs |= self._weight_scale_mapping
        for weight, scale in pairs.items() if self._scales else ():
            stored, factor = keys.get(weight), keys[scale]
            if stored is None or not _is_float8(stored) or not _is_factor(factor, stored.size):
                continue
            self._weight_scale_mapping.pop(weight, None)
            stored.properties.dtype = self.target_dtype
            self.factors[weight] = scale, factor
        for scale, _ in self.factors.values():
            del keys[scale]

    def _load_quantization_metadata(self) -> None:
        """Find the scales by the names in the files, since a single file has no index."""
        if not self._scales:
            return
        metadata = HuggingFaceStorageReader.read_metadata(self)
        places = {index.fqn: info for index, info in metadata.storage_data.items()}
        self._places = places
        self._weight_map = {key: Path(info.relative_path).name for key, info in places.items()}
        for key in places:
            for end, of in ((SCALES, ""), ("_scales", _BLOCKS)):
                weight = key.removesuffix(end) + of
                if key.endswith(end) and weight in places:
                    self._weight_scale_mapping[weight] = key


def _is_float8(stored: TensorStorageMetadata) -> bool:
    dtype = stored.properties.dtype
    return dtype.itemsize == 1 and dtype.is_floating_point


def _is_factor(factor: TensorStorageMetadata, size: torch.Size) -> bool:
    """Whether a scale is one number, one for each row, or has the weight's dims or 1 each."""
    if factor.size.numel() == 1 or (len(size) == 2 and factor.size == size[:1]):
        return True
    return len(factor.size) == len(size) and all(
        each in (1, length) for each, length in zip(factor.size, size, strict=True)
    )


def _multiply(item: Item, factor: Tensor) -> None:
    """Multiply an item's boxes by those parts of a scale that belong to them."""
    ones = [1] * (len(item.shape) - factor.dim())
    wide = factor.reshape(*factor.shape, *ones) if factor.numel() > 1 else factor.reshape(())
    for offset, data in item.chunks:
        part = wide
        for dim, length in enumerate(wide.shape):
            part = part if length == 1 else part.narrow(dim, offset[dim], data.shape[dim])
        data.copy_(data.float() * part)


def _block_size(shapes: Mapping[str, tuple[torch.Size, torch.Size]], config: Path) -> int:
    """Return the side of the square blocks that each have a scale.

    Args:
        shapes: of weights and of their scales, by name.
        config: the model's file, which may name the side.

    Raises:
        CheckpointError: they are not square, or the file cannot be read.
    """
    sides: Any = json_of(config) if config.exists() else None
    for key in ("quantization_config", "weight_block_size"):
        if not isinstance(sides, dict | None):
            raise CheckpointError(f"{config} has {key} in {str(sides)[:60]!r}; expected a mapping")
        sides = None if sides is None else sides.get(key)
    if sides is None:
        sides = _SIDES
    elif not isinstance(sides, list) or not all(type(side) is int and side > 0 for side in sides):
        raise CheckpointError(
            f"{config} has weight_block_size={sides!r}; expected two lengths, as [128, 128]"
        )
    wrong = ""
    for side in dict.fromkeys(sides) if len({*sides}) == 1 else _SIDES:
        wrong = next(
            (
                f"{weight} of shape {tuple(size)} has scales of shape {tuple(scales)}"
                for weight, (size, scales) in shapes.items()
                if tuple(-(-length // side) for length in size) != tuple(scales)
            ),
            "",
        )
        if not wrong:
            return int(side)
    raise CheckpointError(
        f"{wrong}; expected one for each square block of a matrix, as in block fp8"
    )


class Safetensors:
    """Safetensors folder to load from.

    Args:
        folder: its path.
        scales: whether weights with scales, in block fp8 or MXFP4, are read as numbers; False: as
            they are, for a model that has scales itself.

    Raises:
        CheckpointError: the package safetensors is missing, or a file cannot be read.
    """

    def __init__(self, folder: Path, scales: bool = True) -> None:
        _check_package()
        if is_remote(folder):
            raise CheckpointError(
                f"{folder} has safetensors files, which are read on this machine's file system "
                "alone; copy them to a folder"
            )
        self._folder, self._reader = folder, _Reader(folder, scales)
        try:
            metadata = self._reader.read_metadata()
        except CheckpointError:
            raise
        except Exception as error:  # safetensors has errors of its own
            raise CheckpointError(f"{folder} cannot be read: {error}") from error
        for key, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata)
            held = sum(math.prod(chunk.sizes) for chunk in stored.chunks)
            if held != math.prod(stored.size):
                raise CheckpointError(
                    f"{folder} holds {held} of {math.prod(stored.size)} elements of {key}; a file "
                    "of it is missing"
                )
        self._reader.set_up_storage_reader(metadata, True)
        self._stored: Mapping[str, Any] = metadata.state_dict_metadata
        self.forms = forms_in(metadata)

    def read(self, items: Iterable[Item | Value], report: Report) -> dict[str, Any]:
        """Fill the items' boxes; safetensors files hold tensors only.

        Raises:
            CheckpointError: a file that cannot be read.
        """
        planner = Boxes(report)
        plan: list[ReadItem] = []
        products: list[tuple[Item, Tensor]] = []
        for number, item in enumerate(items):
            if isinstance(item, Value):
                raise CheckpointError(f"{self._folder} has tensors alone, and no {item.key}")
            plan += planner.reads(f"{number}", item, self._stored[item.key])
            if item.key in self._reader.factors:
                name, stored = self._reader.factors[item.key]
                scale = whole((name,), torch.empty(stored.size))
                plan += planner.reads(f"{number} {name}", scale, stored)
                products.append((item, scale.chunks[0].data))
        try:
            self._reader.read_data(LoadPlan(plan), planner).wait()
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{self._folder} cannot be read: {error}") from error
        for product in products:
            _multiply(*product)
        planner.bytes.finish()
        return {}


def export(
    folder: str | Path,
    to: str | Path,
    *,
    step: int | None = None,
    rename: Rename | None = None,
    dtype: torch.dtype | None = None,
    file_bytes: int = 5_000_000_000,
) -> list[Path]:
    """Write the model of a checkpoint as safetensors files, which Hugging Face's libraries read.

    One process calls it; it needs no grid, and memory for one file.

    Args:
        folder: a folder of checkpoints, or a checkpoint.
        to: a folder, made if need be. It must have no safetensors files.
        step: None: the last complete one.
        rename: the model's names to those in the files; or `commgrid.transfer.mapping(…)` with a
            source alone, which writes the parts of fused and stacked tensors.
        dtype: of tensors with fractions, at least 16 bits; None: as they were saved. Weights of
            eight bits with scales beside them stay as they are, and so do the scales.
        file_bytes: how large a file may grow, unless it is one tensor.

    Returns:
        The files. If there are several, `model.safetensors.index.json` lists them.

    Raises:
        CheckpointError: the checkpoint does not exist or cannot be read, the package safetensors
            is missing, `to` has such files or is a file, or numbers of a tensor are too large for
            the dtype, or a thousandth of them too small. Nothing is written then.
        SpecError: `rename` is neither a mapping nor a function, or the dtype is another one.
    """
    _check_package()
    target, naming = local(to), Naming(MODEL, rename)
    if naming.cuts_target:
        raise SpecError("export writes the names in common; leave target= of mapping(…) out")
    if is_remote(target):
        raise SpecError(f"to={str(to)!r}: expected a folder of this machine's file system")
    _check_target(target)
    if dtype is not None and not (dtype.is_floating_point and dtype.itemsize > 1):
        raise SpecError(
            f"dtype={dtype}: expected one with fractions and 16 bits or more, as torch.bfloat16; "
            "fewer bits need scales, which export does not write"
        )
    stored = Stored(find(local(folder), step)[1])
    stored.check_files()
    source = Renamed(stored, naming, with_optimizer=False)
    forms = {
        key.removeprefix(MODEL): form
        for key, form in source.forms.items()
        if key.startswith(MODEL) and form is not None
    }
    dtypes = _dtypes(forms, dtype)
    if not dtypes:
        raise CheckpointError(f"{folder} has no tensor of a model to write; see rename=")
    sizes = {name: math.prod(forms[name].shape) * each.itemsize for name, each in dtypes.items()}
    shards = _shards(sizes, file_bytes)
    target.mkdir(parents=True, exist_ok=True)
    files: dict[Path, list[str]] = {}
    for number, names in enumerate(shards, 1):
        count = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
        files[target / f"model{count}{SUFFIX}"] = names
    lost: dict[str, Lost] = {}
    try:
        for path, names in files.items():
            lost |= _write(path, source, {name: forms[name] for name in names}, dtypes)
        refuse_lost(lost, CheckpointError)
    except BaseException:
        for path in files:
            path.unlink(missing_ok=True)
        raise
    if len(files) > 1:
        index = {name: path.name for path, names in files.items() for name in names}
        text = json.dumps(
            {"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}, indent=2
        )
        (target / f"model{SUFFIX}.index.json").write_text(text)
    return list(files)


def _check_target(target: Path) -> None:
    """Refuse a folder that has such files, or cannot be one."""
    there = next(path for path in (target, *target.absolute().parents) if path.exists())
    if not there.is_dir():
        raise CheckpointError(f"{there} is a file; expected a folder to write to")
    if target.is_dir() and any(target.glob(f"*{SUFFIX}")):
        raise CheckpointError(f"{target} has safetensors files; give a new folder, or delete them")


def _write(
    path: Path, source: Renamed, forms: Mapping[str, Form], dtypes: Mapping[str, torch.dtype]
) -> dict[str, Lost]:
    """Write one file, and return what its numbers lose.

    Args:
        forms: of its tensors, by name.
        dtypes: in the files.

    Raises:
        CheckpointError: a tensor loses too much.
    """
    from safetensors.torch import save_file

    tensors = {n: torch.empty(form.shape, dtype=form.torch_dtype) for n, form in forms.items()}
    items = [whole(("model", name), tensor) for name, tensor in tensors.items()]
    source.read(items, lambda *_: None)
    lost = {
        name: lost_numbers(tensor, dtypes[name], tensor.numel()) for name, tensor in tensors.items()
    }
    refuse_lost(lost, CheckpointError, warns=False)
    converted = {name: tensor.to(dtypes[name]) for name, tensor in tensors.items()}
    save_file(converted, path, metadata={"format": "pt"})
    return lost


def _dtypes(forms: Mapping[str, Form], wanted: torch.dtype | None) -> dict[str, torch.dtype]:
    """Return the dtype of each of the model's tensors in the files."""
    scaled = scales_beside({name: form.dtype for name, form in forms.items()})
    stay = {*scaled, *(scale for scales in scaled.values() for scale in scales)}
    found = {name: form.torch_dtype for name, form in forms.items()}
    return {
        name: wanted if wanted and dtype.is_floating_point and name not in stay else dtype
        for name, dtype in found.items()
    }


def _shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Return the model's names in each of the files."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, bytes_ in sizes.items():
        if shards[-1] and size + bytes_ > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += bytes_
    return shards


def _check_package() -> None:
    if find_spec("safetensors") is None:
        raise CheckpointError(
            "safetensors files need the package of that name: pip install safetensors"
        )
