"""The most memory a call has allocated at once, counted by torch's own profiler."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


def peak_bytes(function: Callable[[], object]) -> int:
    """Bytes of CPU tensors allocated on top of those alive before, at their most.

    What the backends of torch.distributed allocate for themselves is not counted.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    results = profiled.profiler
    assert results is not None
    found = [
        (event.start_ns(), event.nbytes())
        for event in results.kineto_results.events()
        if event.name() == "[memory]"
    ]
    return max(accumulate(size for _, size in sorted(found)), default=0)
