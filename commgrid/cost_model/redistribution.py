"""The cost of moving a sharded tensor from one placement to another: the conversion table.

On a group of p ranks, for a tensor of T bytes in all:

| from | to | by | bytes sent, all ranks together |
|---|---|---|---|
| `Shard(i)` | `Shard(i)` | nothing | 0 |
| `Shard(i)` | `Shard(j)` | all-to-all | (p−1)/p · T |
| `Shard(i)` | `Replicate` | all-gather | (p−1) · T |
| `Shard(i)` | `Partial` | a rank's own zeros around its part | 0 |
| `Replicate` | anything | a slice, or division among ranks | 0 |
| `Partial` | `Shard(i)` | reduce-scatter | (p−1) · T |
| `Partial` | `Replicate` | all-reduce | 2(p−1) · T |
| `Partial` | `Partial` | nothing | 0 |

Source: Yuan et al., "OneFlow: Redesign the distributed deep learning framework from scratch",
arXiv:2110.15032, table 2 (its B is Replicate, its P is Partial). GSPMD (arXiv:2105.04663) and Alpa
(arXiv:2201.12023, table 2) have the same conversions.
"""

from __future__ import annotations

import math
import re

from commgrid.cost_model.cluster import Cluster
from commgrid.cost_model.collective import bus_factor, collective_time
from commgrid.cost_model.collective_form import Spread
from commgrid.errors import SpecError

_SHARD = re.compile(r"(?:S|Shard)\((?:dim=)?(-?\d+)\)")
_OTHERS = {"R": "Replicate", "B": "Replicate", "P": "Partial"}


def redistribution(before: object, after: object) -> str | None:
    """The collective that takes a tensor from one placement on an axis to another; None: none.

    Args:
        before, after: `Shard(0)`, `Replicate` or `Partial`, as text, short (`S(0)`, `R`, `P`) or as
            torch's own placements.

    Raises:
        SpecError: what is no placement.

    >>> redistribution("Partial", "Shard(0)"), redistribution("Replicate", "Shard(1)")
    ('reduce_scatter', None)
    """
    source, target = _kind(before), _kind(after)
    if source == target or source[0] == "Replicate" or target[0] == "Partial":
        return None
    if source[0] == "Partial":
        return "all_reduce" if target[0] == "Replicate" else "reduce_scatter"
    return "all_gather" if target[0] == "Replicate" else "all_to_all"


def redistribution_bytes(before: object, after: object, size: float, ranks: int) -> float:
    """Bytes that all ranks of a group send together, as in the table.

    Args:
        before, after: placements, as in `redistribution`.
        size: bytes of the whole tensor.
        ranks: of the group.

    >>> redistribution_bytes("Shard(0)", "Shard(1)", 8e6, 4), redistribution_bytes("P", "R", 8e6, 4)
    (6000000.0, 48000000.0)
    """
    collective = redistribution(before, after)
    if collective is None or ranks == 1:
        return 0.0
    return bus_factor(collective, ranks) * _counted(collective, size, ranks) * ranks


def redistribution_time(
    before: object, after: object, size: float, spread: Spread, cluster: Cluster
) -> float:
    """Seconds until a tensor lies in another way on an axis of a grid.

    Args:
        before, after: placements, as in `redistribution`.
        size: bytes of the whole tensor.
        spread: ranks of the axis's group by level: `narrow` of `Cluster.span`.
        cluster: with the latency and bandwidth of each level.

    >>> from commgrid.cost_model.cluster import CLUSTERS
    >>> f"{redistribution_time('S(0)', 'R', 1e9, (8, 1), CLUSTERS['h100']) * 1e3:.2f} ms"
    '1.97 ms'
    """
    collective = redistribution(before, after)
    if collective is None:
        return 0.0
    counted = _counted(collective, size, math.prod(spread))
    return collective_time(collective, counted, spread, cluster)


def _counted(collective: str, size: float, ranks: int) -> float:
    """The size as nccl-tests counts it: an all-to-all's is what one rank sends."""
    return size / ranks if collective == "all_to_all" else size


def _kind(given: object) -> tuple[str, int]:
    """A placement's name, and the dim of a `Shard`."""
    text = str(given).replace(" ", "")
    if found := _SHARD.fullmatch(text):
        return "Shard", int(found[1])
    name = re.sub(r"\(.*\)$", "", text)
    name = _OTHERS.get(name, name)
    if name not in ("Replicate", "Partial"):
        raise SpecError(
            f"placement {given!r}: expected Shard(dim), Replicate or Partial, or S(0), R, P"
        )
    return name, 0
