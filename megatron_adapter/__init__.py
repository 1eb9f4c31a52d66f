"""Megatron-core on a commgrid grid: its own names for the grid's groups, for unmodified code."""

from megatron_adapter.collection import process_group_collection
from megatron_adapter.errors import (
    AmbiguousGridError,
    MegatronSizeError,
    MegatronStateError,
    MegatronVersionError,
)
from megatron_adapter.hyper_comm_grid import HyperCommGrid, MegatronHyperCommGrid
from megatron_adapter.installation import install, uninstall
from megatron_adapter.installed import SUPPORTED
from megatron_adapter.names import MEGATRON_GROUPS, MegatronGroup
from megatron_adapter.parallel_state import destroy_model_parallel, initialize_model_parallel
from megatron_adapter.scan import scan
from megatron_adapter.spec import MegatronSizes
from megatron_adapter.state import active

__all__ = [
    "MEGATRON_GROUPS",
    "SUPPORTED",
    "AmbiguousGridError",
    "HyperCommGrid",
    "MegatronGroup",
    "MegatronHyperCommGrid",
    "MegatronSizeError",
    "MegatronSizes",
    "MegatronStateError",
    "MegatronVersionError",
    "active",
    "destroy_model_parallel",
    "initialize_model_parallel",
    "install",
    "process_group_collection",
    "scan",
    "uninstall",
]
