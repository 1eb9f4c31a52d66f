"""What `commgrid plan` says of the cluster: which level holds each group, and what is slow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from commgrid.cost_model.cluster import Cluster
from commgrid.cost_model.crossing import Crossing, find_crossings, warnings
from commgrid.planning.plan import PlannedCommunicator
from commgrid.planning.spec import GridSpec


def as_lines(
    spec: GridSpec,
    cluster: Cluster,
    found: Mapping[str, Crossing],
    kinds: Iterable[PlannedCommunicator],
) -> list[str]:
    """The cluster, the names that cross its levels, and slow groups."""
    lines = [_head(cluster)]
    told: dict[str, list[str]] = {}
    for communicator in kinds:
        if communicator.size > 1 and found[communicator.name].place:
            names = told.setdefault(found[communicator.name].describe(), [])
            names += [name for name in communicator.names if name not in names]
    lines += [f"  {how}: {', '.join(names)}" for how, names in told.items()]
    if not told:
        lines.append(f"  every group is within a {cluster.levels[0].name}")
    lines += [f"  slow: {line}" for line in warnings(spec, cluster, found)]
    return lines


def _head(cluster: Cluster) -> str:
    """How far apart devices are, and how fast each level is for one of them."""
    if cluster.levels[0].bandwidth is None:  # of `--gpus-per-node` alone
        return f"On nodes of {cluster.per_node} devices:"
    parts = []
    for place, level in enumerate(cluster.levels):
        size = cluster.unit_size(place)
        where = f"within a {level.name} of {size:g}" if math.isfinite(size) else "beyond"
        alone = f"within a {level.name}" if place == 0 and math.isinf(size) else where
        parts.append(f"{level.link.bandwidth / 1e9:g} GB/s {alone}")
    speeds = f"On {cluster.name} a device sends {', '.join(parts)}."
    return f"{speeds}\n  numbers: {cluster.source}" if cluster.source else speeds


def as_json(spec: GridSpec, cluster: Cluster) -> dict[str, Any]:
    """The same for machines."""
    found = find_crossings(spec, cluster)
    names = [level.name for level in cluster.levels]
    return {
        "cluster": cluster.to_dict(),
        "crossings": {
            name: {
                "within": crossing.level.name,
                "spread": dict(zip(names, crossing.spread, strict=True)),
                "at_once": crossing.at_once,
                "gb_per_s": None if crossing.bandwidth is None else crossing.bandwidth / 1e9,
            }
            for name, crossing in found.items()
        },
        "warnings": warnings(spec, cluster, found),
    }
