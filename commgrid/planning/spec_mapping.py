"""The mapping of a grid's YAML file, read into the fields of a spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from commgrid.errors import SpecError
from commgrid.layout.ranks import as_ranks
from commgrid.planning.group_row import GroupEntry
from commgrid.planning.region import AXES, dense_from, expert_region, region_from, without_experts
from commgrid.planning.yaml_keys import DEFAULT_ORDER, OPTIONS, parse_within, refuse_unknown

_OF_REGIONS = ("axes", "order", "regions")


def _names(given: object) -> object:
    return tuple(given) if isinstance(given, list | tuple) else given


def _rows(given: object) -> tuple[GroupEntry, ...]:
    if not isinstance(given, Mapping):
        raise SpecError(f"groups={given!r}: expected a mapping of group names")
    return tuple(GroupEntry.parse(name, row) for name, row in given.items())


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "create": _names, "connect": _names, "groups": _rows, "ranks": as_ranks,
    "within": parse_within,
}  # fmt: skip
"""By option, how a given value becomes the spec's field."""


def read_mapping(config: Mapping[str, Any], *, arguments: bool = False) -> dict[str, Any]:
    """Return the fields of the spec that a mapping describes, of a file or of arguments.

    Args:
        config: some of `OPTIONS`; in a file null is the default of any.
        arguments: whether it holds arguments; messages then name `tp` instead of `axes.tp`, and
            None is refused where it is no default.

    Raises:
        SpecError: an unknown or missing key, or a value that does not fit.
    """
    if not isinstance(config, Mapping):
        raise SpecError(f"config: expected a mapping, got {type(config).__name__}")
    hints = {
        axis: f"; sizes go under axes, as axes: {{{axis}: {config[axis]}}}"
        for axis in AXES
        if axis in config
    }
    refuse_unknown("", config, OPTIONS, hints)
    if "axes" not in config:
        raise SpecError("axes: missing; expected a mapping of axis names to sizes")
    given = {} if config.get("regions") is None else config["regions"]
    if not isinstance(given, Mapping):
        raise SpecError(f"regions={given!r}: expected a mapping of region names")
    prefix = "" if arguments else "axes."
    axes, experts = without_experts(config["axes"], given, prefix)
    order = config.get("order")
    regions = [dense_from(axes, order, prefix)]
    if experts is not None:
        placed = DEFAULT_ORDER if order is None else str(order)
        regions.append(expert_region(regions[0], placed.split("-"), *experts, prefix))
    for name, entry in given.items():
        regions.append(region_from(name, entry, regions[0].axes))
    read = {
        key: _READERS[key](value) if key in _READERS else value
        for key, value in config.items()
        if key not in _OF_REGIONS
        and (value is not None or (arguments and OPTIONS[key].default is not None))
    }
    return {"regions": tuple(regions), **read}
