"""The zoo: grids by name, with the axes, order and group names that other systems give them.

A preset is the mapping that a YAML file holds, with one size open, so that it fits any number of
ranks; sizes are laid over it, and it prints as YAML to start one's own from.

    commgrid.initialize(preset="hsdp", dp_shard=8)
    commgrid plan --preset megatron --tp 8 --pp 4 --ep 8 --world-size 1024
    commgrid presets hsdp > grid.yaml
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from commgrid.errors import SpecError
from commgrid.layout.axis_names import nearest
from commgrid.planning.yaml import Table, changed


@dataclass(frozen=True)
class Preset:
    """A grid that others use.

    Args:
        name: what it is called.
        summary: what it is for, in a line.
        source: whose order and names these are, and where they say so.
        config: as a YAML file holds it, one size open.
        drops_ones: the axes that have groups even at size 1; others of size 1 have none, and no
            combination has, as in the system. None: all have.
    """

    name: str
    summary: str
    source: str
    config: Mapping[str, Any]
    drops_ones: tuple[str, ...] | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that sizes may be given for, of all regions."""
        found = list(self.config["axes"])
        for region in self.config.get("regions", {}).values():
            found += [name for name in region["axes"] if name not in found]
        return tuple(found)

    def with_sizes(
        self, sizes: Mapping[str, Any], changes: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The mapping for `GridSpec.from_dict`, some of its sizes others.

        Args:
            sizes: by axis.
            changes: other values by key, as `{"axes.tp": 2}`.

        Raises:
            SpecError: a size of an axis that it does not have.

        Example:
            >>> PRESETS["hsdp"].with_sizes({"dp_shard": 4})["axes"]
            {'dp_shard': 4, 'dp_replicate': -1}
        """
        made: dict[str, Any] = copy.deepcopy(dict(self.config))
        regions = [made, *made.get("regions", {}).values()]
        for name, size in sizes.items():
            # An axis of two regions is written in the first, to which the other refers.
            region = next((one for one in regions if name in one["axes"]), None)
            if region is None:
                raise SpecError(
                    f"{name}={size}: preset {self.name!r} has no such axis, but "
                    f"{', '.join(self.axes)}{nearest(name, self.axes)}; for further ones start "
                    f"from its YAML: commgrid presets {self.name}"
                )
            region["axes"][name] = size
        placed: dict[str, Any] = {}
        said = {self._placed(key): key for key in (f"axes.{axis}" for axis in sizes)}
        for key, value in (changes or {}).items():
            at = self._placed(key)
            for other, spelled in said.items():
                if _overlap(at, other):
                    raise SpecError(f"{key}={value!r} beside {spelled}: give one of them")
            placed[at], said[at] = value, key
        made = changed(made, placed)
        dense: Any = made["axes"]
        rows: Any = made.get("groups")
        if not isinstance(dense, Mapping):
            return made  # which is refused where it is read
        axes = {axis for region in regions for axis in region["axes"]} | dense.keys()
        if isinstance(rows, Mapping):  # a group gives way to an axis of its name
            made["groups"] = {name: row for name, row in rows.items() if name not in axes}
        if self.drops_ones is not None and "create" not in (changes or {}):
            made["create"] = [
                name for name, n in dense.items() if n != 1 or name in self.drops_ones
            ]
        return made

    def _placed(self, key: str) -> str:
        """The key of a size in the region that has the axis, as `axes.ep` is the experts'."""
        axis = key.removeprefix("axes.")
        for name, region in self.config.get("regions", {}).items():
            if axis != key and axis in region["axes"] and axis not in self.config["axes"]:
                return f"regions.{name}.{key}"
        return key


def _overlap(one: str, other: str) -> bool:
    """Whether two keys are the same, or one is inside the other."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _preset(name: str, row: Mapping[str, Any]) -> Preset:
    drops_ones = tuple(row["drops_ones"]) if "drops_ones" in row else None
    config = MappingProxyType(row["spec"])
    return Preset(name, row["summary"], row["source"], config, drops_ones)


PRESETS = Table("preset=", Path(__file__).with_name("presets.yaml"), _preset)
"""All of them, by name."""
