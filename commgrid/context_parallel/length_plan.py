"""Who attends which of a batch's documents on which group in which order, as a value.

All ranks take their turns out of one list, so two groups that share ranks are met in the same order
by all of them, and none waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from commgrid.context_parallel.balance import Mask, Ranges, balance
from commgrid.context_parallel.length_groups import LengthGroups, Part
from commgrid.context_parallel.volume import rows_to_exchange
from commgrid.errors import SpecError


@dataclass(frozen=True)
class Costs:
    """What a rank's time goes into, in attended (query, key) pairs.

    A turn of T tokens and W pairs on g ranks takes

        token · T / g  +  max(W / g, exchange · R)

    since keys and values travel while attention computes. R is how many keys that it attends the
    rank with most of them has to receive: T · (g - 1) / g of one document, less of several.

    Args:
        token: what all but attention costs for a token. A block of width h with an MLP of 4·h does
            24·h² multiplications and additions for a token and 4·h for a pair, which makes 6·h.
        exchange: how many pairs a rank attends while it receives the keys and values of one token.

    Raises:
        SpecError: a cost below 0.
    """

    token: float = 0.0
    exchange: float = 0.0

    def __post_init__(self) -> None:
        for key in ("token", "exchange"):
            if not getattr(self, key) >= 0:
                raise SpecError(f"{key}={getattr(self, key)}: expected pairs, 0 or more")

    def of(self, tokens: int, pairs: int, ranks: int, received: float | None = None) -> float:
        """The time of one turn on so many ranks; `received` is R, None: as of one document."""
        received = tokens * (ranks - 1) / ranks if received is None else received
        return self.token * tokens / ranks + max(pairs / ranks, self.exchange * received)


@dataclass(frozen=True)
class Turn:
    """Documents that the ranks of one part attend together, packed one after the other.

    Args:
        part: the ranks.
        documents: their numbers in the batch, ascending.
        lengths: their tokens.
        pairs: that all their positions attend.
    """

    part: Part
    documents: tuple[int, ...]
    lengths: tuple[int, ...]
    pairs: int

    @property
    def group(self) -> str:
        """The name of the group that talks."""
        return self.part.name

    @cached_property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def tokens_per_rank(self) -> int:
        """Of the fullest rank."""
        return -(-self.tokens // len(self.part.members))


@dataclass(frozen=True)
class LengthPlan:
    """Who does what in which order with the documents of one batch.

    Args:
        groups: the group and its parts.
        turns: all of them; a rank takes those of its parts, in this order.
        mask: what a position attends.
        costs: what the times are made of.
        whole: the time it takes where every document is cut over the whole group.
    """

    groups: LengthGroups
    turns: tuple[Turn, ...]
    mask: Mask
    costs: Costs
    whole: float

    def of(self, position: int) -> tuple[Turn, ...]:
        """The turns of a rank, in its order.

        Args:
            position: of the rank in the group that is parted.
        """
        if not 0 <= position < self.groups.size:
            raise SpecError(
                f"position {position} is outside {self.groups.of!r} of size {self.groups.size}"
            )
        return tuple(turn for turn in self.turns if position in turn.part.members)

    def ranges(self, turn: Turn) -> tuple[Ranges, ...]:
        """For each member of a turn's part, the positions of its packed documents that it holds."""
        return balance(turn.lengths, len(turn.part.members), self.mask, slack=0)

    def time(self, turn: Turn) -> float:
        """How long a turn keeps its ranks, in pairs."""
        return time_of(turn, self.mask, self.costs)

    def received(self, turn: Turn) -> int:
        """How many keys that it attends each rank of a turn has to receive at most."""
        return _received(turn.lengths, len(turn.part.members), self.mask)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For each rank, how long it works, in pairs."""
        found = [0.0] * self.groups.size
        for turn in self.turns:
            time = self.time(turn)
            for member in turn.part.members:
                found[member] += time
        return tuple(found)

    @cached_property
    def makespan(self) -> float:
        """When the last rank is done; a turn starts when all of its ranks are free."""
        return end_of(self.turns, self.groups.size, self.time)

    @property
    def idle(self) -> float:
        """What share of all ranks' time until the last is done is spent waiting."""
        return max(1 - sum(self.busy) / (self.groups.size * self.makespan), 0.0)

    @property
    def gain(self) -> float:
        """How many times as fast as with every document cut over the whole group."""
        return self.whole / self.makespan

    @cached_property
    def exchanged(self) -> int:
        """The keys that ranks have to receive, of the rank with most of them in each turn."""
        return sum(self.received(turn) * len(turn.part.members) for turn in self.turns)

    @property
    def tokens_per_rank(self) -> int:
        """What memory has to hold: the tokens of one rank in its largest turn."""
        return max(turn.tokens_per_rank for turn in self.turns)

    def __str__(self) -> str:
        """A table: a line for each group, with what it is given, and what it comes to.

        >>> from commgrid.context_parallel.lengths import plan_lengths
        >>> costs = Costs(token=600, exchange=300)
        >>> print(plan_lengths([900, 90, 80, 400, 70, 60], 4, tokens_per_rank=256, costs=costs))
        group      turns  documents  tokens   pairs
        cp[0-3]        1          1     900  405450
        cp_2[0-1]      1          1     400   80200
        cp_1[2]        1          2     150    5925
        cp_1[3]        1          2     150    5725
        idle 8.1 %, 1.10 times as fast as every document over all of 'cp' (4 ranks)
        """
        rows: list[tuple[str, ...]] = [("group", "turns", "documents", "tokens", "pairs")]
        for part in dict.fromkeys(turn.part for turn in self.turns):
            own = [turn for turn in self.turns if turn.part == part]
            counts = (
                len(own),
                sum(len(turn.documents) for turn in own),
                sum(turn.tokens for turn in own),
                sum(turn.pairs for turn in own),
            )
            rows.append((str(part), *map(str, counts)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if place == 0 else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        lines.append(
            f"idle {100 * self.idle:.1f} %, {self.gain:.2f} times as fast as every document over "
            f"all of {self.groups.of!r} ({self.groups.size} ranks)"
        )
        return "\n".join(lines)


def end_of(turns: Iterable[Turn], ranks: int, time: Callable[[Turn], float]) -> float:
    """When the last rank is done with turns that need all of their ranks at once."""
    free = [0.0] * ranks
    for turn in turns:
        end = max(free[member] for member in turn.part.members) + time(turn)
        for member in turn.part.members:
            free[member] = end
    return max(free)


def time_of(turn: Turn, mask: Mask, costs: Costs) -> float:
    """How long a turn keeps its ranks, in pairs."""
    ranks = len(turn.part.members)
    talks = costs.exchange and ranks > 1
    received = _received(turn.lengths, ranks, mask) if talks else 0
    return costs.of(turn.tokens, turn.pairs, ranks, received)


@lru_cache(maxsize=4096)
def _received(lengths: tuple[int, ...], ranks: int, mask: Mask) -> int:
    """How many keys the rank with most of them receives, with documents balanced over ranks."""
    if ranks == 1:
        return 0
    begins = (0, *accumulate(lengths))
    held = balance(lengths, ranks, mask, slack=0)
    return max(rows_to_exchange((own,), begins, mask) for own in held)
