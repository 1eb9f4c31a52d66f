"""`commgrid plan --model …`: a training step on a grid, and with `--auto` the best grids."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from commgrid.advisor.cluster import Cluster
from commgrid.advisor.comparison import NAMES, limits, why_worse
from commgrid.advisor.config import ORDERS, RECOMPUTE, ParallelConfig
from commgrid.advisor.crossing import check_within
from commgrid.advisor.memory import MEMORY_PARTS
from commgrid.advisor.model import Model
from commgrid.advisor.models import find_model
from commgrid.advisor.placement import of_spec
from commgrid.advisor.reasons import as_lines
from commgrid.advisor.search import (
    AXES,
    Pins,
    Tuning,
    describe,
    fastest,
    memory_limit,
    tune,
)
from commgrid.advisor.step import StepCost
from commgrid.advisor.traffic import traffic
from commgrid.advisor.why import why
from commgrid.cli.grid_options import read_cluster, read_spec, refuse_unused, resolve, whole
from commgrid.cli.output import MARKS, give, write_grid
from commgrid.cli.terminal import DIM, GREEN
from commgrid.errors import SpecError
from commgrid.planning.spec import GridSpec
from commgrid.viz.figure import SUFFIXES, drawing, save
from commgrid.viz.steps_picture import draw_steps

_NOT_WITH_AUTO = (
    "yaml", "preset", "changes", "axis", "create", "connect", "ranks", "share", "dp_replicate",
    "dp_shard", "within", "place",
)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Of `commgrid plan` with `--model` or `--auto`."""
    refuse_unused(args, ["backend"], "counts open files of a grid alone; leave out --model")
    model, cluster = read_job(args)
    if not args.auto:
        refuse_unused(args, ["top"], "goes with --auto")
        pins = _run_pins(args)
        spec = resolve(read_spec(args), args.world_size)
        check_within(spec, cluster)
        cost = given_step(spec, model, cluster, pins, args.shard)
        _write(args, read_spec(args), [cost], _way_comment(args, None))
        limit = pins.max_memory or cluster.device.memory
        give(
            args,
            lambda: {**_about(model, cluster, cost.choice.world_size, limit),
                     "step": step_json(cost), **_why_json(args, cost)},
            lambda: "\n".join([*step_text(cost, limit), *_why_text(args, cost)]),
            {r"does not fit.*$": DIM, **MARKS},
        )  # fmt: skip
        return 0
    pins, top = _pins(args), whole("top", args.top or "5", 1)
    if args.world_size is None:
        raise SpecError("--world-size: needed; --auto fills so many devices")
    world_size = whole("world-size", args.world_size, 1)
    tuning = tune(model, world_size, cluster, pins)
    limit = memory_limit(cluster, pins)
    best = tuning.best[0].choice
    _write(args, spec_of(best, model), tuning.best[:top], _way_comment(args, best))
    give(
        args,
        lambda: {**_about(model, cluster, world_size, limit), **_tuning_json(tuning, top),
                 **_why_json(args, tuning.best[0])},
        lambda: "\n".join([
            *tuning_text(tuning, limit, top), "", *start_lines(best, job_flags(args)),
            *_why_text(args, tuning.best[0]),
        ]),
        {r"^commgrid .*$": GREEN, **MARKS},
    )  # fmt: skip
    return 0


def _write(
    args: argparse.Namespace, spec: GridSpec, costs: Sequence[StepCost], source: str
) -> None:
    """Write the grid, or a picture of the steps, by the suffix of each `-o`."""
    for path in args.output:
        if path.suffix in SUFFIXES:
            with drawing():
                save(draw_steps(costs), path)
        else:
            write_grid(path, spec, source)


# ---- what is given ------------------------------------------------------------------------------


def read_job(args: argparse.Namespace) -> tuple[Model, Cluster]:
    """The model and the cluster that the flags name.

    Raises:
        SpecError: one of them is not there.
    """
    for key in ("model", "cluster"):
        if getattr(args, key) is None:
            raise SpecError(f"--{key}: needed for the time and memory of a step; give its name or "
                            "a YAML file")  # fmt: skip
    model = find_model(args.model)
    changed: dict[str, Any] = {
        key: whole(key, getattr(args, key), 1)
        for key in ("batch", "sequence")
        if getattr(args, key, None)
    }
    cluster = read_cluster(args)
    assert cluster is not None  # one is given
    return replace(model, **changed), cluster


