"""Ending of a run: no rank leaves it before all have come, and a rank that is gone has a name."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from commgrid.runtime.named_failures import blamed
from commgrid.torch_compat.messages import start_transfers, wait_for

_DONE = "it should have said that it has finished its part"


def meet(group: dist.ProcessGroup, ranks: Sequence[int], timeout: float) -> None:
    """Every rank tells the first that it is done, and hears from it that all are.

    A rank that is killed with its last numbers on the way is noticed here, at once: its
    connections end, where a store would only see that it does not come.

    Args:
        group: of gloo's.
        ranks: its ranks, in its order.
        timeout: seconds to wait for one.

    Raises:
        GoneError: a rank is gone, or does not answer; names it.
    """
    token, is_first = torch.zeros(1, dtype=torch.uint8), group.rank() == 0
    others = range(1, len(ranks)) if is_first else [0]
    told = [(token, place) for place in others]
    heard = [(token.clone(), place) for place in others]
    for is_send in (False, True) if is_first else (True, False):
        works = start_transfers(
            group, told * is_send, heard * (not is_send),
            lambda error, place: blamed(error, [ranks[place or 0]], _DONE),
        )  # fmt: skip
        for work, place in zip(works, others, strict=True):
            try:
                wait_for(work, timeout)
            except RuntimeError as error:
                raise blamed(error, [ranks[place]], _DONE) from error
