"""Pairs of grids drawn at random: every element arrives where the unsharded model says.

Five hundred draws: the same ranks, some in common, or none; dense layers and experts, a vocabulary
that tp does not divide, FSDP2, ZeRO-1, and bridges with sequences in zigzag order.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from commgrid.bridge import Cut as BridgeCut
from commgrid.testing import run_on_ranks
from tests.bridge import test_bridge as bridges
from tests.transfer.cuts import Cut
from tests.transfer.pairs import Pair, move, move_state

RANKS = 8
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
DRAWS = {"dense": 260, "experts": 80, "optimizers": 60, "bridges": 100}
PART = 20  # draws of one test


def two_places(draw: random.Random) -> tuple[range, range]:
    """Two runs of ranks: the same, separate, or anything."""
    how = draw.choice(["same", "separate", "any"])
    if how == "same":
        first, count = draw.randrange(4), draw.randint(1, 4)
        return (range(first, first + count),) * 2
    if how == "separate":
        middle = draw.randint(1, RANKS - 1)
        return (
            range(draw.randrange(middle), middle),
            range(middle, draw.randint(middle + 1, RANKS)),
        )
    firsts = draw.randrange(RANKS), draw.randrange(RANKS)
    one, other = (range(first, draw.randint(first + 1, RANKS)) for first in firsts)
    return one, other


def divisor(draw: random.Random, count: int, allowed: tuple[int, ...]) -> int:
    return draw.choice([size for size in allowed if count % size == 0])


def dense(draw: random.Random, place: range) -> Cut:
    tp = divisor(draw, len(place), (1, 2, 3, 4))
    pp = divisor(draw, len(place) // tp, (1, 2, 3, 4))
    dp = len(place) // tp // pp
    ways = [
        "layers",
        "layers",
        *(["plain"] if tp == 1 else []),
        *(["fsdp"] if pp == 1 < dp else []),
    ]
    chunks = draw.choice([1, 2]) if pp == 2 else 1
    ranks = list(place)
    if draw.random() < 0.2:
        draw.shuffle(ranks)
    return Cut(tuple(ranks), {"tp": tp, "pp": pp, "dp": dp}, chunks, draw.choice(ways),
               draw.choice(DTYPES))  # fmt: skip


def experts(draw: random.Random, place: range) -> Cut:
    tp = divisor(draw, len(place), (1, 2, 4))
    pp = divisor(draw, len(place) // tp, (1, 2))
    inner = len(place) // pp
    ep = divisor(draw, inner, (1, 2, 4))
    etp = divisor(draw, inner // ep, (1, 2))
    axes = {"tp": tp, "pp": pp, "dp": inner // tp, "ep": ep, "etp": etp}
    return Cut(tuple(place), axes, dtype=draw.choice(DTYPES))


def sharded(draw: random.Random, place: range) -> Cut:
    tp = divisor(draw, len(place), (1, 2, 4))
    axes = {"tp": tp, "dp": len(place) // tp}
    dtype = draw.choice([torch.float32, torch.bfloat16])
    return Cut(tuple(place), axes, dtype=dtype, shard=draw.random() < 0.7)


def bridge(draw: random.Random, number: int) -> bridges.Case:
    """A case of the bridges' test; with cp the sequence is in zigzag order."""
    places = two_places(draw)
    sides: list[dict[str, int]] = []
    told: dict[str, Any] = {}
    orders: list[Any] = [(), ()]
    for side, place in enumerate(places):
        tp = divisor(draw, len(place), (1, 2, 3))
        left = len(place) // tp
        cp = 2 if left % 2 == 0 and draw.random() < 0.5 else 1
        sides.append({"tp": tp, "cp": cp})
        if cp > 1:
            told[("source_sequence", "target_sequence")[side]] = BridgeCut(1, "cp", "zigzag")
            orders[side] = bridges.ZIGZAG
    return bridges.Case(
        f"draw {number}", *places, *sides, told, target_order=orders[1], source_order=orders[0]
    )


def pairs_of(kind: str, part: int) -> list[Any]:
    makers: dict[str, Callable[[random.Random, range], Cut]] = {
        "dense": dense, "experts": experts, "optimizers": sharded,
    }  # fmt: skip
    found: list[Any] = []
    for number in range(part * PART, (part + 1) * PART):
        draw = random.Random(f"{kind} {number}")
        if kind == "bridges":
            found.append(bridge(draw, number))
        else:
            one, other = two_places(draw)
            found.append((makers[kind](draw, one), makers[kind](draw, other)))
    return found


def check(kind: str, drawn: list[Any], folder: Path) -> None:
    how: dict[str, Any] = {"backend": None, "launcher": "torchrun", "timeout": 500}
    if kind == "bridges":
        for rank, found in enumerate(run_on_ranks(bridges.every, RANKS, drawn, timeout=500)):
            for case, differences in zip(drawn, found, strict=True):
                bad = {what: by for what, by in differences.items() if by > bridges.BOUND}
                assert not bad, (case, rank, bad)
        return
    if kind == "optimizers":
        for found in run_on_ranks(move_state, RANKS, drawn, str(folder), **how):
            assert found == [[]] * len(drawn)
        return
    for found in run_on_ranks(move, RANKS, drawn, kind == "experts", "", **how):
        for (source, target), (bad, *_) in zip(drawn, found, strict=True):
            assert bad == [], f"{source} → {target}"


PARTS = [(kind, part) for kind, count in DRAWS.items() for part in range(count // PART)]


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "part"), PARTS, ids=[f"{k} {p}" for k, p in PARTS])
def test_draws(kind: str, part: int, tmp_path: Path) -> None:
    check(kind, pairs_of(kind, part), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("kind", DRAWS)
def test_some_draws(kind: str, tmp_path: Path) -> None:
    check(kind, pairs_of(kind, 0)[:3], tmp_path)


def test_draws_are_of_many_kinds() -> None:
    assert sum(DRAWS.values()) == 500
    pairs: list[Pair] = [pair for part in range(13) for pair in pairs_of("dense", part)]
    assert {"layers", "plain", "fsdp"} == {cut.way for pair in pairs for cut in pair}
    separate = [not {*one.ranks} & {*other.ranks} for one, other in pairs]
    same = [{*one.ranks} == {*other.ranks} for one, other in pairs]
    assert min(sum(separate), sum(same), len(pairs) - sum(separate) - sum(same)) > 20
    assert any(10 % cut.axes["tp"] for pair in pairs for cut in pair)  # pads the vocabulary