def _pins(args: argparse.Namespace) -> Pins:
    """Pins of a search from flags."""
    for key in _NOT_WITH_AUTO:
        if getattr(args, key, None) not in (None, []):
            raise SpecError(
                f"--auto beside {'GRID.yaml' if key == 'yaml' else '--' + key.replace('_', '-')}: "
                "it chooses the grid itself, but for sizes and --order"
            )
    given: dict[str, Any] = {
        axis: whole(axis, getattr(args, axis), 1) for axis in AXES if getattr(args, axis)
    }
    return replace(_run_pins(args), order=args.order, **given)


def _run_pins(args: argparse.Namespace) -> Pins:
    """Pins of a step from flags."""
    asked = ParallelConfig(
        shard=args.shard or ParallelConfig().shard,
        recompute=args.recompute or ParallelConfig().recompute,
    )  # which checks them
    memory = None
    if args.max_memory is not None:
        try:
            memory = float(args.max_memory) * 1e9
        except ValueError:
            memory = math.nan
        if not 0 < memory < math.inf:
            raise SpecError(f"--max-memory {args.max_memory}: expected GB above 0")
    return Pins(
        microbatch=whole("microbatch", args.microbatch, 1) if args.microbatch else None,
        chunks=whole("chunks", args.chunks, 1) if args.chunks else None,
        recompute=args.recompute,
        max_memory=memory,
        base=ParallelConfig(shard=asked.shard),
    )


def given_step(
    spec: GridSpec, model: Model, cluster: Cluster, pins: Pins, shard: str | None = None
) -> StepCost:
    """The fastest way to run a step on a grid that fits in memory, or the one of least memory.

    Args:
        shard: what dp shares out; None: the weights too where the grid has dp_shard, as FSDP and
            HSDP do, else the optimizer's state.
    """
    shard = shard or ("weights" if spec.shape.get("dp_shard", 1) > 1 else pins.base.shard)
    copies = spec.shape.get("dp_replicate", 1) if shard != "none" else 1
    base = replace(pins.base, shard=shard, copies=copies, order=_order(spec))
    pins = replace(pins, base=base, **_sizes(spec, model))
    world_size = len(spec.grid_ranks)
    placement = of_spec(spec, cluster)
    all_of_it = pins.max_memory or cluster.device.memory
    for limit in dict.fromkeys((pins.max_memory, all_of_it)):
        found = fastest(model, world_size, cluster, replace(pins, max_memory=limit), placement)
        if found is not None:
            return found
    least = replace(
        pins, max_memory=math.inf, recompute=pins.recompute or RECOMPUTE[-1],
        microbatch=pins.microbatch or 1, chunks=pins.chunks or 1,
    )  # fmt: skip
    found = fastest(model, world_size, cluster, least, placement)
    assert found is not None  # any memory is enough
    return found


def _sizes(spec: GridSpec, model: Model) -> dict[str, Any]:
    """The sizes and order of a grid, as a step's model knows them."""
    regions = {region.name: dict(region.numbers) for region in spec.regions}
    dense = dict(regions["dense"])
    sizes: dict[str, Any] = {axis: dense.pop(axis, 1) for axis in ("tp", "cp", "pp")}
    sizes["dp"] = math.prod(
        dense.pop(axis) for axis in ("dp", "dp_replicate", "dp_shard") if axis in dense
    )
    if other := [axis for axis, size in dense.items() if size > 1 and axis != "ep"]:
        raise SpecError(
            f"axes.{other[0]}: a step's model knows tp, cp, ep, dp and pp; leave out --model"
        )
    if "expert" in regions and (model.experts or regions["expert"].get("ep", 1) > 1):
        sizes |= {"ep": regions["expert"].get("ep", 1), "etp": regions["expert"].get("etp", 1)}
    else:  # experts are split over tp as all else is
        sizes |= {"ep": 1, "etp": sizes["tp"] if model.experts else None}
    return sizes


def _order(spec: GridSpec) -> str:
    """The order of a grid, spelled as one of `ORDERS` if it is that of the axes above 1."""
    large = [axis for axis, size in spec.regions[0].numbers if size > 1]
    for order in ORDERS:
        if [axis for axis in order.split("-") if axis in large] == large:
            return order
    return spec.order


# ---- text ---------------------------------------------------------------------------------------


