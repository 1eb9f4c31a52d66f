"""commgrid: the process-group grid of a Megatron-style training job.

A job calls `commgrid.initialize(dp=…, tp=…, pp=…)` once; from then on every communicator
that any form of parallelism needs exists and is found by name.
"""

from __future__ import annotations

import sys

from commgrid.errors import (
    CheckpointError,
    CommGridError,
    GridDestroyedError,
    GridExistsError,
    GridMismatchError,
    GridNotInitializedError,
    GroupSuspendedError,
    NotInGridError,
    NotInGroupError,
    PeerFailedError,
    PeerTimeoutError,
    ShapeError,
    SpecError,
    TransferError,
    UnknownGroupError,
)
from commgrid.on_demand import on_demand
from commgrid.version import VERSION

TYPE_CHECKING = False  # as type checkers know it; typing is slow to load
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

    from commgrid import trace
    from commgrid.call_analysis import verification as verify
    from commgrid.cost_model.cluster import Cluster
    from commgrid.layout.rank_layout import RankLayout
    from commgrid.planning.audited import audit_sizes
    from commgrid.planning.plan import GroupPlan
    from commgrid.planning.spec import GridSpec
    from commgrid.recording.remote import diagnose
    from commgrid.recovery import rebuild, recover
    from commgrid.rendezvous.timeouts import Timeouts
    from commgrid.runtime.grid import HyperCommGrid
    from commgrid.runtime.registry import (
        destroy,
        get_grid,
        get_group,
        get_local_rank,
        get_ranks,
        is_initialized,
        shutdown,
        size,
        use_grid,
    )
    from commgrid.runtime.start import initialize, join

__version__ = VERSION

__all__ = [
    "CheckpointError", "Cluster", "CommGridError", "GridDestroyedError", "GridExistsError",
    "GridMismatchError", "GridNotInitializedError", "GridSpec", "GroupPlan",
    "GroupSuspendedError", "HyperCommGrid", "NotInGridError", "NotInGroupError",
    "PeerFailedError", "PeerTimeoutError", "RankLayout", "ShapeError", "SpecError", "Timeouts",
    "TransferError", "UnknownGroupError", "audit_sizes", "destroy", "diagnose", "get_grid",
    "get_group", "get_local_rank", "get_ranks", "initialize", "is_initialized", "join",
    "rebuild", "recover", "shutdown", "size", "trace", "use_grid", "verify",
]  # fmt: skip

# They load when first asked for: many of them with torch, which planning does not need.
_ON_DEMAND = {
    "commgrid.cost_model.cluster": ("Cluster",),
    "commgrid.layout.rank_layout": ("RankLayout",),
    "commgrid.planning.audited": ("audit_sizes",),
    "commgrid.planning.plan": ("GroupPlan",),
    "commgrid.planning.spec": ("GridSpec",),
    "commgrid.recording.remote": ("diagnose",),
    "commgrid.recovery": ("rebuild", "recover"),
    "commgrid.rendezvous.timeouts": ("Timeouts",),
    "commgrid.runtime.grid": ("HyperCommGrid",),
    "commgrid.runtime.registry": (
        "destroy", "get_grid", "get_group", "get_local_rank", "get_ranks", "is_initialized",
        "shutdown", "size", "use_grid",
    ),
    "commgrid.runtime.start": ("initialize", "join"),
}  # fmt: skip
_MODULES = {"trace": "commgrid.trace", "verify": "commgrid.call_analysis.verification"}

__getattr__, __dir__ = on_demand(globals(), _ON_DEMAND, _MODULES)


class _EarlierPaths:
    """Asks `earlier`, when a module of the package is not found (PEP 451)."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith("commgrid."):
            return None
        from commgrid import earlier  # a program that uses today's names does not load it

        return earlier.find_spec(name)


sys.meta_path.append(_EarlierPaths)
