"""`commgrid show --sharding`: who holds which positions of packed documents."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

from commgrid.context_parallel.balance import Mask, balance, pairs_of
from commgrid.context_parallel.ranges import count
from commgrid.errors import SpecError
from commgrid.viz.sharding_picture import draw_ranges, draw_sharding

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def add_sharding_options(parser: argparse.ArgumentParser) -> None:
    sharding = parser.add_argument_group("sharding")
    sharding.add_argument(
        "--sharding",
        metavar="LENGTHS",
        help="tokens of packed documents, as 900,90,80 or 512x64 (64 of 512), over --cp N ranks",
    )
    sharding.add_argument(
        "--mask",
        metavar="MASK",
        help="what a position attends: causal (default), full, or a window such as 128",
    )


_MOST_DOCUMENTS = 100_000


class ShownSharding:
    """What `--sharding`, `--cp` and `--mask` describe, balanced.

    Raises:
        SpecError: one of them is missing or no number.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        if args.cp is None or args.cp < 1:
            raise SpecError(f"--sharding {args.sharding}: needs --cp N, the number of ranks")
        self.lengths = _lengths(args.sharding)
        self.mask = _mask(args.mask)
        self.held = balance(self.lengths, args.cp, self.mask)
        self.pairs = [pairs_of(self.lengths, own, self.mask) for own in self.held]

    def as_dict(self) -> dict[str, Any]:
        return {
            "lengths": self.lengths,
            "mask": {"causal": self.mask.causal, "window": self.mask.window},
            "ranks": [
                {
                    "ranges": [list(one) for one in own],
                    "tokens": count(own),
                    "pairs": pairs,
                }
                for own, pairs in zip(self.held, self.pairs, strict=True)
            ],
        }

    def as_text(self) -> str:
        return draw_ranges(self.lengths, self.held, self.pairs)

    def draw(self) -> Figure:
        return draw_sharding(self.lengths, self.held, self.pairs, str(self.mask))


def _lengths(text: str) -> list[int]:
    """`900,90` and `512x64` as lengths."""
    found: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:x(\d+))?", item)
        if match is None:
            raise SpecError(
                f"--sharding {text}: {item!r} is no length; expected tokens such as 900, or 512x64 "
                "for 64 documents of 512, with commas between"
            )
        length, times = match.groups("1")
        if max(len(length), len(times)) > 12 or len(found) + int(times) > _MOST_DOCUMENTS:
            raise SpecError(
                f"--sharding: expected at most {_MOST_DOCUMENTS:,} documents, of fewer than 10^12 "
                "tokens each"
            )
        found += [int(length)] * int(times)
    return found


def _mask(text: str | None) -> Mask:
    if text in (None, "causal", "full"):
        return Mask(causal=text != "full")
    if not text.isdecimal():
        raise SpecError(f"--mask {text}: expected causal, full, or how many keys of a window")
    return Mask(window=int(text))
