"""The best grids for a model: all valid ones that fit, by the time of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NoReturn

from commgrid.advisor.calibration import CALIBRATION, Calibration
from commgrid.advisor.cluster import Cluster
from commgrid.advisor.config import HEADROOM, ORDERS, RECOMPUTE, ParallelConfig
from commgrid.advisor.layer import Machine, layer_cost
from commgrid.advisor.memory import MEMORY_PARTS, Memory, memory_of
from commgrid.advisor.model import Model
from commgrid.advisor.placement import Placement, of_choice
from commgrid.advisor.step import StepCost, step_cost
from commgrid.errors import SpecError
from commgrid.planning.names import nearest
from commgrid.planning.ranks import divisors

AXES = ("tp", "cp", "pp", "dp", "ep", "etp")
MICROBATCHES = (1, 2, 4, 8, 16)
LARGEST_TP = 64
FAR = 1.5


@dataclass(frozen=True)
class Pins:
    """Decisions of the user; None: open.

    Args:
        tp, cp, pp, dp, ep, etp: sizes of axes.
        order, microbatch, chunks, recompute: as of `ParallelConfig`.
        max_memory: bytes that a rank may need; None: `HEADROOM` of the device's.
        base: what the rest is taken from: sequence parallelism, sharding, bytes of gradients.
    """

    tp: int | None = None
    cp: int | None = None
    pp: int | None = None
    dp: int | None = None
    ep: int | None = None
    etp: int | None = None
    order: str | None = None
    microbatch: int | None = None
    chunks: int | None = None
    recompute: str | None = None
    max_memory: float | None = None
    base: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        for key in (*AXES, "microbatch", "chunks"):
            given = getattr(self, key)
            if given is not None and (type(given) is not int or given < 1):
                raise SpecError(f"{key}={given!r}: expected a whole number from 1 on")
        if self.order not in (None, *ORDERS):
            raise SpecError(
                f"order={self.order!r}: expected {', '.join(ORDERS)}"
                f"{nearest(str(self.order), ORDERS)}"
            )
        if self.max_memory is not None and not self.max_memory > 0:
            raise SpecError(f"max_memory={self.max_memory!r}: expected bytes above 0")

    def given(self) -> dict[str, object]:
        """Those that are decided."""
        keys = (*AXES, "order", "microbatch", "chunks", "recompute", "max_memory")
        return {key: getattr(self, key) for key in keys if getattr(self, key) is not None}

    def without(self, key: str) -> Pins:
        """The same with one of them left open."""
        opened: dict[str, Any] = {key: None}
        return replace(self, **opened)


@dataclass(frozen=True)
class Tuning:
    """The grids that fit, best first.

    Args:
        best: of each grid the best way to run a step on it.
        grids: that are valid for the model.
        far: of those, how many take far longer than the best, whether they fit or not.
        evaluated: ways to run a step whose time was reckoned.
    """

    best: tuple[StepCost, ...]
    grids: int
    far: int
    evaluated: int


def tune(
    model: Model,
    world_size: int,
    cluster: Cluster,
    pins: Pins | None = None,
    calibration: Calibration = CALIBRATION,
) -> Tuning:
    """The best grids of a model on so many devices, by the time of a step.

    Of each grid the best order, microbatch and number of chunks, with as little computed again as
    fits in memory. Grids whose layers alone take `FAR` times the best step are left out.

    Raises:
        SpecError: the cluster has no so many devices, no grid is valid, or none fits; says what
            would.
    """
    search = _searched(model, world_size, cluster, pins or Pins(), calibration, None)
    if not search.found:
        _refuse(search, world_size)
    found = sorted(search.found, key=lambda cost: (cost.seconds, cost.memory.total))
    return Tuning(tuple(found), search.grids, search.far, search.evaluated)


def fastest(
    model: Model, world_size: int, cluster: Cluster, pins: Pins, placement: Placement
) -> StepCost | None:
    """The fastest way to run a step on a given grid; None: it is valid, and nothing fits.

    Raises:
        SpecError: no way is valid.
    """
    search = _searched(model, world_size, cluster, pins, CALIBRATION, placement)
    if not search.found and search.smallest is None:
        _refuse(search, world_size)
    return min(search.found, key=lambda cost: cost.seconds, default=None)


def _searched(
    model: Model,
    world_size: int,
    cluster: Cluster,
    pins: Pins,
    calibration: Calibration,
    placement: Placement | None,
) -> _Search:
    if placement is None:
        cluster.check_world(world_size)
    search = _Search(model, cluster, pins, Machine(cluster, calibration), placement)
    for grid in _grids(model, world_size, pins):
        search.try_grid(grid)
    return search


_Fitting = tuple[ParallelConfig, Memory]


@dataclass
class _Search:
    """The state of a search."""

    model: Model
    cluster: Cluster
    pins: Pins
    machine: Machine
    placement: Placement | None = None
    found: list[StepCost] = field(default_factory=list)
    best: float = math.inf
    grids: int = 0
    far: int = 0
    evaluated: int = 0
    refusals: dict[str, int] = field(default_factory=dict)
    smallest: tuple[ParallelConfig, Memory] | None = None

    def try_grid(self, grid: ParallelConfig) -> None:
        """Adds a grid's best way to run a step, where it is valid and fits."""
        best: StepCost | None = None
        valid = far = False
        small = self.state_fits(grid)
        for ways in _ways(self.model, grid, self.pins):
            possible = [choice for choice in ways if self._is_valid(choice)]
            if not possible:
                continue
            valid = True
            if not small:
                break
            if self._least(possible[0]) > FAR * self.best:
                far = True
                continue
            made = [self.least_recomputed(choice) for choice in possible]
            fitting = [each for each in made if each is not None]
            for placed in self._orders(fitting) if fitting else ():
                for choice, memory in placed:
                    cost = self._cost(choice, memory)
                    if best is None or cost.seconds < best.seconds:
                        best = cost
        self.grids += valid
        if best is not None:
            self.found.append(best)
            self.best = min(self.best, best.seconds)
        elif far:
            self.far += 1

    def _is_valid(self, choice: ParallelConfig) -> bool:
        why = choice.refusal(self.model)
        if why is not None:
            self.refusals[why] = self.refusals.get(why, 0) + 1
        return why is None

    def state_fits(self, grid: ParallelConfig) -> bool:
        """Whether what no way to run a step changes fits: weights, gradients, optimizer."""
        asked = self.pins.recompute or RECOMPUTE[-1]
        least = replace(grid, microbatch=self.pins.microbatch or 1, chunks=1, recompute=asked)
        if least.refusal(self.model) is not None:
            return True  # then nothing is known of it
        memory = memory_of(self.model, least)
        if memory.total - memory.activations <= memory_limit(self.cluster, self.pins):
            return True
        self._note(least, memory)
        return False

    def _note(self, choice: ParallelConfig, memory: Memory) -> None:
        if self.smallest is None or memory.total < self.smallest[1].total:
            self.smallest = (choice, memory)

    def _least(self, choice: ParallelConfig) -> float:
        """Seconds that a step takes at the least: those of the fullest stage's layers."""
        placement = self.placement or of_choice(choice, self.cluster)
        layer = layer_cost(self.model, choice, self.machine, placement.spreads)
        each = layer.forward_total + layer.backward_total
        return choice.microbatches(self.model) * choice.stage_layers(self.model).last * each

    def _cost(self, choice: ParallelConfig, memory: Memory | None) -> StepCost:
        self.evaluated += 1
        return step_cost(
            self.model, choice, self.cluster, machine=self.machine, memory=memory,
            placement=self.placement,
        )  # fmt: skip

    def _orders(self, fitting: list[_Fitting]) -> Iterator[list[_Fitting]]:
        """The same choices in each order that they may have; it changes no memory."""
        choice = fitting[0][0]
        if self.placement is not None:  # a grid that is given has its order
            yield fitting
            return
        orders = [self.pins.order] if self.pins.order else [ORDERS[0]]
        if self.pins.order is None and choice.pp > 1 and choice.dp > 1:
            orders = [*ORDERS]
        for order in orders:
            if not self._is_valid(replace(choice, order=order)):
                continue
            if order == choice.order:
                yield fitting
            else:
                yield [(replace(each, order=order), memory) for each, memory in fitting]

    def least_recomputed(self, choice: ParallelConfig) -> tuple[ParallelConfig, Memory] | None:
        """The choice with as little computed again as fits, since that only costs time."""
        limit = memory_limit(self.cluster, self.pins)
        for recompute in [self.pins.recompute] if self.pins.recompute else RECOMPUTE:
            same = choice.recompute == recompute
            tried = choice if same else replace(choice, recompute=recompute)
            memory = memory_of(self.model, tried)
            if memory.total <= limit:
                return tried, memory
        self._note(tried, memory)
        return None


