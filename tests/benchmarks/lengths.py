"""Long-tailed batches over groups per length and over one fixed size; packed sequences in shares.

    python tests/benchmarks/lengths.py --json
    python tests/benchmarks/lengths.py --batches 3

Nothing is timed: pairs and tokens are counted, so that every machine prints the same.

Batches of 512 documents on 8 and 32 ranks with room for 16,384 tokens each (where the longest
document needs more, for its share). Time is in attended pairs: a token's other work is 6 · h pairs
for a model of width h = 4,096. Receiving the keys and values of one token (8 of 32 heads, bf16: 4
KB) lasts as long as 220 pairs at 450 GB/s and 2,000 at 50 GB/s, at 400 TFLOP/s; "free" exchanges
nothing and has attention alone. Peers take one size of groups for all documents, packed as they
come and dealt in turn: "best fixed size" the best one for the batch, "all ranks" the whole. All of
them cut their packed sequences into balanced shares, which the usual ways do not. Rows that end in
"sparse" let a rank receive only keys that its positions attend, in the plan and in its peer.

Packed sequences of 128 documents are balanced over 8 ranks beside two usual ways: contiguous
slices, and Megatron's zig-zag for each document, padded to a multiple of twice the ranks.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from commgrid.context_parallel.balance import Mask, Ranges, balance, pairs_of
from commgrid.context_parallel.length_groups import LengthGroups
from commgrid.context_parallel.lengths import Costs, LengthPlan, fixed_lengths, plan_lengths
from commgrid.viz.sharding_picture import pieces
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


def best_fixed(lengths: list[int], ranks: int, room: int, costs: Costs) -> LengthPlan:
    plans = [
        fixed_lengths(lengths, ranks, size, tokens_per_rank=room, costs=costs)
        for size in LengthGroups(ranks).sizes
        if max(lengths) <= size * room
    ]
    return min(plans, key=lambda plan: plan.makespan)


def batches(count: int) -> Iterator[Row]:
    """Groups per length beside the best fixed size, and beside all ranks for everything."""
    for kind in KINDS:
        for ranks in (8, 32):
            for network, costs in COSTS.items():
                ours, best, whole = [], [], []
                for seed in range(count):
                    lengths = documents(kind, seed, 512)
                    room = max(ROOM, -(-max(lengths) // ranks))
                    fill = {"tokens_per_rank": room, "costs": costs}
                    ours.append(plan_lengths(lengths, ranks, **fill))
                    best.append(best_fixed(lengths, ranks, room, costs))
                    whole.append(fixed_lengths(lengths, ranks, ranks, **fill))
                case = f"{kind}, {ranks} ranks, {network}"
                for peer, theirs in (("best fixed size", best), ("all ranks", whole)):
                    yield compare(
                        case, "time of a batch", "Gpairs", peer,
                        [plan.makespan / 1e9 for plan in ours],
                        [plan.makespan / 1e9 for plan in theirs],
                    )  # fmt: skip
                yield compare(
                    case, "time of a batch, sparse", "Gpairs", "all ranks",
                    [sparse(plan) / 1e9 for plan in ours], [sparse(plan) / 1e9 for plan in whole],
                )  # fmt: skip
                yield compare(
                    case, "idle share of all ranks", "%", "best fixed size",
                    [100 * plan.idle for plan in ours], [100 * plan.idle for plan in best],
                )  # fmt: skip


def sparse(plan: LengthPlan) -> float:
    """A plan's time where a rank receives only keys that its positions attend."""
    free = [0.0] * plan.groups.size
    for turn in plan.turns:
        ranks = len(turn.part.members)
        received = max(missing(turn.lengths, own) for own in plan.ranges(turn)) if ranks > 1 else 0
        time = plan.costs.token * turn.tokens / ranks + max(
            turn.pairs / ranks, plan.costs.exchange * received
        )
        start = max(free[member] for member in turn.part.members)
        for member in turn.part.members:
            free[member] = start + time
    return max(free)


def missing(lengths: Sequence[int], own: Ranges) -> int:
    """How many keys the positions in some ranges attend that are not among them."""
    last = {document: stop for _, stop, document in pieces(lengths, own)}
    ends = list(accumulate(lengths))
    attended = sum(stop - (ends[i] - lengths[i]) for i, stop in last.items())
    return attended - sum(stop - start for start, stop in own)


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
