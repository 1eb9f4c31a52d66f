"""Saved, kept and loaded states are states that a job had; anything else is an error."""

from __future__ import annotations

import math
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import commgrid
from commgrid import checkpoint
from commgrid.checkpoint import background
from commgrid.checkpoint import folder as folders
from commgrid.checkpoint.background import SPARES
from commgrid.checkpoint.memory import kept_states
from commgrid.errors import CheckpointError
from commgrid.resharding.dtypes import keeps_numbers
from commgrid.testing import run_on_ranks


class Weights(nn.Module):
    """Several tensors, so that ranks share out who writes them."""

    def __init__(self, value: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name in "abcd":
            full = torch.full((3, 4), value).to(dtype)
            self.register_parameter(name, nn.Parameter(full, requires_grad=False))

    @property
    def values(self) -> set[float]:
        return {float(number) for weight in self.parameters() for number in weight.flatten()}


def said(call: Any, *given: Any, **options: Any) -> str:
    try:
        call(*given, progress=False, **options)
    except CheckpointError as error:
        return str(error)
    return "no error"


# -- saving -------------------------------------------------------------------------------


def save_first(folder: str, in_background: bool) -> set[float]:
    """Three replicas that differ; what one load of their checkpoint gives."""
    grid = commgrid.initialize()
    saved = Weights(float(grid.rank + 1))
    checkpoint.save(folder, 1, saved, copies="first", background=in_background, progress=False)
    checkpoint.wait()
    loaded = Weights(0.0)
    checkpoint.load(folder, loaded, progress=False)
    commgrid.shutdown()
    return loaded.values


@pytest.mark.parametrize("in_background", [False, True], ids=["at once", "in background"])
def test_the_first_of_copies_is_one_ranks_whole_state(in_background: bool, tmp_path: Path) -> None:
    assert run_on_ranks(save_first, 3, str(tmp_path), in_background) == [{1.0}] * 3


class Counting(nn.Module):
    """A stage with a buffer that has the name of another stage's."""

    def __init__(self, stage: int, count: float) -> None:
        super().__init__()
        self.register_parameter(f"weight_{stage}", nn.Parameter(torch.ones(2)))
        self.register_buffer("count", torch.full((2,), count))


def save_stages(folder: str, in_background: bool) -> list[str]:
    grid = commgrid.initialize(pp=2)
    stage = grid.get_local_rank("pp")
    found = []
    for step, (count, copies) in enumerate(
        [(float(stage), "compare"), (float(stage), "first"), (7.0, "compare")]
    ):
        call = said(
            checkpoint.save, folder, step, Counting(stage, count), copies=copies,
            background=in_background,
        )  # fmt: skip
        try:
            checkpoint.wait()
        except CheckpointError as error:
            call = str(error)
        found.append(call)
    assert checkpoint.steps(folder) == [1, 2]
    commgrid.shutdown()
    return found


@pytest.mark.parametrize("in_background", [False, True], ids=["at once", "in background"])
def test_buffers_of_one_name_on_two_stages_are_equal(in_background: bool, tmp_path: Path) -> None:
    for differ, first, equal in run_on_ranks(save_stages, 4, str(tmp_path), in_background):
        assert "model.count differs between ranks 0 and 2" in differ
        assert "persistent=False" in differ
        assert first == equal == "no error"


def test_a_save_that_was_taken_for_dead_ends_nowhere(tmp_path: Path) -> None:
    early = folders.begin(tmp_path, 5)
    (early / "__0_0.distcp").write_bytes(b"early")
    late = folders.begin(tmp_path, 5)
    (late / "__0_0.distcp").write_bytes(b"late")
    with pytest.raises(FileNotFoundError):
        folders.end(early, 5, None)
    assert folders.complete(tmp_path) == {}
    final = folders.end(late, 5, None)
    assert (final / "__0_0.distcp").read_bytes() == b"late"
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000005"]


def shut_down_beside(folder: str) -> int:
    """How many buffers a save keeps that ends after `shutdown`."""
    commgrid.initialize()
    checkpoint.save(folder, 1, Weights(1.0), background=True, progress=False)
    (saving,) = background._under_way
    commgrid.shutdown()
    saving._thread.join()
    assert checkpoint.steps(folder) == [1]
    return sum(map(len, SPARES._free.values()))


def test_a_save_beside_shutdown_keeps_no_memory(tmp_path: Path) -> None:
    assert run_on_ranks(shut_down_beside, 1, str(tmp_path)) == [0]


# -- keeping ------------------------------------------------------------------------------


def keep_two() -> list[Any]:
    """Two grids of one process keep two states each, of models with equal names and shapes."""
    actor, critic = commgrid.initialize(name="actor"), commgrid.initialize(name="critic")
    for step in (1, 2, 3):
        checkpoint.keep(step, Weights(10.0 + step), grid=actor)
        checkpoint.keep(10 * step, Weights(20.0 + step), grid=critic)
    found: list[Any] = [[state.step for state in kept_states(name)] for name in ("actor", "critic")]
    model = Weights(0.0)
    for grid in (actor, critic):
        found.append((commgrid.recover(None, model, grid=grid).step, model.values))
    third = commgrid.initialize(name="third")
    with pytest.raises(CheckpointError, match=r"no rank has a state .* of grid 'third'"):
        commgrid.recover(None, model, grid=third)
    commgrid.shutdown()
    return found


def test_two_grids_recover_their_own_states() -> None:
    expected = [[2, 3], [20, 30], (3, {13.0}), (30, {23.0})]
    assert run_on_ranks(keep_two, 2) == [expected] * 2


# -- loading ------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Path]:
    """A checkpoint of 1.5 everywhere, on one rank."""
    commgrid.initialize()
    yield checkpoint.save(tmp_path, 4, Weights(1.5), progress=False)
    commgrid.shutdown()


def test_numbers_that_a_dtype_does_not_have_are_refused(saved: Path) -> None:
    model = Weights(3.0, torch.int8)
    told = said(checkpoint.load, saved, model)
    assert told.startswith(f"nothing was loaded from {saved}: rank 0: of other dtypes, in which")
    assert "model.a is float32, here int8" in told
    assert model.values == {3.0}
    half = Weights(0.0, torch.bfloat16)
    checkpoint.load(saved, half, progress=False)
    assert half.values == {1.5}


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("source", [torch.bool, *WHOLE], ids=str)
@pytest.mark.parametrize("target", [torch.bool, *WHOLE, *FLOATS], ids=str)
def test_whole_numbers_fit_where_their_limits_come_back(
    source: torch.dtype, target: torch.dtype
) -> None:
    if source == torch.bool:
        limits = torch.tensor([False, True])
    else:
        info = torch.iinfo(source)
        limits = torch.tensor([info.min, info.max, info.max - 1], dtype=source)
    comes_back = torch.equal(limits.to(target).to(source), limits)
    if source != target and target == torch.bool:
        comes_back = False
    if {source, target} <= {torch.uint8, torch.int8} and source != target:
        comes_back = False  # it wraps there and back
    wraps = not target.is_floating_point and not torch.equal(
        limits.to(target).to(torch.float64), limits.to(torch.float64)
    )
    assert keeps_numbers(_named(source), _named(target)) == (comes_back and not wraps)


def test_floating_numbers_convert_between_precisions_alone() -> None:
    floats = [_named(dtype) for dtype in FLOATS]
    for source in floats:
        assert all(keeps_numbers(source, target) for target in [*floats, "complex64"])
        assert not any(keeps_numbers(source, _named(target)) for target in [torch.bool, *WHOLE])
        assert not keeps_numbers("complex64", source)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, *FLOATS], ids=str)
