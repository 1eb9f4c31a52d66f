"""`commgrid plan --model …`: a training step on a grid, and with `--auto` the best grids."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from commgrid.cli.commands.plan_options import OF_A_STEP
from commgrid.cli.grid_options import (
    GRID_FLAGS,
    flag_of,
    is_given,
    read_cluster,
    read_spec,
    refuse_unused,
    resolve,
)
from commgrid.cli.output import give, write_grid, written
from commgrid.cost_model.cluster import CLUSTERS, Cluster
from commgrid.cost_model.config import ORDERS, RECOMPUTE, ParallelConfig
from commgrid.cost_model.crossing import check_within
from commgrid.cost_model.memory import MEMORY_PARTS
from commgrid.cost_model.model import MODELS, Model, find_model
from commgrid.cost_model.search import AXES, Found, describe, fastest, memory_limit, search
from commgrid.cost_model.step import StepCost, beyond, traffic
from commgrid.cost_model.why import NAMES, as_lines, limits, why, why_worse
from commgrid.errors import SpecError
from commgrid.planning.spec import GridSpec
from commgrid.viz.figure import SUFFIXES, drawing, save
from commgrid.viz.steps_picture import draw_steps
from commgrid.wording import several

_SPELLED = {"yaml": "GRID.yaml", "changes": "--set"}
_OF_A_START = ("create", "connect", "share")


def run(args: argparse.Namespace, groups: Callable[[GridSpec, Cluster], str]) -> int:
    """Of `commgrid plan` with `--model` or `--auto`.

    Args:
        groups: text about the groups of a given grid.
    """
    model, cluster = read_job(args)
    if args.etp is not None and not model.experts:
        raise SpecError(f"--etp {args.etp}: model {model.name} has no experts; leave it out")
    max_memory = None if args.max_memory is None else args.max_memory * 1e9
    fixed = {key: getattr(args, key) for key in OF_A_STEP if is_given(args, key)}
    if not args.auto:
        refuse_unused(args, ["top"], "goes with --auto")
        refuse_unused(args, _OF_A_START, "is about a grid's start; leave out --model")
        given = read_spec(args)
        spec = resolve(given, args.world_size)
        check_within(spec, cluster)
        cost = given_step(spec, model, cluster, max_memory=max_memory, **fixed)
        _write(args, given, [cost], _comment(args, cost.config))
        limit = max_memory or cluster.accelerator.memory
        give(
            args,
            lambda: {**_about(model, cluster, cost.config.world_size, limit),
                     "step": step_json(cost), **_why_json(args, cost)},
            lambda: "\n".join([
                *step_text(cost, limit), *_why_text(args, cost), "",
                groups(spec, cluster), *written(args.output),
            ]),
        )  # fmt: skip
        return 0
    for key in GRID_FLAGS:
        if key not in (*AXES, "order", "world_size") and is_given(args, key):
            raise SpecError(
                f"--auto beside {_SPELLED.get(key, flag_of(key))}: it chooses the grid itself, but "
                "for sizes and --order; leave one of them out"
            )
    if args.world_size is None:
        raise SpecError("--world-size: needed; --auto fills so many devices")
    fixed |= {key: getattr(args, key) for key in (*AXES, "order") if is_given(args, key)}
    found = search(model, args.world_size, cluster, max_memory=max_memory, **fixed)
    limit, top = memory_limit(cluster, max_memory), args.top or 5
    best = found.best[0].config
    _write(args, GridSpec.build(**asked(best)), found.best[:top], _comment(args, best))
    give(
        args,
        lambda: {**_about(model, cluster, args.world_size, limit), **_found_json(found, top),
                 **_why_json(args, found.best[0])},
        lambda: "\n".join([
            *found_text(found, limit, top), "", *start_lines(best, job_flags(args), _file(args)),
            *_why_text(args, found.best[0]), *written(args.output),
        ]),
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
    for key, known in (("model", MODELS), ("cluster", CLUSTERS)):
        if getattr(args, key) is None:
            raise SpecError(
                f"--{key}: needed for the time and memory of a step; give {', '.join(known)}, or a "
                "YAML file"
            )
    model = find_model(args.model)
    changed = {key: getattr(args, key) for key in ("batch", "sequence") if is_given(args, key)}
    cluster = read_cluster(args)
    assert cluster is not None  # one is given
    return replace(model, **changed), cluster


def given_step(
    spec: GridSpec, model: Model, cluster: Cluster, *, max_memory: float | None = None, **fixed: Any
) -> StepCost:
    """The fastest way to run a step on a grid that fits in memory, or the one of least memory.

    Args:
        max_memory: bytes; None: `HEADROOM` of the device's, or where nothing fits there, all.
        **fixed: fields of `ParallelConfig` that are given. Weights are sharded, ZeRO stage 3,
            where the grid has dp_shard, as FSDP and HSDP do, unless it is given.
    """
    fixed.setdefault("zero_stage", 3 if spec.shape.get("dp_shard", 1) > 1 else 1)
    for limit in dict.fromkeys((max_memory, max_memory or cluster.accelerator.memory)):
        found = fastest(model, spec, cluster, max_memory=limit, **fixed)
        if found is not None:
            return found
    least = {"recompute": RECOMPUTE[-1], "microbatch": 1, "virtual_stages": 1, **fixed}
    found = fastest(model, spec, cluster, max_memory=math.inf, **least)
    assert found is not None  # any memory is enough
    return found


# ---- text ---------------------------------------------------------------------------------------


def found_text(found: Found, limit: float, top: int) -> list[str]:
    """The best grids as a table, and how to start the first."""
    best, within = found.best[0], f"in {limit / 1e9:.0f} GB and"
    fit = f"fits {within} is" if len(found.best) == 1 else f"fit {within} are"
    lines = [
        f"{_title(best)} on {best.config.world_size:,} devices of {best.cluster.name}",
        f"  {several(found.grids, 'grid')} {'is' if found.grids == 1 else 'are'} valid: "
        f"{len(found.best):,} {fit} near the best, {found.far:,} take far longer, "
        f"{found.grids - len(found.best) - found.far:,} do not fit",
        *_program(best),
        "",
        f"  {'step':>8} {'tokens/s':>12} {'MFU':>6} {'memory':>7}  grid, and how a step is run",
    ]
    for cost in found.best[:top]:
        told = f"limited by {limits(cost)}" if cost is best else why_worse(cost, best)
        lines += [
            f"  {_time(cost.seconds):>8} {cost.tokens_per_second:12,.0f} {cost.mfu:6.1%} "
            f"{cost.memory.total / 1e9:4.0f} GB  {describe(cost.config, cost.model)}; {_way(cost)}",
            f"  {'':>8} {'':>12} {'':>6} {'':>7}  {told}",
        ]
    return lines


def asked(config: ParallelConfig, **data: int) -> dict[str, Any]:
    """The arguments of `initialize` that make a config's grid; dp fills the ranks, or is `data`."""
    given: dict[str, Any] = {
        axis: size for axis in ("tp", "cp", "pp", "ep") if (size := getattr(config, axis)) > 1
    }
    if config.expert_tp != config.tp or config.ep > 1:
        given["etp"] = config.expert_tp
    given |= data
    if config.order != ORDERS[0] and config.pp > 1:
        given["order"] = config.order
    return given