def memory_limit(cluster: Cluster, pins: Pins) -> float:
    """Bytes that a rank may need."""
    return HEADROOM * cluster.device.memory if pins.max_memory is None else pins.max_memory


def _grids(model: Model, world_size: int, pins: Pins) -> Iterator[ParallelConfig]:
    """Every factorisation into axes that may be valid; what never is, is left out early."""
    for tp in _sizes(world_size, pins.tp, LARGEST_TP):
        if model.heads % tp and pins.tp is None:
            continue
        for cp in _sizes(world_size // tp, pins.cp, world_size):
            if (
                cp > 1
                and pins.cp is None
                and (model.attention != "flash" or model.sequence % (2 * cp * tp))
            ):
                continue
            for pp in _sizes(world_size // tp // cp, pins.pp, model.layers):
                dp = world_size // tp // cp // pp
                if pins.dp not in (None, dp) or (pins.dp is None and model.batch % dp):
                    continue
                base = replace(pins.base, tp=tp, cp=cp, pp=pp, dp=dp)
                yield from _expert_grids(model, base, pins)


def _expert_grids(model: Model, base: ParallelConfig, pins: Pins) -> Iterator[ParallelConfig]:
    if not model.experts:
        if pins.ep in (None, 1) and pins.etp is None:
            yield base
        elif pins.ep is not None:
            yield replace(base, ep=pins.ep, etp=pins.etp)
        return
    inner = base.tp * base.cp * base.dp
    for ep in _sizes(inner, pins.ep, model.experts):
        if model.experts % ep and pins.ep is None:
            continue
        for etp in sorted({1, base.tp}) if pins.etp is None else [pins.etp]:
            if inner % (ep * etp) == 0 or pins.etp is not None:
                yield replace(base, ep=ep, etp=etp)


def _sizes(whole: int, pinned: int | None, most: int) -> list[int]:
    """The divisors up to a size, or the decided one if it divides."""
    if pinned is not None:
        return [pinned] if whole % pinned == 0 else []
    return list(_divisors(whole, most))


@lru_cache(maxsize=10_000)
def _divisors(number: int, most: int) -> tuple[int, ...]:
    """Of a number those up to `most`.

    >>> _divisors(12, 4)
    (1, 2, 3, 4)
    """
    return tuple(size for size in divisors(number) if size <= most)


def _ways(model: Model, grid: ParallelConfig, pins: Pins) -> Iterator[list[ParallelConfig]]:
    """For each microbatch the numbers of chunks that its stages can have."""
    per_rank = max(model.batch // grid.dp, 1)
    layers = -(-model.layers // grid.pp)
    sizes: tuple[int, ...] = MICROBATCHES
    if grid.cp > 1 and pins.cp is None:
        sizes = (1,)  # as many tokens a rank with cp halved and twice the sequences cost less
    for microbatch in [pins.microbatch] if pins.microbatch else sizes:
        if pins.microbatch is None and per_rank % microbatch:
            continue
        chunks = [pins.chunks] if pins.chunks else [1]
        if pins.chunks is None and grid.pp > 1 and per_rank // microbatch % grid.pp == 0:
            chunks = list(_divisors(layers, layers))
        yield [replace(grid, microbatch=microbatch, chunks=count) for count in chunks]


# ---- where nothing fits -------------------------------------------------------------------------


def first_fit(model: Model, world_size: int, cluster: Cluster, pins: Pins) -> ParallelConfig | None:
    """Any choice that is valid and fits; None where there is none."""
    search = _Search(model, cluster, pins, Machine(cluster, CALIBRATION))
    for grid in _grids(model, world_size, pins):
        if not search.state_fits(grid):
            continue
        for ways in _ways(model, grid, pins):
            for choice in ways:
                if choice.refusal(model) is None:
                    made = search.least_recomputed(choice)
                    if made is not None:
                        return made[0]
    return None


def _refuse(search: _Search, world_size: int) -> NoReturn:
    """Why no grid is left, and what would leave one."""
    model, pins = search.model, search.pins
    would = "; ".join(_what_would(search, world_size)) or _NO_WAY
    if search.smallest is None:
        raise SpecError(
            f"model {model.name!r} on {world_size:,} devices: no grid is valid{_cause(search)}; "
            f"{would}"
        )
    choice, memory = search.smallest
    parts = {name: getattr(memory, name) for name in MEMORY_PARTS}
    largest = max(parts, key=lambda name: parts[name])
    raise SpecError(
        f"model {model.name!r} on {world_size:,} devices: no grid fits in "
        f"{memory_limit(search.cluster, pins) / 1e9:.0f} GB; the nearest, {describe(choice)} with "
        f"recompute={choice.recompute}, needs {memory.total / 1e9:.1f}, of which "
        f"{parts[largest] / 1e9:.1f} are {largest}; {would}"
    )


def _cause(search: _Search) -> str:
    if search.refusals:
        return f"; {max(search.refusals, key=lambda why: search.refusals[why])}"
    given = ", ".join(f"{key}={value}" for key, value in search.pins.given().items())
    beside = f" with {given}" if given else ""
    return f"{beside}, since sizes must divide the devices and dp the batch"


_NO_WAY = "no single change that was tried makes it fit"
_MOST_DEVICES = 1024


def _what_would(search: _Search, world_size: int) -> list[str]:
    """Single changes that leave a grid that fits."""
    model, cluster, pins = search.model, search.cluster, search.pins
    told = []
    for key in pins.given():
        if key == "max_memory":
            continue
        found = first_fit(model, world_size, cluster, pins.without(key))
        if found is not None:
            told.append(f"without {key}={getattr(pins, key)} {describe(found)} fits")
    if pins.max_memory is None:
        whole = cluster.device.memory
        found = first_fit(model, world_size, cluster, replace(pins, max_memory=whole))
        if found is not None:
            told.append(f"with --max-memory {whole / 1e9:g}, all of it, {describe(found)} fits")
    if pins.base.shard != "weights":
        shared = replace(pins, base=replace(pins.base, shard="weights"))
        found = first_fit(model, world_size, cluster, shared)
        if found is not None:
            told.append(f"with shard=weights {describe(found)} fits")
    times = 2
    while not told and times <= _MOST_DEVICES:
        found = first_fit(model, times * world_size, cluster, replace(pins, dp=None))
        if found is not None:
            told.append(f"on {times * world_size:,} devices {describe(found)} fits")
        times *= 2
    return told


def describe(choice: ParallelConfig) -> str:
    """A grid's sizes above 1.

    >>> describe(ParallelConfig(tp=8, pp=4, dp=16))
    'tp 8 · pp 4 · dp 16'
    """
    sizes = {axis: getattr(choice, axis) for axis in AXES if axis != "etp"}
    told = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
    if choice.expert_tp != choice.tp or choice.ep > 1:
        told.append(f"etp {choice.expert_tp}")
    return " · ".join(told) or "dp 1"
