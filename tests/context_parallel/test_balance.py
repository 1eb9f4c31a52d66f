"""Balanced ranges of packed documents, counted in attention masks that are written out."""

import itertools
import random
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commgrid import SpecError
from commgrid.context_parallel import balance
from commgrid.context_parallel.balance import Mask, balanced, pairs_of
from commgrid.context_parallel.ranges import Ranges
from tests.sizes import full

LONGEST = 1024


@cache
def keys_of_rows(length: int, causal: bool, window: int | None) -> torch.Tensor:
    """For each query of a document, how many keys its row of the mask lets through."""
    query, key = torch.arange(length)[:, None], torch.arange(length)[None, :]
    mask = torch.ones(length, length, dtype=torch.bool)
    if causal:
        mask &= key <= query
    if window is not None:
        mask &= query - key < window
    return mask.sum(1)


def keys_of_all(lengths: Sequence[int], causal: bool, window: int | None) -> torch.Tensor:
    """The keys of every query of packed documents."""
    return torch.cat([keys_of_rows(length, causal, window) for length in lengths])


def held_by(ranges: Ranges) -> list[int]:
    return [position for start, stop in ranges for position in range(start, stop)]


def check(
    lengths: Sequence[int],
    parts: int,
    causal: bool = True,
    window: int | None = None,
) -> tuple[float, float]:
    """Everything that `balanced` promises; gives back max/mean - 1 of pairs and of tokens."""
    found = balanced(lengths, parts, causal=causal, window=window)
    keys, total = keys_of_all(lengths, causal, window), sum(lengths)
    assert len(found) == parts
    holders = torch.zeros(total, dtype=torch.int64)
    for ranges in found:
        assert list(ranges) == sorted(ranges)
        assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges))
        for start, stop in ranges:
            assert 0 <= start < stop <= total
            holders[start:stop] += 1
    assert bool((holders == 1).all())
    assert sum(map(len, found)) <= 2 * parts - 1
    tokens = [sum(stop - start for start, stop in held) for held in found]
    pairs = [sum(int(keys[start:stop].sum()) for start, stop in held) for held in found]
    assert pairs == [pairs_of(lengths, held, Mask(causal, window)) for held in found]
    token_mean, pair_mean = total / parts, int(keys.sum()) / parts
    for count, done in zip(tokens, pairs, strict=True):
        assert abs(count - token_mean) <= 1
        assert abs(done - pair_mean) <= 3 * int(keys.max())
    return max(pairs) / pair_mean - 1, max(tokens) / token_mean - 1


def draw_packings(count: int) -> Iterator[tuple[list[int], int]]:
    """Documents as they come: long tails of two kinds, all equal, and one giant among small."""
    draw = random.Random(18)
    for number in range(count):
        documents, parts = draw.randrange(64, 129), draw.choice([2, 3, 4, 6, 8])
        kind = number % 4
        if kind == 0:
            lengths = [int(draw.lognormvariate(4.5, 1.2)) for _ in range(documents)]
        elif kind == 1:
            lengths = [int(16 * draw.paretovariate(0.9)) for _ in range(documents)]
        elif kind == 2:
            lengths = [draw.randrange(50, 300)] * documents
        else:
            lengths = [draw.randrange(1, 40) for _ in range(documents)]
            lengths[draw.randrange(documents)] = LONGEST
        yield [min(max(length, 1), LONGEST) for length in lengths], parts


@pytest.mark.parametrize(
    "mask",
    [{}, {"window": 100}, {"causal": False}],
    ids=["causal", "window", "full"],
)
def test_drawn_packings_are_within_five_percent(mask: dict[str, Any]) -> None:
    worst_pairs = worst_tokens = 0.0
    for lengths, parts in draw_packings(1000 if full() else 24):
        pairs, tokens = check(lengths, parts, **mask)
        worst_pairs, worst_tokens = max(worst_pairs, pairs), max(worst_tokens, tokens)
    assert worst_pairs < 0.05
    assert worst_tokens < 0.05


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=20),
    parts=st.integers(1, 12),
    mask=st.sampled_from([(True, None), (False, None), (True, 1), (True, 3), (True, 25)]),
)
def test_any_lengths_over_any_number_of_ranks(
    lengths: list[int], parts: int, mask: tuple[bool, int | None]
) -> None:
    check(lengths, parts, *mask)


@pytest.mark.parametrize("parts", [2, 3, 4, 5, 6, 8])
def test_one_document_is_cut_in_a_zig_zag(parts: int) -> None:
    """As Megatron cuts it: of 2 · parts chunks, rank r has the r-th and the r-th from the end."""
    chunk = 7
    found = balanced([2 * parts * chunk], parts)
    for rank, held in enumerate(found):
        ahead = range(rank * chunk, (rank + 1) * chunk)
        behind = range((2 * parts - rank - 1) * chunk, (2 * parts - rank) * chunk)
        assert held_by(held) == [*ahead, *behind]


