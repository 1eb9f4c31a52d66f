"""The most memory a call has allocated at once, as torch itself counts it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

_M_MMAP_THRESHOLD = -3  # of glibc's mallopt: larger blocks come from the kernel, each alone


def peak_bytes(function: Callable[[], object]) -> int:
    """Bytes of tensors allocated on top of those alive before, at their most.

    On the CPU. What the backends of torch.distributed allocate for themselves is not counted.
    """
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiled:
        function()
    results = profiled.profiler
    assert results is not None
    found = [
        (event.start_ns(), event.nbytes())
        for event in results.kineto_results.events()
        if event.name() == "[memory]"
    ]
    return max(accumulate(size for _, size in sorted(found)), default=0)


def peak_in_use(function: Callable[[], object]) -> int:
    """Bytes this process had in use on top of those before, at their most.

    On the GPU, as torch's allocator counts them; else as the kernel does, so that what gloo
    allocates for itself counts as well (to some 0.1 MiB). From then on the allocator gives every
    freed block back to the kernel at once, which takes time: measure times first.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - before
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 2**16)
    libc.malloc_trim(0)  # what is free already would be taken again without being counted
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here again
    before = _status("VmRSS")
    function()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024