def job_flags(args: argparse.Namespace) -> str:
    """The flags that say of which job a config was made."""
    told = ("microbatch", "virtual_stages", "recompute")  # by `start_lines`
    keys = ("model", "batch", "sequence", "cluster", "gpus_per_node", *OF_A_STEP, "max_memory")
    given = {
        key: getattr(args, key)
        for key in keys if key not in told and getattr(args, key) is not None
    }  # fmt: skip
    return "".join(_as_flag(key, value) for key, value in given.items())


def _as_flag(key: str, value: Any) -> str:
    flag = flag_of(key)
    if isinstance(value, bool):
        return f" {flag}" if value else f" --no-{flag[2:]}"
    return f" {flag} {f'{value:g}' if isinstance(value, float) else shlex.quote(str(value))}"


def _comment(args: argparse.Namespace, config: ParallelConfig) -> str:
    """The comment of a grid's file: its origin, and how a step is run."""
    way = {
        "microbatch": config.microbatch, "virtual stages": config.virtual_stages,
        "recompute": config.recompute, "ZeRO stage": config.zero_stage,
    }  # fmt: skip
    told = ", ".join(f"{what} {value}" for what, value in way.items())
    made = f"of `commgrid {shlex.join(args.words)}`; train with {told}"
    return f"{made}\nits step: {start_lines(config, job_flags(args), _file(args))[0]}"


def _file(args: argparse.Namespace) -> str:
    """The first YAML file that is written, or nothing."""
    return next((str(path) for path in args.output if path.suffix not in SUFFIXES), "")


