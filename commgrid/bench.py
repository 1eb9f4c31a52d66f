"""Latency and bandwidth of a grid's communicators, by name, as nccl-tests measures a world's."""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from commgrid.collectives.objects import gathered
from commgrid.cost_model.cluster import CLUSTERS, Cluster, Device, Level
from commgrid.cost_model.collective import COLLECTIVES, bus_bandwidth
from commgrid.cost_model.collective_form import widest
from commgrid.errors import SpecError
from commgrid.layout.axis_names import check_word
from commgrid.store.hosts import own_host
from commgrid.torch_compat import groups as torch_groups

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from commgrid.runtime.grid import HyperCommGrid

ELEMENT = 4
"""Bytes of an element: all is measured with float32, nccl-tests' default."""

_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Effort:
    """How much is measured for each row.

    Args:
        iters: calls of a loop, at most.
        warmup: calls before the first loop.
        repeats: loops; their median counts.
        seconds: that the loops of a row may take together; larger messages have fewer calls.
    """

    iters: int = 20
    warmup: int = 2
    repeats: int = 5
    seconds: float = 1.0


@dataclass(frozen=True)
class Measured:
    """The measured time of a collective of one size on the groups of a name.

    Args:
        group: the name.
        names: all whose groups have the same ranks and options.
        collective: one of `commgrid.cost_model.collective.COLLECTIVES`.
        size: bytes, as nccl-tests counts them.
        count: elements that a rank gives, as nccl-tests counts them.
        ranks: of a group.
        groups: how many communicated at once.
        spread: ranks of a group by level.
        seconds: the median of the repeats, each the mean of its calls and the slowest rank's.
        least, most: of the repeats.
    """

    group: str
    names: tuple[str, ...]
    collective: str
    size: int
    count: int
    ranks: int
    groups: int
    spread: tuple[int, ...]
    seconds: float
    least: float
    most: float

    @property
    def algorithm_bandwidth(self) -> float:
        """Size over time, in bytes a second."""
        return self.size / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """nccl-tests' bus bandwidth, in bytes a second."""
        return bus_bandwidth(self.collective, self.size, self.ranks, self.seconds)


_CONNECT = Effort(iters=1, warmup=1, repeats=1)


def bench(
    grid: HyperCommGrid,
    names: Sequence[str] = (),
    collectives: Sequence[str] = COLLECTIVES,
    sizes: Sequence[int] = (1 << 20,),
    *,
    cluster: Cluster,
    effort: Effort = Effort(),
    alone: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Measured]:
    """Measures collectives on the groups of each name; all ranks of the grid call it at once.

    All groups of one name communicate at the same time, as they do in training. A repeat is a loop
    of calls after a barrier of the whole grid; what a rank takes for a call is the loop's time over
    its calls, and the slowest rank counts. With CUDA, events on the device's stream tell the time.

    Args:
        grid: with a group of all its ranks (`get_group()`).
        names: of groups; none: every communicator of more than one rank, equal ones once.
        collectives: of `cost_model.collective.COLLECTIVES`. A send/receive passes a message to the
            next rank of the group and takes one from the previous.
        sizes: bytes as nccl-tests counts them; rounded down to equal shares of the group's ranks,
            from one element a rank on.
        cluster: whose levels the groups lie on.
        effort: how much of each.
        alone: only the first group of each name communicates, and the others wait.
        progress: called for each group and collective, on every rank.

    Returns:
        A row for each name, collective and size, the same on every rank.

    Raises:
        SpecError: an unknown collective.
        UnknownGroupError: an unknown name, or a group that was not created.
    """
    for each in collectives:
        check_word("collective ", each, COLLECTIVES)
    everyone = grid.get_group()
    device = torch_groups.devices_of(everyone)[0]
    chosen = _chosen(grid, names, everyone)
    hosts = find_hosts(grid)
    rows: list[Measured] = []
    for place, (name, aliases) in enumerate(chosen):
        groups = [ranks for ranks in grid.get_all_ranks(name) if len(ranks) > 1]
        mine = next((ranks for ranks in groups if grid.rank in ranks), None)
        talks = mine is not None and (not alone or mine == groups[0])
        group = grid.get_group(name) if talks else None
        spread = widest({cluster.span(ranks, hosts) for ranks in groups}).spread
        for collective in collectives:
            first = _Call.prepare(collective, 1, len(groups[0]), group, device)
            _measure(first.run if talks else None, _CONNECT, everyone, device)
            for size in sizes:
                call = _Call.prepare(collective, size, len(groups[0]), group, device)
                times = _measure(call.run if talks else None, effort, everyone, device)
                rows.append(
                    Measured(
                        name, aliases, collective, call.size, call.count, len(groups[0]),
                        1 if alone else len(groups), spread,
                        statistics.median(times), min(times), max(times),
                    )
                )  # fmt: skip
            best = max(row.bus_bandwidth for row in rows[-len(sizes) :])
            progress(
                f"[{place + 1}/{len(chosen)}] {name} {collective}: up to {best / 1e9:.3g} GB/s"
            )
    return rows


