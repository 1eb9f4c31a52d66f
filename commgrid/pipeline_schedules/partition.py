"""Partition of a model's layers into parts.

Layers stay in order, so a partition is a few cut points. The best partition makes the slowest part
as fast as possible, since every other part waits for it; ties go to the most even parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from commgrid.errors import SpecError


def partition_layers(
    num_layers: int,
    num_parts: int,
    *,
    weights: Sequence[float] | None = None,
    embedding: float = 0.0,
    head: float = 0.0,
) -> tuple[range, ...]:
    """Cuts layers into consecutive parts whose times are as equal as possible.

    Args:
        num_layers: number of layers, such as transformer blocks.
        num_parts: stages times chunks.
        weights: time of each layer, in any unit; None: 1 each.
        embedding: extra time of the first part, in the same unit.
        head: extra time of the last part, with final norm and loss.

    Returns:
        The layers of each part, at least one each. If several cuts are equally good, earlier parts
        have fewer layers, since in a pipeline they hold more microbatches at once.

    Raises:
        SpecError: more parts than layers, or a weight that is no finite number of 0 or more.

    Example:
        >>> partition_layers(10, 4)
        (range(0, 2), range(2, 4), range(4, 7), range(7, 10))
        >>> partition_layers(10, 4, embedding=0.5, head=1.5)
        (range(0, 2), range(2, 5), range(5, 8), range(8, 10))
        >>> partition_layers(4, 2, weights=[3, 1, 1, 1])
        (range(0, 1), range(1, 4))
    """
    if num_parts < 1 or num_layers < num_parts:
        raise SpecError(
            f"{num_layers} layers cannot be cut into {num_parts} parts (stages × chunks) of one "
            f"layer or more; expected 1 to {num_layers} parts"
        )
    costs = list(weights) if weights is not None else [1.0] * num_layers
    if len(costs) != num_layers:
        raise SpecError(
            f"weights has {len(costs)} entries for {num_layers} layers; expected one each"
        )
    for key, value in [
        ("embedding", embedding),
        ("head", head),
        *((f"weights[{i}]", cost) for i, cost in enumerate(costs)),
    ]:
        if not (math.isfinite(value) and value >= 0):
            raise SpecError(f"{key}={value!r}: expected a finite number of 0 or more")
    costs[0] += embedding
    costs[-1] += head
    return _best_cut(costs, num_parts)


def _best_cut(costs: Sequence[float], num_parts: int) -> tuple[range, ...]:
    """Least largest part, and of the cuts that have it the one of least squares."""
    whole = sum(costs) or 1.0
    ends = [0.0, *accumulate(cost / whole for cost in costs)]

    def load(start: int, stop: int) -> float:
        return ends[stop] - ends[start]

    largest, _ = _best(len(costs), num_parts, lambda rest, a, b: max(rest, load(a, b)))

    def squares(rest: float, start: int, stop: int) -> float:
        own = load(start, stop)
        # Rounded, so that equally good cuts are found equally good.
        return round(rest + own**2, 9) if own <= largest + 1e-9 else math.inf

    _, cuts = _best(len(costs), num_parts, squares)
    return tuple(range(start, stop) for start, stop in pairwise(cuts))


def _best(
    num_layers: int, num_parts: int, rate: Callable[[float, int, int], float]
) -> tuple[float, tuple[int, ...]]:
    """The cut of least rating, and of several the one with the earliest cut points.

    Args:
        rate: a cut's rating from that of its other parts and the last one's first and stop layer.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}  # by where the part stops
    for part in range(1, num_parts + 1):
        best = {
            stop: min(
                (rate(rating, start, stop), (*cuts, stop))
                for start, (rating, cuts) in best.items() if start < stop
            )
            for stop in range(part, num_layers - (num_parts - part) + 1)
        }  # fmt: skip
    return best[num_layers]