def tuning_text(tuning: Tuning, limit: float, top: int) -> list[str]:
    """The best grids as a table, and how to start the first."""
    best = tuning.best[0]
    lines = [
        f"{_title(best)} on {best.choice.world_size:,} devices of {best.cluster.name}",
        f"  {tuning.grids:,} grids are valid: {len(tuning.best):,} fit in {limit / 1e9:.0f} GB and "
        f"are near the best, {tuning.far:,} take far longer",
        "",
        f"  {'step':>8} {'tokens/s':>12} {'MFU':>6} {'memory':>7}  grid, and how a step is run",
    ]
    for cost in tuning.best[:top]:
        told = f"limited by {limits(cost)}" if cost is best else why_worse(cost, best)
        lines += [
            f"  {_time(cost.seconds):>8} {cost.tokens_per_second:12,.0f} {cost.mfu:6.1%} "
            f"{cost.memory.total / 1e9:4.0f} GB  {describe(cost.choice)}; {_way(cost)}",
            f"  {'':>8} {'':>12} {'':>6} {'':>7}  {told}",
        ]
    return lines


def spec_of(choice: ParallelConfig, model: Model) -> GridSpec:
    """The grid of a choice, dp still open."""
    sizes: dict[str, Any] = {axis: getattr(choice, axis) for axis in ("tp", "cp", "pp", "ep")}
    if model.experts and (choice.ep > 1 or choice.expert_tp != choice.tp):
        sizes["etp"] = choice.expert_tp
    return GridSpec.build(**sizes, order=choice.order)


def job_flags(args: argparse.Namespace) -> str:
    """The flags that say of which job a choice was made."""
    keys = ("model", "batch", "sequence", "cluster", "gpus_per_node", "shard", "max_memory")
    given = {key: getattr(args, key) for key in keys if getattr(args, key) is not None}
    return "".join(f" --{key.replace('_', '-')} {value}" for key, value in given.items())


def _way_comment(args: argparse.Namespace, choice: ParallelConfig | None) -> str:
    """The comment of a grid's file: its origin."""
    if choice is None:
        return f"of `commgrid plan{job_flags(args)}`"
    return (
        f"of `commgrid plan --auto{job_flags(args)} --world-size {choice.world_size}`; train with "
        f"microbatch {choice.microbatch}, chunks {choice.chunks}, recompute {choice.recompute}, "
        f"shard {choice.shard}"
    )


def start_lines(choice: ParallelConfig, job: str = "") -> list[str]:
    """How to start a grid, on the command line and in Python.

    Args:
        job: flags of the model and the cluster, from `job_flags`; then how a step is run follows.
    """
    sizes = {axis: getattr(choice, axis) for axis in ("tp", "cp", "pp", "ep")}
    given = {axis: str(size) for axis, size in sizes.items() if size > 1}
    if choice.expert_tp != choice.tp or choice.ep > 1:
        given["etp"] = str(choice.expert_tp)
    order = choice.order != ParallelConfig().order and choice.pp > 1
    flags = "".join(f" --{axis} {size}" for axis, size in given.items())
    code = "".join(f"{axis}={size}, " for axis, size in given.items()) + f"dp={choice.dp}"
    if order:
        flags, code = f"{flags} --order {choice.order}", f"{code}, order={choice.order!r}"
    way = f" --microbatch {choice.microbatch} --recompute {choice.recompute}" if job else ""
    if job and choice.pp > 1:
        way += f" --chunks {choice.chunks}"
    return [
        f"commgrid plan{flags} --world-size {choice.world_size}{job}{way}",
        f"commgrid.initialize({code})",
    ]


def step_text(cost: StepCost, limit: float) -> list[str]:
    """A step's time and memory in parts."""
    lines = [
        f"{_title(cost)} on {describe(cost.choice)} of {cost.cluster.name}",
        f"  {_way(cost)}",
        "",
        f"Step: {_time(cost.seconds)}, {cost.tokens_per_second:,.0f} tokens/s, MFU {cost.mfu:.1%}",
    ]
    for part, seconds in cost.parts.items():
        if seconds:
            lines.append(f"  {NAMES[part]:28} {_time(seconds):>10} {seconds / cost.seconds:7.1%}")
    memory = cost.memory.total
    fits = "" if memory <= limit else ": does not fit"
    lines += ["", f"Memory of a rank: {memory / 1e9:.1f} GB of {limit / 1e9:.0f}{fits}"]
    for part in MEMORY_PARTS:
        size = getattr(cost.memory, part)
        lines.append(f"  {part:28} {size / 1e9:7.1f} GB {size / memory:7.1%}")
    return [*lines, *_traffic_text(cost)]


def traffic_notes(cost: StepCost) -> dict[str, str]:
    """Traffic of a step by name, in words; with cp 1 dp's is dp_cp's, and dp_shard's likewise."""
    levels, found = cost.cluster.levels, {}
    for each in traffic(cost):
        told = f"{each.sent / 1e9:.3g} GB a step from each rank"
        if each.level:
            unit = levels[each.level - 1].name
            told += f", {each.link / 1e9:.3g} over a {unit}'s link"
        found[each.name] = told
    for name, other in (("dp_cp", "dp"), ("dp_shard_cp", "dp_shard")):
        if cost.choice.cp == 1 and name in found:
            found[other] = found[name]
    return found