def _chosen(
    grid: HyperCommGrid, names: Sequence[str], everyone: ProcessGroup
) -> list[tuple[str, tuple[str, ...]]]:
    """The groups to measure, in one order on all ranks: a name, and all names of equal groups.

    None: one of each. A grid with cp 1 has two communicators `tp` and `cp_tp` that are alike.
    """
    alike: dict[Any, list[str]] = {}
    for each in grid.communicators:
        if len(each.ranks) > 1:
            alike.setdefault((each.ranks, each.options), []).extend(each.names)
    shared = {name: tuple(held) for held in alike.values() for name in held}
    for name in names:
        grid.is_member(name)  # or it is an error that names the nearest
    asked = list(dict.fromkeys(names)) or [held[0] for held in alike.values()]
    listed = gathered([(name, shared.get(name, (name,))) for name in asked], everyone)
    merged: dict[str, tuple[str, ...]] = {}
    for name, held in (each for theirs in listed for each in theirs):
        if any(len(ranks) > 1 for ranks in grid.get_all_ranks(name)):
            merged.setdefault(name, held)
    if not merged:
        raise SpecError(
            "nothing to measure: each of these groups has one rank; give larger sizes, such as "
            "--tp 2, or start more ranks"
        )
    return list(merged.items())


@dataclass(frozen=True)
class _Call:
    """One collective on tensors of its own.

    Args:
        run: does it once.
        size: bytes, as nccl-tests counts them.
        count: elements that a rank gives.
    """

    run: Callable[[], object]
    size: int
    count: int

    @classmethod
    def prepare(
        cls,
        collective: str,
        size: int,
        ranks: int,
        group: ProcessGroup | None,
        device: torch.device,
    ) -> _Call:
        """On zeros, whose sums stay what they are however often they are added."""
        shared = collective in ("all_gather", "reduce_scatter", "all_to_all")
        part = max(size // ELEMENT // (ranks if shared else 1), 1)
        whole = part * ranks if shared else part
        if group is None:
            return cls(lambda: None, whole * ELEMENT, part)
        full, other = torch.zeros(whole, device=device), torch.zeros(whole, device=device)
        one = torch.zeros(part, device=device)
        peers = dist.get_process_group_ranks(group)
        here = group.rank()

        after, before = peers[(here + 1) % len(peers)], peers[here - 1]

        def send_on() -> None:
            works: list[dist.Work | None]
            if device.type == "cuda":  # NCCL wants both in one launch
                sent = dist.P2POp(dist.isend, full, after, group)
                works = [
                    *dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, other, before, group)])
                ]
            else:
                works = [dist.isend(full, after, group), dist.irecv(other, before, group)]
            for work in works:
                assert work is not None  # the rank is one of the group's
                work.wait()

        run: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(full, group=group),
            "all_gather": lambda: _all_gather_single(full, one, group=group),
            "reduce_scatter": lambda: _reduce_scatter_single(one, full, group=group),
            "all_to_all": lambda: dist.all_to_all_single(other, full, group=group),
            "broadcast": lambda: dist.broadcast(full, peers[0], group=group),
            "send_recv": send_on,
        }
        return cls(run[collective], whole * ELEMENT, part)


