"""Packed documents in balanced shares, beside contiguous slices and a zig-zag for each document.

    python tests/benchmarks/balance.py --json
    python tests/benchmarks/balance.py --batches 3

Nothing is timed: pairs and tokens are counted, so that every machine prints the same. Each batch is
128 documents of long-tailed lengths over 8 ranks. Megatron's zig-zag pads each document to a
multiple of twice the ranks.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from commgrid.context_parallel.balance import Mask, balanced, pairs_of
from tests.benchmarks.report import Row, compare, main

LONGEST = 131_072


def lognormal(draw: random.Random) -> int:
    return int(draw.lognormvariate(7, 1.4))


def zipf(draw: random.Random) -> int:
    return int(256 * draw.paretovariate(1.0))


KINDS: dict[str, Callable[[random.Random], int]] = {"lognormal": lognormal, "zipf": zipf}


def documents(kind: str, seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [min(max(KINDS[kind](draw), 1), LONGEST) for _ in range(count)]


def sequences(count: int, ranks: int = 8) -> Iterator[Row]:
    """Balanced shares of packed documents beside contiguous slices and a zig-zag for each."""
    for kind in KINDS:
        pairs, cut, ranges, tokens = [], [], [], []
        zigzag_ranges, zigzag_tokens = [], []
        for seed in range(count):
            lengths, mask = documents(kind, seed, 128), Mask()
            total = sum(lengths)
            held = balanced(lengths, ranks)
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


if __name__ == "__main__":
    main(__doc__, measure, ("--batches", {"type": int, "default": 10, "help": "drawn for a row"}))
