"""A grid's groups as megatron-core's ProcessGroupCollection.

Code that takes `pg_collection=` needs no parallel state at all.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from commgrid.errors import UnknownGroupError
from commgrid.layout.axis_names import nearest
from commgrid.runtime.grid import HyperCommGrid
from megatron_adapter.errors import MegatronVersionError
from megatron_adapter.installed import SUPPORTED
from megatron_adapter.names import MEGATRON_GROUPS
from megatron_adapter.state import STORE

FIELDS = {group.field: group.state for group in MEGATRON_GROUPS if group.field is not None}
FIELDS["hcp"] = "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS"  # a list
"""Each field of a ProcessGroupCollection, in one release or another, and its variable."""


def process_group_collection(grid: HyperCommGrid, required: Iterable[str] | None = None) -> Any:
    """megatron-core's ProcessGroupCollection of a grid.

    Args:
        grid: alive; every rank of it calls this, for the first time together: what Megatron has
            and the grid has not (embedding groups, say) is created then.
        required: the fields to fill; None: all fields of the releases in `SUPPORTED`.

    Returns:
        A `megatron.core.process_groups_config.ProcessGroupCollection`, whose groups live as long
        as the grid. Fields are None where Megatron's are:
        groups this rank is not in, levels or instances that were not asked for.

    Raises:
        MegatronVersionError: megatron-core is not installed.
        UnknownGroupError: a required field that it, or the adapter, does not have.
        SpecError: Megatron cannot express the grid.
    """
    try:
        module = importlib.import_module("megatron.core.process_groups_config")
    except ImportError as error:
        raise MegatronVersionError(
            f"megatron-core cannot be imported ({error}); install one of {', '.join(SUPPORTED)}"
        ) from error
    ProcessGroupCollection = module.ProcessGroupCollection
    known = {field.name for field in fields(ProcessGroupCollection)} & FIELDS.keys()
    wanted = sorted(known) if required is None else list(required)
    for name in wanted:
        if name not in known:
            raise UnknownGroupError(
                f"a ProcessGroupCollection of a grid has no field {name!r}, expected some of "
                f"{', '.join(sorted(known))}{nearest(name, known)}"
            )
    state = STORE.state_of(grid)
    state.handed_out = True
    return ProcessGroupCollection(**{name: state.values[FIELDS[name]] for name in wanted})
