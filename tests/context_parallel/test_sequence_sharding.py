"""Shardings as values: who holds what, tensors cut and joined, and what is refused."""

from __future__ import annotations

import pickle
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commgrid import ShapeError, SpecError
from commgrid.context_parallel import SequenceSharding, explain
from commgrid.context_parallel.balance import Mask
from commgrid.context_parallel.tiles import needed, tiles
from tests.context_parallel.plain import Case, allowed
from tests.sizes import full


@st.composite
def shardings(draw: st.DrawFn) -> SequenceSharding:
    """Any positions to any ranks, in stretches of one or more, over some documents."""
    parts = draw(st.integers(1, 4))
    stretches = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(0, parts - 1)), min_size=1))
    held: list[list[int]] = [[] for _ in range(parts)]
    at = 0
    for size, owner in stretches:
        held[owner] += range(at, at + size)
        at += size
    bounds = draw(st.sets(st.integers(1, at - 1), max_size=6)) if at > 1 else set()
    return SequenceSharding.from_positions(held, [0, *sorted(bounds), at])


# Of each property the short run draws fewer examples.
examples = settings(max_examples=200 if full() else 30, deadline=None)


# -- who holds what -----------------------------------------------------------------------


@examples
@given(shardings())
def test_every_position_is_on_its_rank_and_in_its_document(sharding: SequenceSharding) -> None:
    bounds = sharding.documents
    seen: list[int] = []
    for rank in range(sharding.parts):
        positions = sharding.positions(rank).tolist()
        documents = [sum(p >= bound for bound in bounds[1:]) for p in positions]
        assert positions == [p for start, stop in sharding.ranges[rank] for p in range(start, stop)]
        assert positions == sorted(positions)
        assert len(positions) == sharding.local_lengths[rank]
        assert sharding.document_ids(rank).tolist() == documents
        assert sharding.position_ids(rank).tolist() == [
            p - bounds[d] for p, d in zip(positions, documents, strict=True)
        ]
        seen += positions
    assert sorted(seen) == list(range(sharding.length))


@examples
@given(shardings())
def test_what_is_cut_is_joined_again(sharding: SequenceSharding) -> None:
    whole = torch.arange(3.0 * sharding.length).view(3, sharding.length)
    shards = [sharding.shard(whole, rank, dim=1) for rank in range(sharding.parts)]
    for rank, shard in enumerate(shards):
        assert torch.equal(shard, whole[:, sharding.positions(rank)])
    assert torch.equal(sharding.unshard(shards, dim=1), whole)
    assert torch.equal(sharding.unshard([s.t() for s in shards], dim=-2), whole.t())


@examples
@given(shardings())
def test_equal_ones_are_one_key_and_travel(sharding: SequenceSharding) -> None:
    other = pickle.loads(pickle.dumps(sharding))
    assert other == sharding
    assert hash(other) == hash(sharding)
    assert other.digest == sharding.digest
    split = [
        [(a, a + 1) for start, stop in held for a in range(start, stop)] for held in sharding.ranges
    ]
    assert SequenceSharding(sharding.length, split, sharding.documents) == sharding


def test_a_batch_is_cut_by_name() -> None:
    sharding = SequenceSharding.zigzag(8, 2)
    batch = {"tokens": torch.arange(8)[None], "labels": torch.arange(1, 9)[None], "mask": None}
    found = sharding.shard(batch, 1, dim=1)
    assert found["tokens"].tolist() == [[2, 3, 4, 5]]
    assert found["labels"].tolist() == [[3, 4, 5, 6]]
    assert found["mask"] is None


@pytest.mark.parametrize("parts", [1, 2, 3, 8, 64])
def test_zigzag_attends_equally_many_pairs(parts: int) -> None:
    sharding = SequenceSharding.zigzag(8 * parts, parts)
    mask = allowed(Case(sharding)) if parts < 64 else torch.ones(8 * parts, 8 * parts).tril()
    pairs = [int(mask[sharding.positions(rank)].sum()) for rank in range(parts)]
    assert pairs == [sharding.attended_pairs(rank) for rank in range(parts)]
    assert max(pairs) - min(pairs) <= 0.02 * max(pairs)


# -- what has to be computed, and by whom ---------------------------------------------------


@examples
@given(shardings(), st.booleans(), st.one_of(st.none(), st.integers(1, 40)))
def test_rectangles_are_the_mask(
    sharding: SequenceSharding, causal: bool, window: int | None
) -> None:
    mask = Mask(causal, window if causal else None)
    whole = allowed(Case(sharding, causal=causal, window=mask.window))
    for queries in range(sharding.parts):
        rows = sharding.positions(queries)
        for keys in sharding.ranges:
            wanted = needed(sharding.ranges[queries], keys, sharding.documents, mask)
            of_keys = [p for start, stop in keys for p in range(start, stop)]
            attended = [p for p in of_keys if whole[rows, p].any()]
            assert attended == [p for start, stop in wanted for p in range(start, stop)]
            found = torch.zeros(len(rows), len(of_keys), dtype=torch.int64)
            for tile in tiles(sharding.ranges[queries], keys, sharding.documents, mask):
                i = torch.arange(tile.q_stop - tile.q_start)[:, None]
                j = torch.arange(tile.k_stop - tile.k_start)
                inside = torch.ones(len(i), len(j), dtype=torch.bool)
                if tile.offset is not None:
                    behind = tile.offset + i - j
                    inside = (behind >= 0) & (behind < (tile.window or len(whole)))
                assert inside.any(1).all()  # a kernel's log-sum-exp of no keys is not to be had
                found[tile.q_start : tile.q_stop, tile.k_start : tile.k_stop] += inside
            assert torch.equal(found, whole[rows][:, of_keys].long())


