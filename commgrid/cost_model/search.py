"""Search for the fastest grids of a model that fit in memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, NoReturn

from commgrid.cost_model.calibration import CALIBRATION, Calibration
from commgrid.cost_model.cluster import Cluster
from commgrid.cost_model.config import HEADROOM, ORDERS, RECOMPUTE, ParallelConfig, no_experts
from commgrid.cost_model.layer import Job, Machine, layer_cost
from commgrid.cost_model.memory import Memory, memory_of
from commgrid.cost_model.model import Model
from commgrid.cost_model.step import StepCost, step_cost
from commgrid.errors import SpecError
from commgrid.layout.axis_names import nearest, sizes_text
from commgrid.layout.ranks import MOST_RANK, divisors, whole_number
from commgrid.planning.spec import GridSpec

AXES = ("tp", "cp", "pp", "dp", "ep", "etp")
SEARCHED = (*AXES, "order", "microbatch", "virtual_stages", "recompute", "zero_stage")
"""Arguments of `ParallelConfig.of` that a search chooses where they are not given."""
MICROBATCHES = (1, 2, 4, 8, 16)
LARGEST_TP = 64
FAR = 1.5

_COUNTS = (*AXES, "microbatch", "virtual_stages", "dp_replicate", "gradient_bytes")

Fixed = Mapping[str, Any]
"""Arguments of `ParallelConfig.of` that are given."""


def _check(fixed: Fixed) -> None:
    step = [field.name for field in fields(ParallelConfig) if field.name not in ("spec", "sizes")]
    known = [*AXES, "order", "dp_replicate", *step]
    for key, value in fixed.items():
        if key not in known:
            raise SpecError(
                f"{key}={value!r}: no argument of ParallelConfig.of{nearest(key, known)}; expected "
                f"some of {', '.join(known)}"
            )
        is_default = key == "etp" and value is None
        if key in _COUNTS and not is_default:
            whole_number(key, value)


@dataclass(frozen=True)
class Found:
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


def search(
    model: Model,
    world_size: int,
    cluster: Cluster,
    *,
    max_memory: float | None = None,
    calibration: Calibration = CALIBRATION,
    **fixed: Any,
) -> Found:
    """The best grids of a model on so many devices, by the time of a step.

    Of each grid the best order, microbatch and number of virtual stages, with as little computed
    again as fits in memory. Grids whose layers alone take `FAR` times the best step are left out.

    Args:
        max_memory: bytes that a rank may need; None: `HEADROOM` of the device's.
        **fixed: arguments of `ParallelConfig.of` that are given, such as `tp=8` or `zero_stage=3`.

    Raises:
        SpecError: the cluster has no so many devices, no grid is valid, or none fits; says what
            would.

    Example:
        >>> from commgrid.cost_model.cluster import CLUSTERS
        >>> from commgrid.cost_model.model import find_model
        >>> found = search(find_model("llama3-70b"), 64, CLUSTERS["h100"], tp=8)
        >>> describe(found.best[0].config)
        'tp 8 · dp 8'
    """
    if (order := fixed.get("order", ORDERS[0])) not in ORDERS:
        raise SpecError(
            f"order={order!r}: expected {', '.join(ORDERS)}{nearest(str(order), ORDERS)}"
        )
    request = _Request(model, world_size, cluster, max_memory, fixed)
    ParallelConfig.of(**request.step)  # which checks the rest
    cluster.check_world(world_size)
    searching = _Search(request, Machine(cluster, calibration))
    for grid in _grids(request, searching.refusals):
        searching.try_grid(grid)
    if not searching.found:
        _refuse(searching)
    found = sorted(searching.found, key=lambda cost: (cost.seconds, cost.memory.total))
    return Found(tuple(found), searching.grids, searching.far, searching.evaluated)


def fastest(
    model: Model,
    spec: GridSpec,
    cluster: Cluster,
    *,
    max_memory: float | None = None,
    **step: Any,
) -> StepCost | None:
    """The fastest way to run a step on a given grid; None: it is valid, and nothing fits.

    Args:
        spec: of the grid, resolved.
        max_memory: as of `search`.
        **step: fields of `ParallelConfig` that are given; zero_stage is 1, unless it is.

    Raises:
        SpecError: no way is valid.
    """
    step.setdefault("zero_stage", 1)
    grid = ParallelConfig(spec, **step)
    given = {"order": grid.order, **step}
    request = _Request(model, grid.world_size, cluster, max_memory, given)
    searching = _Search(request, Machine(cluster, CALIBRATION))
    searching.try_grid(grid)
    if not searching.found and searching.smallest is None:
        sized = replace(request, fixed={**_sizes_of(grid, model), **given})
        _refuse(replace(searching, request=sized))
    return min(searching.found, key=lambda cost: cost.seconds, default=None)


@dataclass(frozen=True)
class _Request:
    """The arguments of `search`."""

    model: Model
    world_size: int
    cluster: Cluster
    max_memory: float | None
    fixed: Fixed

    def __post_init__(self) -> None:
        whole_number("world_size", self.world_size, 1, MOST_RANK)
        limit = self.max_memory
        if limit is not None and not (isinstance(limit, int | float) and limit > 0):
            raise SpecError(f"max_memory={limit!r}: expected bytes above 0")
        _check(self.fixed)
        if self.fixed.get("etp") is not None and not self.model.experts:
            raise SpecError(no_experts(self.model, f"etp={self.fixed['etp']}"))

    @property
    def step(self) -> dict[str, Any]:
        """The given fields of `ParallelConfig`."""
        return {k: v for k, v in self.fixed.items() if k not in (*AXES, "order", "dp_replicate")}

    def configs(self, refusals: dict[str, int], **sizes: Any) -> Iterator[ParallelConfig]:
        """The one config of these sizes; none where they make no grid, which is counted."""
        try:
            yield ParallelConfig.of(**{**self.fixed, **sizes})
        except SpecError as error:
            refusals[str(error)] = refusals.get(str(error), 0) + 1

    @property
    def limit(self) -> float:
        """Bytes that a rank may need."""
        return memory_limit(self.cluster, self.max_memory)

    def any(self, key: str, values: Sequence[Any]) -> Sequence[Any]:
        """The values to try of a field: the given one, or all."""
        return [self.fixed[key]] if key in self.fixed else values


@dataclass
class _Search:
    """The state of a search."""

    request: _Request
    machine: Machine
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
        orders: list[GridSpec] = []
        valid = far = False
        for staged in self.zero_stages(grid):
            small = self.state_fits(staged)
            for ways in _ways(self.request, staged):
                possible = [config for config in ways if self._is_valid(config)]
                if not possible:
                    continue
                valid = True
                if not small:
                    break
                if self._least(possible[0]) > FAR * self.best:
                    far = True
                    continue
                made = [self.least_recomputed(config) for config in possible]
                fitting = [each for each in made if each is not None]
                orders = orders or (self._orders(grid) if fitting else [])
                for spec, (config, memory) in itertools.product(orders, fitting):
                    cost = self._cost(replace(config, spec=spec), memory)
                    if best is None or cost.seconds < best.seconds:
                        best = cost
        self.grids += valid
        if best is not None:
            self.found.append(best)
            self.best = min(self.best, best.seconds)
        elif far:
            self.far += 1

    def zero_stages(self, grid: ParallelConfig) -> Iterator[ParallelConfig]:
        """A grid with each ZeRO stage to try: 1 and 3, or the given one."""
        copies = grid.dp * grid.cp > 1 or grid.edp > 1
        for stage in self.request.any("zero_stage", (1, 3) if copies else (1,)):
            yield replace(grid, zero_stage=stage)

    def _is_valid(self, config: ParallelConfig) -> bool:
        why = config.refusal(self.request.model)
        if why is not None:
            self.refusals[why] = self.refusals.get(why, 0) + 1
        return why is None

    def state_fits(self, grid: ParallelConfig) -> bool:
        """Whether weights, gradients and optimizer fit, which are those of every way."""
        fixed = self.request.fixed
        least = replace(
            grid, microbatch=fixed.get("microbatch", 1), virtual_stages=1,
            recompute=fixed.get("recompute", RECOMPUTE[-1]),
        )  # fmt: skip
        if least.refusal(self.request.model) is not None:
            return True  # then nothing is known of it
        memory = memory_of(self.request.model, least)
        if memory.total - memory.parts["activations"] <= self.request.limit:
            return True
        self._note(least, memory)
        return False

    def _note(self, config: ParallelConfig, memory: Memory) -> None:
        if self.smallest is None or memory.total < self.smallest[1].total:
            self.smallest = (config, memory)

    def _least(self, config: ParallelConfig) -> float:
        """Seconds that a step takes at the least: those of the last stage's layers."""
        placement = self.machine.placement(config.spec)
        layer = layer_cost(Job(self.request.model, config, self.machine, placement))
        each = layer.forward_total + layer.backward_total
        return (
            config.microbatches(self.request.model)
            * config.stage_layers(self.request.model).last
            * each
        )

    def _cost(self, config: ParallelConfig, memory: Memory | None) -> StepCost:
        self.evaluated += 1
        return step_cost(
            self.request.model, config, self.request.cluster, machine=self.machine, memory=memory
        )

    def _orders(self, grid: ParallelConfig) -> list[GridSpec]:
        """A grid in each order that it may have, which changes no memory."""
        if grid.pp == 1 or grid.dp == 1 or "order" in self.request.fixed:
            return [grid.spec]
        sizes = _sizes_of(grid, self.request.model)
        others = self.request.configs(self.refusals, **sizes, order=ORDERS[1])
        return [grid.spec, *(other.spec for other in others)]

    def least_recomputed(self, config: ParallelConfig) -> tuple[ParallelConfig, Memory] | None:
        """The config with as little computed again as fits, since that only costs time."""
        for recompute in self.request.any("recompute", RECOMPUTE):
            same = config.recompute == recompute
            tried = config if same else replace(config, recompute=recompute)
            memory = memory_of(self.request.model, tried)
            if memory.total <= self.request.limit:
                return tried, memory
        self._note(tried, memory)
        return None


