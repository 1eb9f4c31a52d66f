"""An all-to-all without sizes on a communicator that does not block is one of equal sizes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import commgrid
from commgrid.testing import run_on_ranks
from commgrid.torch_compat import nccl as torch_all_to_all


def exchanged() -> tuple[list[float], list[Any]]:
    grid = commgrid.initialize()
    group = grid.get_group("dp")
    seen: list[Any] = []
    name = next(n for n in torch_all_to_all._METHODS[::-1] if n in vars(dist.ProcessGroup))
    plain = getattr(dist.ProcessGroup, name)

    def watched(group: dist.ProcessGroup, *args: Any, **options: Any) -> Any:
        seen.append((list(args[2]), list(args[3])))
        return plain(group, *args, **options)

    setattr(dist.ProcessGroup, name, watched)
    x, y = torch.arange(4.0) + 10 * grid.rank, torch.empty(4)
    dist.all_to_all_single(y, x, group=group)
    torch_all_to_all.fill_in_sizes(group)
    torch_all_to_all.fill_in_sizes(group)  # once
    again = torch.empty(4)
    dist.all_to_all_single(again, x, group=group)
    assert torch.equal(again, y)
    dist.all_to_all_single(torch.empty(2), torch.empty(2), [1, 1], [1, 1], group=group)
    commgrid.shutdown()
    return y.tolist(), seen


def test_sizes_are_filled_in_on_such_a_group_alone() -> None:
    # Megatron, or its stand-ins for CUDA, change torch and the environment.
    (first, seen), (second, _) = run_on_ranks(
        exchanged, 2, backend=None, launcher="torchrun", check=False
    )
    assert (first, second) == ([0.0, 1.0, 10.0, 11.0], [2.0, 3.0, 12.0, 13.0])
    assert seen == [([], []), ([2, 2], [2, 2]), ([1, 1], [1, 1])]
