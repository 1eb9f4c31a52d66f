"""Clusters: devices in nodes, nodes under switches, and the speed of each level.

A cluster is a few numbers. Bandwidth is that of one device in one direction while all devices send,
as training does: 8 GPUs of a node that share 8 adapters of 400 Gb/s have 50 GB/s each.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from commgrid.cost_model.collective_form import Fit, Link, Span
from commgrid.errors import SpecError
from commgrid.layout.axis_names import nearest
from commgrid.layout.ranks import highest_rank, whole_number
from commgrid.planning.spec import GridSpec
from commgrid.planning.yaml import Table, from_file
from commgrid.planning.yaml_keys import above_zero, check_keys, flag, named

Hosts = Mapping[int, int] | Sequence[int]
"""By rank, the number of the node that it runs on."""


@dataclass(frozen=True)
class Device:
    """An accelerator.

    Args:
        name: as its maker calls it.
        flops: dense 16-bit floating-point operations a second, as its maker states them.
        memory: bytes.
        memory_bandwidth: bytes a second.
        fp8_flops: as `flops`, in 8 bits; None: it has none, or not known.
    """

    name: str
    flops: float
    memory: float
    memory_bandwidth: float
    fp8_flops: float | None = None


@dataclass(frozen=True)
class Level:
    """Units of one size, and the links within one of them.

    Args:
        name: of a unit, such as `node`.
        size: how many units of the level below it holds, of the lowest how many devices; None, of
            the highest alone: as many as there are.
        bandwidth: bytes a second that a device sends to others in its unit while all send; None:
            not known.
        latency: seconds until the first byte of a message is there; None: not known.
        measured: whether bandwidth and latency were, so that nothing is deducted from them.
    """

    name: str
    size: int | None
    bandwidth: float | None = None
    latency: float | None = None
    measured: bool = False

    @property
    def link(self) -> Link:
        """Latency and bandwidth.

        Raises:
            SpecError: they are not known.
        """
        if self.latency is None or self.bandwidth is None:
            raise SpecError(
                f"level {self.name!r}: latency and bandwidth are not known; take a cluster that "
                "has them, such as h100"
            )
        return Link(self.latency, self.bandwidth)


@dataclass(frozen=True)
class Cluster:
    """Devices, and the levels of links between them.

    Rank r runs on device r: ranks 0 to 7 on the first node of 8. Where they run otherwise, the
    hosts of the ranks say so (`spread`).

    Args:
        name: what it is called.
        device: what each rank has; None: not known.
        levels: the lowest first, most often nodes.
        source: where the numbers are from.
        fits: of collectives that were measured on a level; `fit_cluster.py` writes them.

    Example:
        >>> cluster = CLUSTERS["h100"]
        >>> [(level.name, level.size, level.bandwidth / 1e9) for level in cluster.levels]
        [('node', 8, 450.0), ('cluster', None, 50.0)]
        >>> cluster.spread(range(16)), cluster.spread(range(0, 256, 8))
        ((8, 2), (1, 32))
    """

    name: str
    device: Device | None
    levels: tuple[Level, ...]
    source: str
    fits: tuple[Fit, ...] = ()

    @property
    def accelerator(self) -> Device:
        """The device, where it is known.

        Raises:
            SpecError: it is not.
        """
        if self.device is None:
            raise SpecError(
                f"cluster {self.name!r}: its device is not known; take a cluster that has one, "
                "such as h100"
            )
        return self.device

    @property
    def node_level(self) -> int:
        """The place of the level `node`; of the lowest, if none is called so."""
        names = [level.name for level in self.levels]
        return names.index("node") if "node" in names else 0

    @property
    def per_node(self) -> int:
        """Devices of a node; 1 where the level has no size."""
        size = self.unit_size(self.node_level)
        return 1 if math.isinf(size) else int(size)

    def node(self, rank: int) -> int:
        """The number of the node that a rank is on."""
        return self.unit(self.node_level, rank)

    def unit_size(self, level: int) -> float:
        """Devices of a unit of a level; infinite for a level without a size."""
        return math.prod(each.size or math.inf for each in self.levels[: level + 1])

    def find_level(self, name: str) -> int:
        """The place of a level, by its name.

        Raises:
            SpecError: there is none.
        """
        names = [level.name for level in self.levels]
        if name not in names:
            raise SpecError(
                f"level {name!r}: cluster {self.name!r} has {', '.join(names)}"
                f"{nearest(str(name), names)}"
            )
        return names.index(name)

    def fabric(self, level: int) -> int:
        """The place of the highest level up to which links are those of this one, as of the trays
        of an NVLink rack.

        >>> CLUSTERS["gb200"].fabric(0), CLUSTERS["h100"].fabric(0)
        (1, 0)
        """
        links = [(each.latency, each.bandwidth) for each in self.levels]
        while level + 1 < len(links) and links[level + 1] == links[level] != (None, None):
            level += 1
        return level

    def unit(self, level: int, rank: int) -> int:
        """The number of the unit of a level that a rank is in."""
        size = self.unit_size(level)
        return 0 if math.isinf(size) else rank // int(size)

    def spread(self, ranks: Iterable[int], hosts: Hosts | None = None) -> tuple[int, ...]:
        """Count a group's ranks by level: the most in a node, then the most nodes in a unit of the
        next level, and so on.

        Args:
            ranks: of the group.
            hosts: by rank, the number of the node that it runs on; None: rank // nodes' size.

        Returns:
            A number for each level; their product is the group's size where it lies evenly.
        """
        return self.span(ranks, hosts).spread

    def span(self, ranks: Iterable[int], hosts: Hosts | None = None) -> Span:
        """Count a group's ranks by level; arguments as of `spread`."""
        return Span.of(self.lowest_units(ranks, hosts), [level.size for level in self.levels])

    def lowest_units(self, ranks: Iterable[int], hosts: Hosts | None = None) -> list[int]:
        """The unit of the lowest level that each of the ranks is in.

        Args:
            ranks, hosts: as of `spread`. Below nodes, the ranks of a host fill one unit after
                another.
        """
        size = self.levels[0].size
        if hosts is None:
            return [0 if size is None else rank // size for rank in ranks]
        if self.node_level == 0 or size is None:
            return [hosts[rank] for rank in ranks]
        places: dict[int, int] = {}
        counts: Counter[int] = Counter()
        for rank in sorted(hosts) if isinstance(hosts, Mapping) else range(len(hosts)):
            places[rank] = counts[hosts[rank]]
            counts[hosts[rank]] += 1
        units = self.per_node // size
        # A host with more ranks than a node has devices keeps them all.
        return [hosts[rank] * units + min(places[rank] // size, units - 1) for rank in ranks]

    def check_world(self, world_size: int) -> None:
        """Refuse a number of ranks that does not fill nodes.

        Raises:
            SpecError: it does not, with the nearest numbers that do.
        """
        if world_size <= self.per_node:
            return
        if world_size % self.per_node:
            below = world_size // self.per_node * self.per_node
            raise SpecError(
                f"world_size={world_size}: does not fill nodes of {self.per_node} devices "
                f"(cluster {self.name!r}); take {below} or {below + self.per_node}"
            )
        largest = self.unit_size(len(self.levels) - 1)
        if world_size > largest:
            raise SpecError(
                f"world_size={world_size}: cluster {self.name!r} has {int(largest)} devices; leave "
                f"out the size of its highest level, {self.levels[-1].name!r}, where it has more"
            )

    def check_placed(self, spec: GridSpec) -> None:
        """Refuse a grid of which rank r cannot run on device r; listed ranks need not fill nodes.

        Raises:
            SpecError: its ranks do not fill nodes, or are more than there are devices.
        """
        if spec.ranks is None:
            self.check_world(spec.world_size)
            return
        largest, last = self.unit_size(len(self.levels) - 1), highest_rank(spec.ranks)
        if last >= largest:
            raise SpecError(
                f"ranks: rank {last} is beyond the {int(largest)} devices of cluster "
                f"{self.name!r}; leave out the size of its highest level, "
                f"{self.levels[-1].name!r}, where it has more"
            )

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Cluster:
        """A cluster from the mapping that YAML holds; see `to_dict`.

        Raises:
            SpecError: a key is missing or unknown, or a number is not above 0.
        """
        check_keys("", config, _CLUSTER, ("source", "fits"))
        device = config["device"]
        check_keys("device.", device, _DEVICE, ("fp8_tflops",))
        levels = config["levels"]
        if not isinstance(levels, list) or not levels:
            raise SpecError(f"levels={levels!r}: expected a list of levels, the lowest first")
        made = []
        for place, level in enumerate(levels):
            key = f"levels[{place}]."
            last = place == len(levels) - 1
            check_keys(key, level, _LEVEL, ("size", "measured") if last else ("measured",))
            size = level.get("size")
            if not (size is None and last):
                size = whole_number(f"{key}size", size)
            made.append(
                Level(
                    named(key, level),
                    size,
                    above_zero(key, level, "gb_per_s") * 1e9,
                    above_zero(key, level, "latency_us") / 1e6,
                    flag(key, level, "measured"),
                )
            )
        fits = config.get("fits", [])
        if not isinstance(fits, list):
            raise SpecError(f"fits={fits!r}: expected a list, as `fit_cluster.py` writes it")
        names = [level.name for level in made]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise SpecError(f"levels: {twice!r} is the name of two; names must differ")
        cluster = cls(
            name=named("", config),
            device=Device(
                named("device.", device),
                above_zero("device.", device, "peak_tflops") * 1e12,
                above_zero("device.", device, "memory_gb") * 1e9,
                above_zero("device.", device, "memory_gb_per_s") * 1e9,
                above_zero("device.", device, "fp8_tflops") * 1e12
                if "fp8_tflops" in device
                else None,
            ),
            levels=tuple(made),
            source=str(config.get("source", "")),
            fits=tuple(Fit.from_dict(f"fits[{n}]", each) for n, each in enumerate(fits)),
        )
        for one in cluster.fits:
            cluster.find_level(one.level)
        return cluster

    @classmethod
    def from_yaml(cls, path: str | Path) -> Cluster:
        """A cluster from a YAML file.

        Raises:
            SpecError: the file is not there, not YAML, or describes no cluster.
        """
        return from_file(path, cls.from_dict, "levels: […]")

    @classmethod
    def from_launcher(
        cls, base: Cluster | None = None, environ: Mapping[str, str] | None = None
    ) -> Cluster:
        """A cluster whose nodes are as large as the launcher's variables say; they say no more.

        torchrun's LOCAL_WORLD_SIZE; else the number of SLURM's tasks, SLURM_NTASKS_PER_NODE or
        SLURM_TASKS_PER_NODE. A single task is torchrun, which starts a rank for each GPU:
        SLURM_GPUS_ON_NODE, where it is set.

        Args:
            base: what has everything else; None: speeds are not known (`nodes_of`).
            environ: the variables; None: this process's.

        Returns:
            `base` itself if no variable is set.

        Raises:
            SpecError: a variable that is no number above 0, nodes that differ, or neither a
                variable nor `base`.

        Example:
            >>> variables = {"SLURM_TASKS_PER_NODE": "4(x2)"}
            >>> Cluster.from_launcher(CLUSTERS["h100"], variables).per_node
            4
        """
        environ = os.environ if environ is None else environ
        found = [_node_size(v, environ[v]) for v in _NODE_SIZES if v in environ]
        if found and "LOCAL_WORLD_SIZE" not in environ:
            found.sort(key=lambda size: size == 1)
        if found:
            return nodes_of(found[0]) if base is None else base.with_node(found[0])
        if base is None:
            raise SpecError(
                f"environment: none of {', '.join(_NODE_SIZES)} is set, so that how many ranks a "
                "node has is not known; give the number"
            )
        return base

    def to_dict(self) -> dict[str, Any]:
        """The mapping that `from_dict` reads, in units people use; None where not known."""
        device = self.device
        return {
            "name": self.name,
            "source": self.source,
            "device": None
            if device is None
            else {
                "name": device.name,
                "peak_tflops": device.flops / 1e12,
                "memory_gb": device.memory / 1e9,
                "memory_gb_per_s": device.memory_bandwidth / 1e9,
                **({} if device.fp8_flops is None else {"fp8_tflops": device.fp8_flops / 1e12}),
            },
            "levels": [
                {
                    "name": level.name,
                    **({} if level.size is None else {"size": level.size}),
                    "gb_per_s": None if level.bandwidth is None else level.bandwidth / 1e9,
                    "latency_us": None if level.latency is None else level.latency * 1e6,
                    **({"measured": True} if level.measured else {}),
                }
                for level in self.levels
            ],
            **({"fits": [one.to_dict() for one in self.fits]} if self.fits else {}),
        }

    def with_node(self, devices: int) -> Cluster:
        """The same with nodes of another number of devices; what holds nodes has as many devices.

        Raises:
            SpecError: the number is below 1, or units of another level cannot be made of it.
        """
        node = self.node_level
        below = int(self.unit_size(node - 1)) if node else 1
        if type(devices) is not int or devices < 1 or devices % below:
            inner = f", in whole {self.levels[node - 1].name}s of {below}" if node else ""
            raise SpecError(f"gpus_per_node={devices!r}: expected a whole number from 1 on{inner}")
        levels = list(self.levels)
        levels[node] = replace(levels[node], size=devices // below)
        if node + 1 < len(levels) and levels[node + 1].size is not None:
            whole, above = int(self.unit_size(node + 1)), levels[node + 1]
            if whole % devices:
                raise SpecError(
                    f"gpus_per_node={devices}: does not divide the {whole} devices of a "
                    f"{above.name} (cluster {self.name!r}); describe yours in a YAML file"
                )
            levels[node + 1] = replace(above, size=whole // devices)
        return replace(self, levels=tuple(levels))


def nodes_of(devices: int) -> Cluster:
    """A cluster of which only the size of its nodes is known.

    Raises:
        SpecError: the size is below 1.
    """
    return Cluster("nodes", None, (Level("node", 1), Level("cluster", None)), "").with_node(devices)


_NODE_SIZES = (
    "LOCAL_WORLD_SIZE",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
    "SLURM_GPUS_ON_NODE",
)
"""Variables with the number of ranks of a node; the first one set counts, of SLURM's the first
above 1."""


def _node_size(variable: str, value: str) -> int:
    """A number, or SLURM's list such as `8(x2)`, of nodes that are alike."""
    parts = [re.fullmatch(r"([0-9]{1,9})(?:\(x\d+\))?", part) for part in value.split(",")]
    sizes = {int(part[1]) for part in parts if part}
    if None in parts or 0 in sizes:
        raise SpecError(f"environment: {variable}={value!r}: expected a number above 0")
    if len(sizes) > 1:
        raise SpecError(
            f"environment: {variable}={value!r}: nodes have "
            f"{' and '.join(map(str, sorted(sizes)))} ranks; a cluster's nodes are alike, so start "
            "equally many on each"
        )
    return sizes.pop()


_CLUSTER = ("name", "device", "levels", "source", "fits")
_DEVICE = ("name", "peak_tflops", "memory_gb", "memory_gb_per_s", "fp8_tflops")
_LEVEL = ("name", "size", "gb_per_s", "latency_us", "measured")

CLUSTERS = Table(
    "cluster ", Path(__file__).with_name("clusters.yaml"),
    lambda name, row: Cluster.from_dict({"name": name, **row}),
)  # fmt: skip
"""The built-in ones, by name."""


def find_cluster(given: str) -> Cluster:
    """A built-in cluster by its name, or one from a YAML file by its path.

    Raises:
        SpecError: there is neither, or the file describes none.
    """
    return CLUSTERS.find(given, Cluster.from_yaml)
