"""Walk of a start: functions of ours that `initialize` enters. `pytest -s` prints it."""

from collections import Counter

import torch.distributed as dist

import commgrid
from commgrid.testing import run_on_ranks
from tests.walked import report, walked

MOST = 150


def start() -> int:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    seen: Counter[str] = Counter()
    with walked(seen):
        grid = commgrid.initialize(tp=2, pp=2)
    assert grid.shape["dp"] == 2
    commgrid.shutdown()
    dist.destroy_process_group()
    assert any("_make_group" in name for name in seen)  # communicators are seen
    return report("initialize(tp=2, pp=2) in a fake world of 8 ranks", seen)


def test_a_start_walks_through_few_functions() -> None:
    (count,) = run_on_ranks(start, 1, backend=None)
    assert count <= MOST
