"""How many process groups a process has: what a test compares to find a leak."""

from __future__ import annotations

import torch.distributed.distributed_c10d as c10d


def group_count() -> int:
    """Count this process's groups, WORLD among them."""
    return len(c10d._world.pg_map)
