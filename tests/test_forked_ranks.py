"""Ranks are forked: what their parent has left behind is none of their business."""

import subprocess
import sys

from tests.examples.curves import ROOT

GARBAGE = """
import gc
import torch, torch.distributed as dist
from tests.ranks import run_on_ranks

def collects():
    return gc.collect() >= 0

if __name__ == "__main__":
    gc.disable()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.new_group([0])
    dist.all_reduce(torch.ones(1), group=group)
    cycle = [group]
    cycle.append(cycle)
    dist.destroy_process_group()
    del group, cycle
    print(run_on_ranks(collects, 2, init=None, timeout=20))
"""


def test_a_rank_does_not_collect_its_parents_process_groups() -> None:
    """Seen as a rank that hung at whatever point its garbage collector ran: it waited for the
    threads of a group that a doctest had made in the parent."""
    command = [sys.executable, "-c", GARBAGE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[True, True]\n", done.stderr
