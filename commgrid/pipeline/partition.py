"""Which layers go into which part of the model.

Layers stay in order, so a partition is a few cut points. The best one makes the slowest part as
fast as can be, since every other waits for it, and of those the one whose parts differ least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from commgrid.errors import SpecError


def partition_layers(
    num_layers: int,
    num_parts: int,
    *,
    weights: Sequence[float] | None = None,
    embedding: float = 0.0,
    head: float = 0.0,
) -> tuple[range, ...]:
    """Cuts layers into consecutive parts that take as equally long as they can.

    Args:
        num_layers: how many layers, such as transformer blocks.
        num_parts: stages times chunks.
        weights: how long each layer takes, in any unit; None: 1 each.
        embedding: what the first part does besides, in the same unit.
        head: what the last part does besides, final norm and loss included.

    Returns:
        The layers of each part, at least one each. Where several cuts are as good, earlier parts
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
    """Least largest part, then least sum of squares, by dynamic programming."""
    whole = sum(costs) or 1.0
    ends = [0.0]
    for cost in costs:
        ends.append(ends[-1] + cost / whole)
    # best[stop]: of the cuts of layers 0 … stop - 1, the best one's rating and its last cut points.
    best: dict[int, tuple[tuple[float, float], tuple[int, ...]]] = {0: ((0.0, 0.0), (0,))}
    for part in range(1, num_parts + 1):
        reached = {}
        for stop in range(part, len(costs) - (num_parts - part) + 1):
            options = []
            for start, ((largest, squares), cuts) in best.items():
                if start < stop:
                    load = ends[stop] - ends[start]
                    # Rounded, so that equally good cuts are found equally good.
                    rating = (round(max(largest, load), 9), round(squares + load**2, 9))
                    options.append((rating, (*cuts, stop)))
            reached[stop] = min(options)
        best = reached
    cuts = best[len(costs)][1]
    return tuple(range(start, stop) for start, stop in pairwise(cuts))
