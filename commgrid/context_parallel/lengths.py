"""Which of a batch's documents go to all ranks of a group, to a part of it, or to one rank.

A long document needs many ranks, for its memory and its work; a short one on many ranks costs more
talk than it saves work. So each is given to as small a part of the group as holds it and does not
make the others wait. All ranks take their turns out of one list, the largest parts first.

    turn                      rank 0   1   2   3
    cp      document 3             ████████████████
    cp_2    documents 0 | 5        ████████ ████████
    cp_1    documents 1|2|4|6      ███ ████ ████ ███
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from commgrid.context_parallel.balance import Mask, check_lengths
from commgrid.context_parallel.length_groups import LengthGroups, Part
from commgrid.context_parallel.length_plan import Costs, LengthPlan, Turn, end_of, time_of
from commgrid.errors import SpecError

_TRIES = 16
"""How many thresholds between a long document and a short one are tried, each √½ of the last."""

_LOOKED_AT = 3
"""Of how many thresholds' plans it is counted what they send, which takes the most time."""

_AS_GOOD = 1.005
"""Plans that take no more than so many times the best one's time are as good as it is."""


def plan_lengths(
    lengths: Iterable[int],
    groups: LengthGroups | int,
    *,
    tokens_per_rank: int,
    causal: bool = True,
    window: int | None = None,
    costs: Costs | None = None,
) -> LengthPlan:
    """Gives each document of a batch to a part of a group, so that all ranks end about together.

    A document goes to the smallest part that holds it and takes no longer than a threshold; the
    longest first, each to the part that is done first. Of some thresholds the one is taken whose
    last rank is done first; of those as good, within 0.5 %, the one that talks least. Those of
    `fixed_lengths` are tried, too, so none of them is faster. Every rank finds the same plan from
    the same arguments.

    Args:
        lengths: tokens of each document, 1 or more.
        groups: the group and its parts; an int is the size of `cp`, parted by its divisors.
        tokens_per_rank: how many tokens a rank has memory for at once.
        causal, window: see `Mask`.
        costs: what a rank's time goes into; None: attended pairs alone.

    Raises:
        SpecError: a document that the whole group cannot hold, or what `balanced` refuses.
    """
    task = _Task.of(lengths, groups, tokens_per_rank, Mask(causal, window), costs or Costs())
    share = sum(task.costs.of(*each, 1) for each in task.sums) / task.groups.size
    thresholds = [share * 2 ** (1 - k / 2) for k in range(_TRIES)]
    turns = [task.fill(sizes) for sizes in dict.fromkeys(task.sizes(one) for one in thresholds)]
    turns = sorted(turns, key=task.bound)[:_LOOKED_AT]
    turns += [task.dealt(size) for size in task.groups.sizes if task.has_room(size)]
    plans = [task.plan(found) for found in turns]
    enough = _AS_GOOD * min(plan.makespan for plan in plans)
    near = [plan for plan in plans if plan.makespan <= enough]
    return min(near, key=lambda plan: (plan.exchanged, len(plan.turns), plan.makespan))


def fixed_lengths(
    lengths: Iterable[int],
    groups: LengthGroups | int,
    size: int,
    *,
    tokens_per_rank: int,
    causal: bool = True,
    window: int | None = None,
    costs: Costs | None = None,
) -> LengthPlan:
    """What a loader does that knows no lengths: every document over parts of one size.

    Documents are packed as they come, until the memory of a part is full; the packed sequences are
    dealt to the parts in turn.

    Args:
        size: of the parts; one of the groups' sizes.
        lengths, groups, tokens_per_rank, causal, window, costs: as for `plan_lengths`.

    Raises:
        SpecError: a document that a part of this size cannot hold.
    """
    task = _Task.of(lengths, groups, tokens_per_rank, Mask(causal, window), costs or Costs())
    return task.plan(task.dealt(size))