def _traffic_text(cost: StepCost) -> list[str]:
    """Traffic of a step by name, as lines."""
    found = traffic(cost)
    if not found:
        return []
    lines = ["", "Sent by a rank in a step:"]
    levels = cost.cluster.levels
    for each in found:
        unit = levels[each.level - 1].name if each.level else ""
        over = f"   {each.link / 1e9:8.1f} GB over a {unit}'s link" if each.level else ""
        lines.append(f"  {each.name:28} {each.sent / 1e9:7.1f} GB{over}")
    return lines


def change_text(before: StepCost, after: StepCost) -> list[str]:
    """Compare a step on two grids."""
    seconds, memory = (
        after.seconds / before.seconds - 1,
        [cost.memory.total / 1e9 for cost in (before, after)],
    )
    lines = [
        f"a step of {before.model.name} on {before.cluster.name}",
        f"  takes {_time(before.seconds)} → {_time(after.seconds)} ({seconds:+.1%}), "
        f"{before.tokens_per_second:,.0f} → {after.tokens_per_second:,.0f} tokens/s",
        f"  needs {memory[0]:.1f} → {memory[1]:.1f} GB a rank, of "
        f"{before.cluster.device.memory / 1e9:.0f}",
        f"  {_way(before)} → {_way(after)}",
    ]
    for part, old in before.parts.items():
        new = after.parts[part]
        if abs(new - old) >= 1e-3 * before.seconds:
            lines.append(f"  {NAMES[part]:28} {_time(old):>10} → {_time(new)}")
    return lines


def _why_text(args: argparse.Namespace, cost: StepCost) -> list[str]:
    return as_lines(why(cost)) if args.why else []


def _title(cost: StepCost) -> str:
    model = cost.model
    return (
        f"{model.name}: {model.parameters / 1e9:,.1f} billion parameters, steps of {model.batch:,} "
        f"· {model.sequence:,} tokens,"
    )


def _way(cost: StepCost) -> str:
    choice = cost.choice
    told = [f"microbatch {choice.microbatch}"]
    if choice.pp > 1:
        told.append(f"chunks {choice.chunks}")
    told.append(f"recompute {choice.recompute}")
    if choice.shard != "optimizer":
        told.append(f"shard {choice.shard}")
    if choice.copies > 1:
        told.append(f"over {choice.sharers} ranks, {choice.copies} copies")
    if choice.order != ParallelConfig().order and choice.pp > 1:
        told.append(f"order {choice.order}")
    return ", ".join(told)


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


# ---- JSON ---------------------------------------------------------------------------------------


def _about(model: Model, cluster: Cluster, world_size: int, limit: float) -> dict[str, Any]:
    return {
        "world_size": world_size,
        "model": model.to_dict(),
        "cluster": cluster.to_dict(),
        "limit_gb": limit / 1e9,
    }


def step_json(cost: StepCost) -> dict[str, Any]:
    """A step for machines."""
    choice = cost.choice
    return {
        "axes": {axis: getattr(choice, axis) for axis in ("tp", "cp", "pp", "dp", "ep")},
        "etp": choice.expert_tp if cost.model.experts else None,
        "order": choice.order,
        "microbatch": choice.microbatch,
        "chunks": choice.chunks,
        "recompute": choice.recompute,
        "shard": choice.shard,
        "step_s": cost.seconds,
        "tokens_per_s": cost.tokens_per_second,
        "mfu": cost.mfu,
        "parts_s": cost.parts,
        "memory_gb": {part: getattr(cost.memory, part) / 1e9 for part in MEMORY_PARTS},
        "total_gb": cost.memory.total / 1e9,
        "sent_gb": {each.name: each.sent / 1e9 for each in traffic(cost)},
        "link_gb": {each.name: each.link / 1e9 for each in traffic(cost) if each.level},
    }


def _tuning_json(tuning: Tuning, top: int) -> dict[str, Any]:
    best = tuning.best[0]
    return {
        "grids": {"valid": tuning.grids, "near": len(tuning.best), "far": tuning.far},
        "best": [
            {**step_json(cost), "limits": limits(cost),
             "worse": None if cost is best else why_worse(cost, best)}
            for cost in tuning.best[:top]
        ],
    }  # fmt: skip


def _why_json(args: argparse.Namespace, cost: StepCost) -> dict[str, Any]:
    return {"why": [each.to_dict() for each in why(cost)]} if args.why else {}
