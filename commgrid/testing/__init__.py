"""Tests on several ranks: a pytest plugin, and the same for scripts.

`@pytest.mark.ranks(4)` runs a test's body on four ranks; `run_on_ranks(function, 4)` runs a
function on them and returns each rank's result. Both start processes of this machine, end all of
them after a timeout, show every rank's traceback, and check that a rank leaves nothing behind.
`same_on_grids` and `finishes` are audits and checks of order as assertions about a function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from commgrid.on_demand import on_demand

if TYPE_CHECKING:
    from commgrid.launching.leftovers import Snapshot
    from commgrid.launching.local_ranks import Outcome, Ranks, RanksFailed, run_on_ranks
    from commgrid.launching.process import free_port
    from commgrid.testing.assertions import GridsDiffer, RanksWait, finishes, grids, same_on_grids

__all__ = [
    "GridsDiffer", "Outcome", "Ranks", "RanksFailed", "RanksWait", "Snapshot", "finishes",
    "free_port", "grids", "run_on_ranks", "same_on_grids",
]  # fmt: skip

_WHERE = {
    "commgrid.launching.leftovers": ("Snapshot",),
    "commgrid.launching.local_ranks": ("Outcome", "Ranks", "RanksFailed", "run_on_ranks"),
    "commgrid.launching.process": ("free_port",),
    "commgrid.testing.assertions": (
        "GridsDiffer", "RanksWait", "finishes", "grids", "same_on_grids",
    ),
}  # fmt: skip

__getattr__, __dir__ = on_demand(globals(), _WHERE)