def start_lines(config: ParallelConfig, job: str = "", file: str = "") -> list[str]:
    """How to start a grid, on the command line and in Python.

    Args:
        job: flags of the model and the cluster, from `job_flags`; then how a step is run follows.
        file: with the grid, in place of its sizes.
    """
    flags = "".join(f" --{key} {value}" for key, value in asked(config).items())
    code = ", ".join(f"{key}={value!r}" for key, value in asked(config, dp=config.dp).items())
    if file:
        flags, code = f" {shlex.quote(file)}", f"config={file!r}"
    way = f" --microbatch {config.microbatch} --recompute {config.recompute}" if job else ""
    if job and config.zero_stage != 1 and "--zero-stage" not in job:
        way += f" --zero-stage {config.zero_stage}"
    if job and config.pp > 1:
        way += f" --virtual-stages {config.virtual_stages}"
    return [
        f"commgrid plan{flags} --world-size {config.world_size}{job}{way}",
        f"commgrid.initialize({code})",
    ]


def step_text(cost: StepCost, limit: float) -> list[str]:
    """A step's time and memory in parts."""
    lines = [
        f"{_title(cost)} on {describe(cost.config, cost.model)} of {cost.cluster.name}",
        f"  {_way(cost)}",
        *_program(cost),
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
        size = cost.memory.parts[part]
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
        if cost.config.cp == 1 and name in found:
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
        f"{before.cluster.accelerator.memory / 1e9:.0f}",
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
    config = cost.config
    told = [f"microbatch {config.microbatch}"]
    if config.pp > 1:
        told.append(f"virtual stages {config.virtual_stages}")
    told.append(f"recompute {config.recompute}")
    if config.recompute_layers is not None:
        told[-1] += f" of {several(config.recompute_layers, 'layer')} a stage"
    if config.zero_stage != 1:
        told.append(f"ZeRO stage {config.zero_stage}")
    if config.dp_replicate > 1:
        told.append(f"over {config.shard_size} ranks, {config.dp_replicate} copies")
    if config.order != ORDERS[0] and config.pp > 1:
        told.append(f"order {config.order}")
    return ", ".join(told)


def _program(cost: StepCost) -> list[str]:
    """The program that a step's time is of, and whether its like was calibrated on."""
    config, model = cost.config, cost.model
    told = [f"{config.dtype} products", f"{config.kernels} kernels"]
    if config.tp > 1:
        told.append("with" if config.sequence_parallel else "without")
        told[-1] += " sequence parallelism"
    if config.tp > 1 and config.tp_overlap:
        told.append("tp behind the products")
    if config.world_size > config.tp * config.pp:
        told.append(f"{8 * config.gradient_bytes}-bit gradients")
        told.append("summed behind the backward" if config.overlap else "summed after it")
    if model.experts and config.ep > 1:
        sent = {"rows": "a row for each choice", "deepep": "a token once to a node, as DeepEP"}
        told.append(sent[config.dispatch])
        if config.imbalance > 1:
            told.append(f"the fullest rank has {config.imbalance:g} times the mean's tokens")
    if config.pp > 1 and config.schedule != "1f1b":
        told.append(config.schedule)
    lines = [f"  of a program with {', '.join(told)}"]
    if why_not := beyond(model, config):
        lines.append(f"  beyond what is calibrated: {why_not}")
    return lines


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
    config = cost.config
    return {
        "axes": {axis: getattr(config, axis) for axis in ("tp", "cp", "pp", "dp", "ep")},
        "etp": config.expert_tp if cost.model.experts else None,
        "order": config.order,
        **{key: getattr(config, key) for key in OF_A_STEP},
        "beyond": beyond(cost.model, config),
        # By their names until release 0.3.
        "chunks": config.virtual_stages,
        "shard": {0: "none", 1: "optimizer", 3: "weights"}[config.zero_stage],
        "step_s": cost.seconds,
        "tokens_per_s": cost.tokens_per_second,
        "mfu": cost.mfu,
        "parts_s": cost.parts,
        "memory_gb": {part: size / 1e9 for part, size in cost.memory.parts.items()},
        "total_gb": cost.memory.total / 1e9,
        "sent_gb": {each.name: each.sent / 1e9 for each in traffic(cost)},
        "link_gb": {each.name: each.link / 1e9 for each in traffic(cost) if each.level},
    }


def _found_json(found: Found, top: int) -> dict[str, Any]:
    best = found.best[0]
    return {
        "grids": {"valid": found.grids, "near": len(found.best), "far": found.far},
        "best": [
            {**step_json(cost), "limits": limits(cost),
             "worse": None if cost is best else why_worse(cost, best)}
            for cost in found.best[:top]
        ],
    }  # fmt: skip


def _why_json(args: argparse.Namespace, cost: StepCost) -> dict[str, Any]:
    return {"why": [asdict(each) for each in why(cost)]} if args.why else {}
