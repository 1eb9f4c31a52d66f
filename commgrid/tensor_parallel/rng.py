"""Random numbers under tensor parallelism: equal where activations are equal, else different.

Every rank of a tensor-parallel group has the same torch random state, so dropout on a
replicated activation drops the same elements. Inside `sharded_rng` the state is another one on
each rank, drawn from the common state: nothing is kept between uses, and so
`torch.utils.checkpoint`, which restores torch's own state before it recomputes, gives the same
numbers again without knowing of this module. (Megatron-core keeps a second state in a tracker,
and needs a checkpoint function of its own.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from commgrid.collectives import Group
from commgrid.collectives.group_ref import GroupRef
from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.registry import get_grid
from commgrid.tensor_parallel.init import other_random_state, seed_of


def set_random_seed(
    seed: int, *, replicated: tuple[str, ...] = ("tp",), grid: HyperCommGrid | None = None
) -> None:
    """Seeds torch alike on ranks that differ only along the `replicated` axes.

    Args:
        seed: the job's, the same on every rank.
        replicated: the axes along which activations are equal.
        grid: None: the default grid.
    """
    grid = grid or get_grid()
    dense = grid.spec.regions[0].axes
    where = {axis: i for axis, i in grid.coordinate.items() if axis in dense}
    other = [f"{axis}={i}" for axis, i in sorted(where.items()) if axis not in replicated]
    torch.manual_seed(seed_of(f"{seed}/{'/'.join(other)}"))


@contextmanager
def sharded_rng(group: Group = "tp", *, grid: HyperCommGrid | None = None) -> Iterator[None]:
    """Let torch draw different numbers on each rank of the group, for the block.

    Outside, torch's CPU state advances by one number, the same on every rank.

    Args:
        group: the ranks among which activations are sharded.
        grid: where to look the group's name up; None: the default grid.

    Example:
        >>> import commgrid, torch
        >>> grid = commgrid.initialize()
        >>> set_random_seed(1)
        >>> with sharded_rng("tp"):
        ...     dropped = torch.nn.functional.dropout(torch.ones(8), 0.5)
        >>> commgrid.shutdown()
    """
    rank = group.rank if isinstance(group, GroupRef) else GroupRef(group, grid).rank
    common = int(torch.randint(2**62, (), device="cpu"))
    with other_random_state(seed_of(f"{common}/{rank}")):
        yield