@dataclass(frozen=True)
class _Task:
    """What is to be planned."""

    sums: list[tuple[int, int]]  # tokens and pairs of each document
    groups: LengthGroups
    limit: int
    mask: Mask
    costs: Costs

    @classmethod
    def of(
        cls,
        lengths: Iterable[int],
        groups: LengthGroups | int,
        limit: int,
        mask: Mask,
        costs: Costs,
    ) -> _Task:
        sizes, limit = check_lengths(lengths), operator.index(limit)
        groups = groups if isinstance(groups, LengthGroups) else LengthGroups(groups)
        if limit < 1:
            raise SpecError(f"tokens_per_rank={limit}: expected 1 token or more")
        task = cls([(n, mask.pairs(n, n)) for n in sizes], groups, limit, mask, costs)
        task.check_room(groups.size)
        return task

    def has_room(self, size: int) -> bool:
        return max(self.lengths) <= size * self.limit

    def check_room(self, size: int) -> None:
        """Raises for the longest document if it does not fit into a part."""
        if self.has_room(size):
            return
        longest = max(self.lengths)
        raise SpecError(
            f"document {self.lengths.index(longest)} has {longest} tokens, more than the "
            f"{size} ranks of a part hold at tokens_per_rank={self.limit}; give "
            f"{-(-longest // size)} or more, or more ranks"
        )

    @cached_property
    def lengths(self) -> list[int]:
        return [tokens for tokens, _ in self.sums]

    @cached_property
    def choices(self) -> list[list[tuple[float, int]]]:
        """For each document, time and size of the parts that hold it, the smallest part first."""
        return [
            [
                (self.costs.of(tokens, pairs, size), size)
                for size in self.groups.sizes
                if tokens <= size * self.limit
            ]
            for tokens, pairs in self.sums
        ]

    def sizes(self, threshold: float) -> tuple[int, ...]:
        """For each document the size of its part: the first that is fast enough, or the fastest."""
        return tuple(
            next((size for time, size in own if time <= threshold), None) or min(own)[1]
            for own in self.choices
        )

    def fill(self, sizes: Sequence[int]) -> list[Turn]:
        """Documents on parts of given sizes, the largest parts and longest documents first."""
        free = [0.0] * self.groups.size
        turns: list[Turn] = []
        for size in self.groups.sizes[::-1]:
            parts = self.groups.parts(size)
            own = [document for document, wanted in enumerate(sizes) if wanted == size]
            own.sort(key=lambda document: (-self.sums[document][1], document))
            given, done = self._longest_first(own, parts, free)
            for part, documents, end in zip(parts, given, done, strict=True):
                turns += self._packed(part, documents)
                for member in part.members if documents else ():
                    free[member] = end
        return turns

    def _longest_first(
        self, documents: Sequence[int], parts: Sequence[Part], free: Sequence[float]
    ) -> tuple[list[list[int]], list[float]]:
        """Each document to the part that is done first; what each has then, and when it is done."""
        size = len(parts[0].members)
        start = [max(free[member] for member in part.members) for part in parts]
        done = list(start)
        tokens, pairs = [0] * len(parts), [0] * len(parts)
        given: list[list[int]] = [[] for _ in parts]
        waiting = [(begin, i) for i, begin in enumerate(start)]
        heapq.heapify(waiting)
        for document in documents:
            _, i = waiting[0]
            tokens[i] += self.sums[document][0]
            pairs[i] += self.sums[document][1]
            given[i].append(document)
            done[i] = start[i] + self.costs.of(tokens[i], pairs[i], size)
            heapq.heapreplace(waiting, (done[i], i))
        return given, done

    def _packed(self, part: Part, documents: Iterable[int]) -> list[Turn]:
        """A part's documents in as few turns as its memory allows: each where there is room."""
        room = len(part.members) * self.limit
        turns: list[list[int]] = []
        left: list[int] = []
        for document in documents:
            length = self.lengths[document]
            at = next((i for i, rest in enumerate(left) if rest >= length), len(turns))
            if at == len(turns):
                turns.append([])
                left.append(room)
            turns[at].append(document)
            left[at] -= length
        return [self.turn(part, sorted(turn)) for turn in turns]

    def turn(self, part: Part, documents: Sequence[int]) -> Turn:
        return Turn(
            part,
            tuple(documents),
            tuple(self.lengths[document] for document in documents),
            sum(self.sums[document][1] for document in documents),
        )

    def dealt(self, size: int) -> list[Turn]:
        """Documents packed as they come, the packs dealt to the parts of one size in turn."""
        self.check_room(size)
        parts, packs = self.groups.parts(size), [[0]]
        left = size * self.limit - self.lengths[0]
        for document, length in enumerate(self.lengths[1:], 1):
            if length > left:
                packs.append([])
                left = size * self.limit
            packs[-1].append(document)
            left -= length
        return [self.turn(parts[i % len(parts)], pack) for i, pack in enumerate(packs)]

    @cached_property
    def whole(self) -> float:
        """The time of every document over the whole group."""
        return sum(time_of(turn, self.mask, self.costs) for turn in self.dealt(self.groups.size))

    def bound(self, turns: Iterable[Turn]) -> float:
        """When the last rank would be done if all ranks received all keys of a turn."""

        def time(turn: Turn) -> float:
            return self.costs.of(turn.tokens, turn.pairs, len(turn.part.members))

        return end_of(turns, self.groups.size, time)

    def plan(self, turns: Iterable[Turn]) -> LengthPlan:
        return LengthPlan(self.groups, tuple(turns), self.mask, self.costs, self.whole)
