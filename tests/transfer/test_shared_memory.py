"""Sides of a transfer in one memory pool: disjoint parts are moved, overlapping ones refused."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commgrid
from commgrid.resharding.local_boxes import MemoryPart, shared_memory
from commgrid.transfer import Part, Transfer


def places(tensor: Tensor, pool: Tensor) -> set[int]:
    """The bytes of a view, found by writing to it."""
    pool.zero_()
    strides = [
        (n if step else 1, step) for n, step in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    once = tensor.as_strided([n for n, _ in strides], [step for _, step in strides])
    for index in itertools.product(*map(range, once.shape)):
        once[index] = -1
    return set(pool.nonzero().flatten().tolist())


def some_view(rng: random.Random, pool: Tensor) -> Tensor:
    dtype = rng.choice([torch.int8, torch.int16, torch.int32])
    whole = pool.view(dtype)
    shape = [rng.randint(1, 4) for _ in range(rng.randint(0, 3))]
    stride = [rng.choice([0, 1, 2, 3, 4, 6, 8, 12]) for _ in shape]
    return whole.as_strided(shape, stride, rng.randrange(64 // dtype.itemsize))


def test_views_of_one_pool_share_memory_where_writing_says_so() -> None:
    rng, pool = random.Random(0), torch.zeros(512, dtype=torch.int8)
    seen = {True: 0, False: 0}
    for _ in range(400):
        one, other = some_view(rng, pool), some_view(rng, pool)
        right = bool(places(one, pool) & places(other, pool))
        found = shared_memory([MemoryPart(one, "one", 1), MemoryPart(other, "other", 2)])
        assert (found is not None) == right, (one.shape, one.stride(), other.shape, other.stride())
        seen[right] += 1
    assert min(seen.values()) > 60


def pooled(case: str) -> tuple[Any, Any]:
    """A source and a target in one memory."""
    pool = torch.zeros(8, 8)
    halves: dict[str, tuple[Any, Any]] = {
        "rows": (pool[:4], pool[4:]),
        "columns": (pool[:, :4], pool[:, 4:]),
        "alternating": (pool[::2], pool[1::2]),
        "overlapping": (pool[:4], pool[3:7]),
        "one element": (pool[:4], pool.view(-1)[31:63].view(4, 8)),
        "crossing": (pool[:, :1], pool[7:].t()),
        "itself": (pool, pool),
    }
    return halves[case]


@pytest.mark.parametrize("case", ["rows", "columns", "alternating"])
def test_disjoint_parts_of_one_pool_are_moved(case: str) -> None:
    commgrid.initialize()
    source, target = pooled(case)
    transfer = Transfer({"w": source}, {"w": target})
    for number in range(2):
        source.copy_(torch.arange(32.0).view_as(source) + number)
        transfer.run()
        assert torch.equal(target, source)
        assert torch.equal(source.flatten(), torch.arange(32.0) + number)
    commgrid.shutdown()


@pytest.mark.parametrize("case", ["overlapping", "one element", "crossing", "itself"])
def test_overlapping_parts_of_one_pool_are_refused(case: str) -> None:
    commgrid.initialize()
    source, target = pooled(case)
    with pytest.raises(
        commgrid.TransferError, match=r"w of the target shares its memory with w of"
    ):
        Transfer({"w": source}, {"w": target})
    commgrid.shutdown()


def test_a_module_beside_another_in_a_flat_buffer_is_moved() -> None:
    commgrid.initialize()
    flat, models = torch.arange(12.0), [nn.Linear(2, 2), nn.Linear(2, 2)]
    for number, model in enumerate(models):
        model.weight.data = flat[6 * number : 6 * number + 4].view(2, 2)
        model.bias.data = flat[6 * number + 4 : 6 * number + 6]
    Transfer(models[1], models[0]).run()
    assert flat.tolist() == [6.0, 7.0, 8.0, 9.0, 10.0, 11.0] * 2
    commgrid.shutdown()


def test_two_names_of_a_target_that_overlap_are_refused() -> None:
    commgrid.initialize()
    pool = torch.zeros(6)
    source = {"a": torch.ones(4), "b": torch.ones(4) * 2}
    with pytest.raises(commgrid.TransferError, match="a and b of the target are in one memory"):
        Transfer(source, {"a": pool[:4], "b": pool[2:]})
    apart = {"a": pool[:2], "b": pool[2:4]}
    Transfer({name: each[:2] for name, each in source.items()}, apart).run()
    assert pool.tolist() == [1.0, 1.0, 2.0, 2.0, 0.0, 0.0]
    commgrid.shutdown()


def test_two_parts_of_one_name_in_one_memory_are_refused() -> None:
    commgrid.initialize()
    part, source = torch.zeros(2), {"w": torch.arange(4.0)}
    with pytest.raises(commgrid.TransferError, match="w and w of the target are in one memory"):
        Transfer(source, {"w": [Part(part, (4,), (0,)), Part(part, (4,), (2,))]})
    twice = [Part(part, (4,), (2,)), Part(part, (4,), (2,))]
    Transfer(source, {"w": twice}).run()
    assert part.tolist() == [2.0, 3.0]
    commgrid.shutdown()
