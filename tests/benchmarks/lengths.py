"""Long-tailed batches over groups per length and over one fixed size; packed sequences in shares.

    python tests/benchmarks/lengths.py --json
    python tests/benchmarks/lengths.py --batches 3

Nothing is timed: pairs and tokens are counted, so that every machine prints the same.

Batches of 512 documents on 8 and 32 ranks with room for 16,384 tokens each (where the longest
document needs more, for its share). Time is in attended pairs: a token's other work is 6 · h pairs
for a model of width h = 4,096. Receiving the keys and values of one token (8 of 32 heads, bf16: 4
KB) lasts as long as 220 pairs at 450 GB/s and 2,000 at 50 GB/s, at 400 TFLOP/s; "free" exchanges
nothing and has attention alone. Peers take one size of groups for all documents, packed as they
come and dealt in turn, each the best size for its batch:

- "fixed, balanced": packed sequences in our balanced shares; ranks receive only keys they attend.
- "fixed, zig-zag": each document in Megatron's zig-zag, padded to a multiple of twice the ranks;
  ranks receive all keys of the packed sequence. "all ranks, zig-zag" has no choice of the size.

Packed sequences of 128 documents are balanced over 8 ranks beside two usual ways: contiguous
slices, and Megatron's zig-zag for each document, padded to a multiple of twice the ranks.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from commgrid.context_parallel import (
    Costs,
    LengthGroups,
    LengthPlan,
    fixed_lengths,
    plan_lengths,
)
from commgrid.context_parallel.balance import Mask, balance, pairs_of
from tests.benchmarks.report import Row, compare, main

WIDTH, ROOM, LONGEST = 4096, 16_384, 131_072
COSTS = {
    "free": Costs(),
    "450 GB/s": Costs(6 * WIDTH, 220),
    "50 GB/s": Costs(6 * WIDTH, 2000),
}


def lognormal(draw: random.Random) -> int:
    return int(draw.lognormvariate(7, 1.4))


def zipf(draw: random.Random) -> int:
    return int(256 * draw.paretovariate(1.0))


KINDS: dict[str, Callable[[random.Random], int]] = {"lognormal": lognormal, "zipf": zipf}


def documents(kind: str, seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [min(max(KINDS[kind](draw), 1), LONGEST) for _ in range(count)]


def fixed_sizes(lengths: list[int], ranks: int, room: int) -> list[int]:
    return [size for size in LengthGroups(ranks).sizes if max(lengths) <= size * room]


def balanced_plan(lengths: list[int], ranks: int, room: int, costs: Costs) -> LengthPlan:
    plans = [
        fixed_lengths(lengths, ranks, size, tokens_per_rank=room, costs=costs)
        for size in fixed_sizes(lengths, ranks, room)
    ]
    return min(plans, key=lambda plan: plan.makespan)


def zigzag_times(lengths: list[int], ranks: int, room: int, costs: Costs) -> list[float]:
    """For each size that holds the longest document; the last one has all ranks."""
    times = []
    for size in fixed_sizes(lengths, ranks, room):
        unit = 2 * size if size > 1 else 1
        padded = [-(-length // unit) * unit for length in lengths]
        plan = fixed_lengths(padded, ranks, size, tokens_per_rank=room + 2, costs=costs)
        busy = [0.0] * ranks
        for turn in plan.turns:
            for member in turn.part.members:
                busy[member] += costs.of(turn.tokens, turn.pairs, size)
        times.append(max(busy))
    return times


def batches(count: int) -> Iterator[Row]:
    """Groups per length beside one size for all, cut in the two ways."""
    for kind in KINDS:
        for ranks in (8, 32):
            for network, costs in COSTS.items():
                ours, balanced, zigzag = [], [], []
                for seed in range(count):
                    lengths = documents(kind, seed, 512)
                    room = max(ROOM, -(-max(lengths) // ranks))
                    ours.append(plan_lengths(lengths, ranks, tokens_per_rank=room, costs=costs))
                    balanced.append(balanced_plan(lengths, ranks, room, costs))
                    zigzag.append(zigzag_times(lengths, ranks, room, costs))
                case = f"{kind}, {ranks} ranks, {network}"
                times = [plan.makespan / 1e9 for plan in ours]
                yield compare(
                    case, "time of a batch", "Gpairs", "fixed, balanced",
                    times, [plan.makespan / 1e9 for plan in balanced],
                )  # fmt: skip
                yield compare(
                    case, "time of a batch", "Gpairs", "fixed, zig-zag",
                    times, [min(found) / 1e9 for found in zigzag],
                )  # fmt: skip
                yield compare(
                    case, "time of a batch", "Gpairs", "all ranks, zig-zag",
                    times, [found[-1] / 1e9 for found in zigzag],
                )  # fmt: skip
                yield compare(
                    case, "idle share of all ranks", "%", "fixed, balanced",
                    [100 * plan.idle for plan in ours], [100 * plan.idle for plan in balanced],
                )  # fmt: skip


def sequences(count: int, ranks: int = 8) -> Iterator[Row]:
    """Balanced shares of packed documents beside contiguous slices and a zig-zag for each."""
    for kind in KINDS:
        pairs, cut, ranges, tokens = [], [], [], []
        zigzag_ranges, zigzag_tokens = [], []
        for seed in range(count):
            lengths, mask = documents(kind, seed, 128), Mask()
            total = sum(lengths)
            held = balance(lengths, ranks, mask)
            edges = [total * rank // ranks for rank in range(ranks + 1)]
            pairs.append(busiest([pairs_of(lengths, own, mask) for own in held]))
            cut.append(busiest([pairs_of(lengths, [edge], mask) for edge in pairwise(edges)]))
            ranges.append(sum(map(len, held)) / ranks)
            tokens.append(max(sum(stop - start for start, stop in own) for own in held))
            padded = [-(-length // (2 * ranks)) * 2 * ranks for length in lengths]
            zigzag_ranges.append(2.0 * len(lengths))
            zigzag_tokens.append(sum(padded) / ranks)
        case = f"{kind}, 128 documents packed"
        yield compare(case, "pairs of the busiest over the mean", "x", "contiguous", pairs, cut)
        yield compare(case, "ranges of a rank", "ranges", "zig-zag each", ranges, zigzag_ranges)
        yield compare(
            case, "tokens of the fullest rank", "tokens", "zig-zag each", tokens, zigzag_tokens
        )


def busiest(pairs: list[int]) -> float:
    return max(pairs) * len(pairs) / sum(pairs)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    yield from sequences(args.batches)
    yield from batches(args.batches)


if __name__ == "__main__":
    main(__doc__, measure, ("--batches", {"type": int, "default": 10, "help": "drawn for a row"}))