def test_floats_hold_whole_numbers_as_torch_says(dtype: torch.dtype) -> None:
    bits = round(-math.log2(torch.finfo(dtype).eps)) + 1
    for source in (torch.bool, torch.uint8, torch.int8, torch.int32):
        limit = 1 if source == torch.bool else torch.iinfo(source).max
        assert keeps_numbers(_named(source), _named(dtype)) == (limit <= 2**bits)


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _flip(folder: Path, number: float) -> None:
    """Changes a bit of the first number that has this value."""
    (file,) = folder.glob("*.distcp")
    content = bytearray(file.read_bytes())
    place = content.index(torch.full((12,), number).numpy().tobytes())
    content[place + 5] ^= 1
    file.write_bytes(content)


def test_a_flipped_bit_is_an_error_that_names_the_tensor(saved: Path) -> None:
    _flip(saved, 1.5)
    model = Weights(3.0)
    told = said(checkpoint.load, saved, model)
    assert (
        "model.a is damaged: the checksum of archive/data/0 is not as torch.save wrote it" in told
    )
    assert model.values == {3.0}


def test_damage_at_the_beginning_is_told_as_damage(saved: Path) -> None:
    (file,) = saved.glob("*.distcp")
    content = bytearray(file.read_bytes())
    place = content.index(torch.full((12,), 1.5).numpy().tobytes())
    content[content.rindex(b"PK\x03\x04", 0, content.rindex(b"data.pkl", 0, place))] ^= 1
    file.write_bytes(content)
    told = said(checkpoint.load, saved, Weights(3.0))
    assert "is damaged: its beginning is not as torch.save wrote it" in told


def test_a_file_without_checksums_loads(tmp_path: Path) -> None:
    commgrid.initialize()
    torch.serialization.set_crc32_options(False)
    try:
        saved = checkpoint.save(tmp_path, 4, Weights(1.5), progress=False)
    finally:
        torch.serialization.set_crc32_options(True)
    model = Weights(0.0)
    checkpoint.load(saved, model, progress=False)
    assert model.values == {1.5}
    commgrid.shutdown()


@pytest.mark.parametrize("way", ["absolute", "upwards"])
def test_files_outside_of_the_folder_are_not_read(way: str, saved: Path, tmp_path: Path) -> None:
    outside = tmp_path / "elsewhere.distcp"
    (file,) = saved.glob("*.distcp")
    shutil.copy(file, outside)
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = str(outside) if way == "absolute" else "../elsewhere.distcp"
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    told = said(checkpoint.load, saved, Weights(3.0), trusted=True)
    assert "names a file outside of the folder" in told