def _sizes_of(grid: ParallelConfig, model: Model) -> dict[str, int]:
    """The sizes that `ParallelConfig.of` makes a grid of."""
    sizes = {axis: getattr(grid, axis) for axis in ("tp", "cp", "pp", "dp", "ep")}
    sizes |= {"etp": grid.expert_tp} if model.experts else {}
    return sizes | ({"dp_replicate": grid.dp_replicate} if grid.dp_replicate > 1 else {})


def memory_limit(cluster: Cluster, max_memory: float | None) -> float:
    """Bytes that a rank may need."""
    return HEADROOM * cluster.accelerator.memory if max_memory is None else max_memory


def _grids(request: _Request, refusals: dict[str, int]) -> Iterator[ParallelConfig]:
    """Every factorisation into axes that may be valid; what never is, is left out early.

    Args:
        refusals: counts sizes that make no grid, by the error.
    """
    model, fixed, world_size = request.model, request.fixed, request.world_size
    if not model.experts and fixed.get("ep", 1) > 1:
        refusals[no_experts(model, f"ep={fixed['ep']}")] = 1
        return
    for tp in _sizes(request, "tp", world_size, LARGEST_TP):
        if model.heads % tp and "tp" not in fixed:
            continue
        for cp in _sizes(request, "cp", world_size // tp, world_size):
            can = model.attention == "flash" and model.sequence % (2 * cp * tp) == 0
            if cp > 1 and not can and "cp" not in fixed:
                continue
            for pp in _sizes(request, "pp", world_size // tp // cp, model.layers):
                dp = world_size // tp // cp // pp
                if "dp" not in fixed and model.batch % dp:
                    continue
                if fixed.get("dp", dp) != dp:
                    continue
                sizes = {"tp": tp, "cp": cp, "pp": pp, "dp": dp}
                for experts in _experts(request, tp, tp * cp * dp):
                    yield from request.configs(refusals, **sizes, **experts)


def _experts(request: _Request, tp: int, inner: int) -> Iterator[dict[str, Any]]:
    """Sizes of the expert region over `inner` ranks of a stage; none for a dense model."""
    model, fixed = request.model, request.fixed
    if not model.experts:
        yield {}
        return
    for ep in _sizes(request, "ep", inner, model.experts):
        if model.experts % ep and "ep" not in fixed:
            continue
        for etp in request.any("etp", sorted({1, tp})):
            if inner % (ep * etp) == 0 or "etp" in fixed:
                yield {"ep": ep, "etp": etp}


def _sizes(request: _Request, axis: str, whole: int, most: int) -> Sequence[int]:
    """The divisors up to a size, or the given one if it divides."""
    if axis in request.fixed:
        given = request.fixed[axis]
        return [] if whole % given else [given]
    return _divisors(whole, most)


@lru_cache(maxsize=10_000)
def _divisors(number: int, most: int) -> tuple[int, ...]:
    """Of a number those up to `most`.

    >>> _divisors(12, 4)
    (1, 2, 3, 4)
    """
    return tuple(size for size in divisors(number) if size <= most)


def _ways(request: _Request, grid: ParallelConfig) -> Iterator[list[ParallelConfig]]:
    """For each microbatch the configs with every number of virtual stages that is possible."""
    per_rank = max(request.model.batch // grid.dp, 1)
    layers = -(-request.model.layers // grid.pp)
    for microbatch in request.any("microbatch", MICROBATCHES):
        if per_rank % microbatch and "microbatch" not in request.fixed:
            continue
        can = grid.pp > 1 and per_rank // microbatch % grid.pp == 0
        counts = request.any("virtual_stages", _divisors(layers, layers) if can else (1,))
        yield [replace(grid, microbatch=microbatch, virtual_stages=count) for count in counts]


# ---- where nothing fits -------------------------------------------------------------------------


def _first_fit(request: _Request) -> ParallelConfig | None:
    """Any config that is valid and fits; None where there is none."""
    searching = _Search(request, Machine(request.cluster, CALIBRATION))
    grids = _grids(request, searching.refusals)
    for grid in (staged for one in grids for staged in searching.zero_stages(one)):
        if not searching.state_fits(grid):
            continue
        for config in (config for ways in _ways(request, grid) for config in ways):
            if config.refusal(request.model) is None:
                made = searching.least_recomputed(config)
                if made is not None:
                    return made[0]
    return None


def _refuse(searching: _Search) -> NoReturn:
    """Why no grid is left, and what would leave one."""
    request = searching.request
    would = "; ".join(_what_would(request)) or _NO_WAY
    where = f"model {request.model.name!r} on {request.world_size:,} devices"
    if searching.smallest is None:
        raise SpecError(f"{where}: no grid is valid{_cause(searching)}; {would}")
    config, memory = searching.smallest
    parts = memory.parts
    largest = max(parts, key=lambda name: parts[name])
    raise SpecError(
        f"{where}: no grid fits in {request.limit / 1e9:.0f} GB; the nearest, {describe(config)} "
        f"with recompute={config.recompute}, needs {memory.total / 1e9:.1f}, of which "
        f"{parts[largest] / 1e9:.1f} are {largest}; {would}"
    )


def _cause(searching: _Search) -> str:
    if searching.refusals:
        return f"; {max(searching.refusals, key=lambda why: searching.refusals[why])}"
    given = ", ".join(f"{key}={value}" for key, value in searching.request.fixed.items())
    beside = f" with {given}" if given else ""
    return f"{beside}, since sizes must divide the devices and dp the batch"


_NO_WAY = "no single change that was tried makes it fit"
_MOST_DEVICES = 1024


def _what_would(request: _Request) -> list[str]:
    """Single changes that leave a grid that fits."""
    fixed = request.fixed
    changes: dict[str, _Request] = {
        f"without {key}={fixed[key]}": _without(request, key) for key in SEARCHED if key in fixed
    }
    if request.max_memory is None:
        whole = request.cluster.accelerator.memory
        changes[f"with --max-memory {whole / 1e9:g}, all of it,"] = replace(
            request, max_memory=whole
        )
    fitting = {change: _first_fit(tried) for change, tried in changes.items()}
    told = [f"{change} {describe(found)} fits" for change, found in fitting.items() if found]
    times = 2
    while not told and times <= min(_MOST_DEVICES, MOST_RANK // request.world_size):
        found = _first_fit(replace(_without(request, "dp"), world_size=times * request.world_size))
        if found is not None:
            told.append(f"on {times * request.world_size:,} devices {describe(found)} fits")
        times *= 2
    return told


def _without(request: _Request, field: str) -> _Request:
    return replace(
        request, fixed={key: value for key, value in request.fixed.items() if key != field}
    )


def describe(config: ParallelConfig, model: Model | None = None) -> str:
    """A grid's sizes above 1, and etp where experts are cut otherwise than the rest.

    Args:
        model: None: it may have experts.

    >>> describe(ParallelConfig.of(tp=8, pp=4, dp=16))
    'tp 8 · pp 4 · dp 16'
    """
    sizes = {axis: getattr(config, axis) for axis in AXES if axis != "etp"}
    told = [sizes_text(sizes)] if sizes_text(sizes) else []
    has_experts = model is None or bool(model.experts)
    if has_experts and (config.expert_tp != config.tp or config.ep > 1):
        told.append(f"etp {config.expert_tp}")
    return " · ".join(told) or "dp 1"
