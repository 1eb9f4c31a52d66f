"""Files written by a hand, beside training: what torch would have written, and always an end."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import commgrid
from commgrid import checkpoint
from commgrid.checkpoint import background, beside, storage
from commgrid.checkpoint.boxes import Chunk
from commgrid.checkpoint.hand import Hand
from commgrid.checkpoint.items import Item, Value
from commgrid.testing import run_on_ranks
from commgrid.torch_compat.archive import envelope
from tests.waiting import until

TENSORS = {
    "weights": torch.randn(300, 1000),
    "again": torch.randn(300, 1000),  # of one kind with the first
    "half": torch.randn(2049).bfloat16(),
    "large": torch.arange(beside.PIECE // 8 + 3),  # over a piece's end
    "complex": torch.randn(40, 30, dtype=torch.complex64),
    "eight": torch.randn(64, 64).to(torch.float8_e4m3fn),
    "flags": torch.randn(5000) > 0,
    "small": torch.randn(3),
    "one": torch.tensor(2.5),
    "none": torch.empty(0, 4),
    **{f"many {i}": torch.full((7,), float(i)) for i in range(700)},
}


@contextmanager
def a_hand(patience: float = 60.0) -> Iterator[Hand]:
    hand = Hand("hand", patience)
    hand.start()
    try:
        yield hand
    finally:
        hand.end()


def items() -> list[Item | Value]:
    found: list[Item | Value] = [
        Item((key,), tuple(one.shape), [Chunk((0,) * one.dim(), one)], one.dtype)
        for key, one in TENSORS.items()
    ]
    return [*found, Value(("step",), {"is": [7, "seven"]})]


def equal(one: Tensor, other: Tensor) -> bool:
    same = (one.dtype, one.shape) == (other.dtype, other.shape)
    bits = (each.reshape(-1).view(torch.uint8) for each in (one, other))
    return same and torch.equal(*bits)


def test_the_file_is_the_one_that_torch_writes(tmp_path: Path) -> None:
    """Item by item, but for the number that torch gives each archive; and every checksum holds."""
    seen: list[tuple[int, int]] = []
    for way in ("ours", "torchs"):
        (tmp_path / way).mkdir()
    with a_hand() as hand:
        sums = beside.checksums(TENSORS.values(), hand)
        put = partial(beside.put, hand=hand, sums=sums)
        ours = storage.write(tmp_path / "ours", items(), 3, lambda *done: seen.append(done), put)
    theirs = storage.write(tmp_path / "torchs", items(), 3, lambda *done: None)
    total = sum(one.nbytes for one in TENSORS.values())
    assert seen[-1] == (total, total)
    assert {one.storage_data.relative_path for one in ours.results} == {"__3_0.distcp"}
    found = {}
    for way, written in (("ours", ours), ("torchs", theirs)):
        content = (tmp_path / way / "__3_0.distcp").read_bytes()
        assert sum(one.size_in_bytes for one in written.results) == len(content)
        found[way] = {
            one.index.fqn: content[one.storage_data.offset :][: one.storage_data.length]
            for one in written.results
        }
    assert [*found["ours"]] == [*found["torchs"]]
    for key, archive in found["ours"].items():
        mine, other = (zipfile.ZipFile(io.BytesIO(one)) for one in (archive, found["torchs"][key]))
        assert mine.testzip() is None
        names = [one.filename for one in other.infolist()]
        assert [one.filename for one in mine.infolist()] == names
        assert len(archive) == len(found["torchs"][key])
        assert all(
            mine.read(name) == other.read(name) for name in names if "serialization_id" not in name
        )
        if key in TENSORS:
            assert equal(torch.load(io.BytesIO(archive), weights_only=True), TENSORS[key])


@pytest.mark.parametrize("key", ["weights", "half", "complex", "eight", "flags"])
def test_an_envelope_reads_no_numbers(key: str) -> None:
    tensor = TENSORS[key]
    around = envelope(torch.empty_like(tensor))
    assert around is not None
    numbers = bytes(beside._bytes(tensor))
    archive = io.BytesIO(around.head + numbers + around.ending(zlib.crc32(numbers)))
    assert zipfile.ZipFile(archive).testzip() is None
    archive.seek(0)
    assert equal(torch.load(archive, weights_only=True), tensor)


def test_where_torch_lays_archives_out_otherwise_it_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "envelope", lambda tensor: None)
    test_the_file_is_the_one_that_torch_writes(tmp_path)


def test_a_hand_takes_what_is_left_and_gives_it_back_in_a_hurry() -> None:
    def where() -> int:
        return threading.get_native_id()

    with a_hand() as hand:
        assert hand.do(where) != where()
        if sys.platform == "linux":
            assert hand.do(lambda: os.sched_getscheduler(where())) == os.SCHED_IDLE
            assert os.sched_getscheduler(where()) == os.SCHED_OTHER
        with pytest.raises(ZeroDivisionError):
            hand.do(lambda: 1 // 0)
        hand.hurry()
        assert hand.do(where) == where()
    with a_hand(patience=0.2) as hand:
        assert hand.do(where) != where()
        time.sleep(0.3)  # its patience
        assert hand.do(where) == where()


def test_half_a_write_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may take less than it was given."""
    real = os.write
    monkeypatch.setattr(os, "writev", lambda to, parts: real(to, bytes(parts[0])[:3]))
    monkeypatch.setattr(os, "write", lambda to, some: real(to, some[:2]))
    with (tmp_path / "file").open("wb", buffering=0) as file:
        beside._write(file.fileno(), [memoryview(b"abcde"), memoryview(b"fghij")])
    assert (tmp_path / "file").read_bytes() == b"abcdefghij"


def beside_busy_cores(folder: str) -> list[int]:
    """Saves while every core has something more important to do, for ever."""
    background.Hand = partial(Hand, patience=1.0)  # type: ignore[assignment, misc]
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in os.sched_getaffinity(0)
    ]
    try:
        commgrid.initialize()
        model = nn.Linear(1000, 3000)
        checkpoint.save(folder, 1, model, background=True, progress=False)
        until(lambda: not background.is_under_way(), "the end of the save")
        alone = checkpoint.steps(folder)  # nobody has waited for it
        checkpoint.save(folder, 2, model, background=True, progress=False)
        checkpoint.wait()
        commgrid.shutdown()
    finally:
        for each in busy:
            each.kill()
            each.wait()
    assert checkpoint.steps(folder) == [1, 2]
    return alone


def test_a_save_ends_where_all_cores_are_busy_for_ever(tmp_path: Path) -> None:
    (found,) = run_on_ranks(beside_busy_cores, 1, str(tmp_path), backend=None, launcher="torchrun")
    assert found == [1]


def ended_hands(folder: str) -> list[str]:
    commgrid.initialize()
    model = nn.Linear(4, 4)
    for step in range(1, 4):
        checkpoint.save(folder, step, model, background=True, progress=False)
    checkpoint.wait()
    commgrid.shutdown()
    return [each.name for each in threading.enumerate() if each.name.startswith("commgrid-")]


def test_no_thread_is_left(tmp_path: Path) -> None:
    assert run_on_ranks(ended_hands, 1, str(tmp_path), backend=None, launcher="torchrun") == [[]]
