"""Layers to parts: the best cut, against all cuts."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commgrid import SpecError
from commgrid.pipeline import partition_layers

COSTS = st.lists(st.integers(0, 9), min_size=1, max_size=8)


@given(COSTS, st.data(), st.integers(0, 5), st.integers(0, 5))
@settings(max_examples=300)
def test_no_other_cut_is_better(
    weights: list[int], data: st.DataObject, embedding: int, head: int
) -> None:
    parts = data.draw(st.integers(1, len(weights)))
    found = partition_layers(
        len(weights), parts, weights=weights, embedding=embedding, head=head
    )  # fmt: skip
    assert [layer for part in found for layer in part] == list(range(len(weights)))
    assert all(len(part) > 0 for part in found)

    def loads(cuts: tuple[int, ...]) -> list[int]:
        full = [weights[0], *weights[1:]]
        full[0] += embedding
        full[-1] += head
        edges = (0, *cuts, len(weights))
        return [sum(full[a:b]) for a, b in pairwise(edges)]

    def rating(given: list[int]) -> tuple[int, int]:
        return max(given), sum(load**2 for load in given)

    ours = loads(tuple(part.start for part in found[1:]))
    every = combinations(range(1, len(weights)), parts - 1)
    assert rating(ours) == min(rating(loads(cuts)) for cuts in every)


@pytest.mark.parametrize("layers", [1, 7, 32, 126])
def test_even_parts_differ_by_one_at_most_and_the_first_are_smaller(layers: int) -> None:
    for parts in (1, 2, 3, 8, 16):
        if parts <= layers:
            sizes = [len(part) for part in partition_layers(layers, parts)]
            assert max(sizes) - min(sizes) <= 1
            assert sizes == sorted(sizes)


def test_embedding_and_head_count() -> None:
    # A vocabulary whose head costs as much as two layers takes two layers off the last part.
    assert [len(p) for p in partition_layers(18, 4, head=2)] == [5, 5, 5, 3]
    assert [len(p) for p in partition_layers(16, 3, embedding=1, head=1)] == [5, 6, 5]


@pytest.mark.parametrize(
    ("layers", "parts", "options", "said"),
    [
        (3, 4, {}, r"3 layers cannot be cut into 4 parts .*; expected 1 to 3 parts"),
        (3, 0, {}, "3 layers cannot be cut into 0 parts"),
        (3, 2, {"weights": [1, 2]}, "weights has 2 entries for 3 layers"),
        (3, 2, {"weights": [1, -1, 2]}, r"weights\[1\]=-1: expected a finite number of 0 or more"),
        (3, 2, {"head": float("nan")}, "head=nan"),
    ],
)
def test_what_cannot_be_cut(layers: int, parts: int, options: dict[str, float], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        partition_layers(layers, parts, **options)  # type: ignore[arg-type]