def _measure(
    run: Callable[[], object] | None, effort: Effort, everyone: ProcessGroup, device: torch.device
) -> list[float]:
    """Seconds of a call in each repeat, of the slowest rank; without `run` this rank waits."""

    def slowest(seconds: Sequence[float]) -> list[float]:
        told = torch.tensor(seconds, dtype=torch.float64, device=device)
        dist.all_reduce(told, dist.ReduceOp.MAX, everyone)
        return [float(each) for each in told]

    def loop(calls: int) -> float:
        _meet(everyone, device)
        return 0.0 if run is None else _timed(run, calls, device)

    estimate = slowest([loop(max(effort.warmup, 1))])[0]
    affordable = effort.seconds / effort.repeats / max(estimate, 1e-7)
    calls = max(1, min(effort.iters, int(affordable)))
    return slowest([loop(calls) for _ in range(effort.repeats)])


def _timed(run: Callable[[], object], calls: int, device: torch.device) -> float:
    """Seconds of a call."""
    if device.type == "cuda":
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / calls
    started = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - started) / calls


def _meet(everyone: ProcessGroup, device: torch.device) -> None:
    """Ranks leave a barrier of gloo's nearer to each other than an all-reduce."""
    if device.type == "cuda":
        dist.all_reduce(torch.zeros(1, device=device), group=everyone)
        torch.cuda.synchronize(device)
    else:
        dist.barrier(group=everyone)


# -- what it ran on --------------------------------------------------------------------


def find_hosts(grid: HyperCommGrid) -> list[int]:
    """By global rank, the number of the host that it runs on, by its name; all ranks call it."""
    ranks = grid.get_ranks()
    names = gathered(own_host(), grid.get_group())
    numbers = {name: place for place, name in enumerate(dict.fromkeys(names))}
    found = [0] * (max(ranks) + 1)
    for rank, name in zip(ranks, names, strict=True):
        found[rank] = numbers[name]
    return found


def find_cluster(grid: HyperCommGrid) -> Cluster:
    """The nodes that the grid runs on, and their device as it is or was measured; all ranks call.

    Its levels have no latencies and bandwidths.

    Args:
        grid: with a group of all its ranks.
    """
    everyone = grid.get_group()
    hosts = find_hosts(grid)
    per_node = max(Counter(hosts[rank] for rank in grid.get_ranks()).values())
    device = torch_groups.devices_of(everyone)[0]
    levels = [Level("node", per_node)]
    if everyone.size() > per_node:
        levels.append(Level("cluster", None))
    told = torch.tensor(_speeds(device), dtype=torch.float64, device=device)
    dist.all_reduce(told, group=everyone)
    flops, copied = (float(each) / everyone.size() for each in told)
    name, memory = "CPU", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / per_node
    source = "all of it measured with float32"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        memory = float(torch.cuda.get_device_properties(device).total_memory)
        for known in CLUSTERS.values():
            like = known.accelerator
            if like.name.split("-")[0] in name.replace(" ", ""):
                flops, copied = like.flops, like.memory_bandwidth
                source = f"the device as its maker states it, {known.name}"
    return Cluster(
        name="measured",
        device=Device(name, flops, memory, copied),
        levels=tuple(levels),
        source=f"commgrid bench on {everyone.size()} ranks, {torch_groups.backend_of(everyone)}; "
        f"{source}",
    )


def _speeds(device: torch.device) -> tuple[float, float]:
    """Operations and copied bytes a second, while all ranks do the same."""
    width = 512 if device.type == "cpu" else 8192
    kind = torch.float32 if device.type == "cpu" else torch.bfloat16
    one = torch.ones(width, width, dtype=kind, device=device)
    block = torch.zeros(1 << 22 if device.type == "cpu" else 1 << 28, device=device)
    other = torch.zeros_like(block)

    def fastest(run: Callable[[], object]) -> float:
        _timed(run, 1, device)
        return min(_timed(run, 4, device) for _ in range(3))

    flops = 2 * width**3 / fastest(lambda: one @ one)
    return flops, 2 * block.numel() * ELEMENT / fastest(lambda: other.copy_(block))
