"""Memory, files, threads and the store's keys are flat over grids that come and go, and over steps.

`python -m tests.faults --soak` does so 1,000 times and 10,000 times.
"""

import pytest

from commgrid.testing import run_on_ranks
from tests.faults.soak import grown, soak
from tests.sizes import full

CYCLES, STEPS = (100, 1000) if full() else (20, 100)


@pytest.mark.nightly
def test_nothing_grows() -> None:
    ranks = run_on_ranks(soak, 4, CYCLES, STEPS, backend=None, launcher="torchrun", timeout=300)
    for rank, found in enumerate(ranks):
        for what, seen in found.items():
            assert len(seen) == 6
            assert not grown(seen), (rank, what, grown(seen))