@pytest.mark.parametrize("length", [997, 1000, 1024])
@pytest.mark.parametrize("parts", [2, 3, 4, 6, 8])
def test_one_document_of_any_length_is_within_two_percent(length: int, parts: int) -> None:
    pairs, tokens = check([length], parts)
    assert pairs < 0.02
    assert tokens < 0.02


def cut_documents(lengths: Sequence[int], found: Sequence[Ranges]) -> int:
    """How many documents have positions on more ranks than one."""
    ends = list(itertools.accumulate(lengths))
    owner = {position: rank for rank, held in enumerate(found) for position in held_by(held)}
    return sum(
        len({owner[position] for position in range(end - length, end)}) > 1
        for end, length in zip(ends, lengths, strict=True)
    )


def test_all_but_two_documents_a_cut_stay_whole() -> None:
    assert cut_documents([512] * 64, balanced([512] * 64, 8)) == 0
    draw = random.Random(7)
    for parts in (2, 4, 8):
        lengths = [int(draw.lognormvariate(4.5, 0.8)) + 1 for _ in range(400)]
        # A cut arc ends in two documents, and a document cut before may be cut again.
        assert cut_documents(lengths, balanced(lengths, parts)) <= 2 * (parts - 1)


def test_what_is_cut_lies_on_neighbouring_ranks() -> None:
    """Halves are halved again: ranks 0 to 3 share two documents at most with 4 to 7."""
    lengths = [90, 130, 70, 200, 110] * 40
    found = balanced(lengths, 8)
    owner = {position: rank for rank, held in enumerate(found) for position in held_by(held)}
    ends = list(itertools.accumulate(lengths))
    across = [
        end
        for end, length in zip(ends, lengths, strict=True)
        if len({owner[position] // 4 for position in range(end - length, end)}) > 1
    ]
    assert len(across) <= 2


def test_the_arc_sought_may_start_where_the_search_does() -> None:
    """It was looked for between two starts, and one before the first of them was taken for it."""
    lengths = [int(digit) for digit in "211221122122211221122112211122"]
    check(lengths, 13, causal=False)


def test_fewer_tokens_than_ranks_leave_some_without() -> None:
    found = balanced([2, 1], 5)
    assert [len(held_by(held)) for held in found] == [1, 1, 1, 0, 0]
    check([2, 1], 5)


def test_a_rank_finds_the_same_from_any_kind_of_numbers() -> None:
    lengths = [33, 1, 500, 64, 64, 2, 91]
    expected = balanced(lengths, 3)
    assert balanced(tuple(lengths), 3) == expected
    assert balanced(torch.tensor(lengths), 3) == expected
    assert balanced(iter(lengths), 3) == expected
    assert hash(expected) == hash(balanced(lengths, 3))


def test_steps_grow_with_documents_and_ranks_and_not_with_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = 0
    counted = Mask.pairs

    def pairs(self: Mask, count: int, length: int) -> int:
        nonlocal steps
        steps += 1
        return counted(self, count, length)

    monkeypatch.setattr(Mask, "pairs", pairs)

    def needed(lengths: list[int], parts: int) -> int:
        nonlocal steps
        steps = 0
        balanced(lengths, parts)
        return steps

    draw = random.Random(3)
    lengths = [int(draw.lognormvariate(5, 1)) + 1 for _ in range(5000)]
    few, many = needed(lengths[:2500], 64), needed(lengths, 64)
    assert many < 3 * few
    assert many < 40_000
    assert needed([length * 1000 for length in lengths], 64) < 2 * many
    assert needed([10**6], 64) < 20_000


@pytest.mark.parametrize(
    ("lengths", "parts", "options", "said"),
    [
        ([], 2, {}, "lengths is empty"),
        ([4, 0], 2, {}, r"lengths\[1\]=0: expected 1 token or more"),
        ([4, -3], 2, {}, r"lengths\[1\]=-3"),
        ([4], 0, {}, "parts=0: expected 1 rank or more"),
        ([4], 2, {"window": 0}, "window=0: expected 1 key"),
        ([4], 2, {"window": 3, "causal": False}, "window=3 with causal=False"),
    ],
)
def test_what_cannot_be_balanced_is_said(
    lengths: list[int], parts: int, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(SpecError, match=said):
        balanced(lengths, parts, **options)


def test_ranges_outside_the_documents_are_said() -> None:
    with pytest.raises(SpecError, match=r"range \(3, 9\) is not one of the 8 positions"):
        pairs_of([5, 3], [(3, 9)], Mask())


def test_nothing_heavy_is_needed() -> None:
    assert "torch" not in vars(balance)