def test_few_rectangles_are_computed() -> None:
    """Megatron's three of a zig-zag: own, the first half of keys, the second of queries."""
    sharding = SequenceSharding.zigzag(64, 4)
    for rank, queries in enumerate(sharding.ranges):
        for other, keys in enumerate(sharding.ranges):
            (tile,) = tiles(queries, keys, sharding.documents, Mask())
            assert tile.is_causal == (rank == other)
            if other < rank:
                assert tile[:4] == (0, 16, 0, 8)
            if other > rank:
                assert tile[:4] == (8, 16, 0, 16)
    packed = SequenceSharding.packed([5] * 32, 4)
    assert sum(len(tiles(q, q, packed.documents, Mask())) for q in packed.ranges) == 32


# -- in words -------------------------------------------------------------------------------


@examples
@given(shardings(), st.sampled_from([(True, None), (False, None), (True, 3)]))
def test_a_sharding_explains_who_attends_what(
    sharding: SequenceSharding, mask: tuple[bool, int | None]
) -> None:
    whole = allowed(Case(sharding, causal=mask[0], window=mask[1]))
    lines = explain(sharding, causal=mask[0], window=mask[1]).splitlines()[-sharding.parts :]
    for rank, line in enumerate(lines):
        own = sharding.positions(rank)
        keys = whole[own].any(0)
        wanted = {int(key) for key in keys.nonzero()} - set(own.tolist())
        holds, attends = line.split("attends ")
        assert holds.startswith(f"rank {rank} holds ")
        assert f"{len(own)} position" in holds
        assert f" {int(whole[own].sum())} pairs; " in holds
        said = set()
        for text in re.findall(r"((?:\d+(?:-\d+)?(?:, )?)+) of rank (\d+)", attends):
            found = spelled(text[0])
            assert found <= set(sharding.positions(int(text[1])).tolist())
            said |= found
        assert said == wanted
        assert wanted or attends == "no others"


def spelled(text: str) -> set[int]:
    """Positions of ranges such as `0-2, 5`."""
    ends = [one.split("-") for one in text.split(", ") if one]
    return {p for one in ends for p in range(int(one[0]), int(one[-1]) + 1)}


# -- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: SequenceSharding.contiguous(10, 4),
            r"contiguous cannot cut 10 positions for 4 ranks: expected a multiple of 4; pad the "
            r"sequence, or use packed\(\[10\], 4\), which takes any",
        ),
        (
            lambda: SequenceSharding.zigzag(12, 4),
            "12 positions for 4 ranks: expected a multiple of 8",
        ),
        (lambda: SequenceSharding.zigzag(12, 0), "parts=0: expected 1 rank or more"),
        (lambda: SequenceSharding.packed([], 4), "lengths is empty"),
        (lambda: SequenceSharding.packed([4, 0], 4), r"lengths\[1\]=0: expected 1 token or more"),
        (
            lambda: SequenceSharding.contiguous(8, 2, [0, 5, 3, 8]),
            r"documents=\(0, 5, 3, 8\): expected where each document begins, ascending from 0",
        ),
        (lambda: SequenceSharding.contiguous(8, 2, [0, 5, 9]), "the length of the sequence, 8"),
        (lambda: SequenceSharding.contiguous(8, 2, [1, 8]), r"documents=\(1, 8\): expected"),
        (lambda: SequenceSharding.contiguous(8, 2, [0, 4, 4, 8]), r"documents=\(0, 4, 4, 8\)"),
        (
            lambda: SequenceSharding(8, [[(0, 5)], [(4, 8)]]),
            "position 4 is on ranks 0 and 1; expected each on just one rank",
        ),
        (lambda: SequenceSharding(8, [[(0, 3)], [(4, 8)]]), "position 3 of 8 is on no rank"),
        (lambda: SequenceSharding(8, [[(0, 3)], [(3, 7)]]), "position 7 of 8 is on no rank"),
        (lambda: SequenceSharding(8, [[(0, 3)], [(3, 9)]]), "rank 1 has position 8, past the end"),
        (lambda: SequenceSharding(8, [[(4, 8), (0, 4)]]), r"rank 0 has \(0, 4\) after \(4, 8\)"),
        (lambda: SequenceSharding(8, [[(-1, 8)]]), "position -1"),
        (
            lambda: SequenceSharding.from_positions([[2, 1, 0]]),
            r"rank 0 has \(1, 2\) after \(2, 3\)",
        ),
        (lambda: SequenceSharding(8, []), "ranges is empty"),
        (lambda: SequenceSharding.zigzag(8, 4).merged(3), "blocks of 3 ranks do not divide the 4"),
        (
            lambda: SequenceSharding.zigzag(8, 4).attended_pairs(0, causal=False, window=3),
            "window=3 with causal=False",
        ),
    ],
)
def test_wrong_assignments_are_named(make: object, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        make()  # type: ignore[operator]


def test_tensors_of_another_length_are_named() -> None:
    sharding = SequenceSharding.zigzag(8, 2)
    with pytest.raises(ShapeError, match=r"a tensor of shape \(3, 9\) has not the 8 positions"):
        sharding.shard(torch.ones(3, 9), 0, dim=1)
    with pytest.raises(ShapeError, match=r"'labels' of shape \(8, 1\).* in dim 1"):
        sharding.shard({"tokens": torch.ones(1, 8), "labels": torch.ones(8, 1)}, 0, dim=1)
    with pytest.raises(ShapeError, match="3 shards of a sharding over 2 ranks"):
        sharding.unshard([torch.ones(4)] * 3)
    with pytest.raises(ShapeError, match=r"rank 1's shard of shape \(5,\) has 5 positions"):
        sharding.unshard([torch.ones(4), torch.ones(5)])
