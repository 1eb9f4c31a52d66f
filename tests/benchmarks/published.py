"""Published training runs against the model of a step: time, and the place of the grid they used.

    python tests/benchmarks/published.py [--markdown | --json | --fit]

`tests/data/published_runs.yaml` holds the runs. Every third of them, in its order, calibrates one
number for each device: the reached share of the peak of matrix products, chosen for no mean error.
All others are predicted. Where a paper leaves microbatch or virtual stages open, the model's best
that fits counts. Llama's paper does not say how it counts attention; half of
`Model.flops_per_token`'s is taken, as for causal attention.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[2]))

from commgrid.cost_model.calibration import CALIBRATION, Calibration
from commgrid.cost_model.cluster import CLUSTERS, Cluster
from commgrid.cost_model.config import ParallelConfig
from commgrid.cost_model.layer import Machine
from commgrid.cost_model.model import MODELS, Model
from commgrid.cost_model.search import describe, search
from commgrid.cost_model.step import StepCost, step_cost
from commgrid.cost_model.why import why_worse

DATA = Path(__file__).parents[1] / "data" / "published_runs.yaml"
KINDS = {"A100-80GB": "a100", "H100-80GB": "h100", "GB200-186GB": "gb200"}
EVERY = 3


@dataclass(frozen=True)
class Run:
    """A published run.

    Args:
        name: of it, as the table shows it.
        config: the grid that was used, and how a step was run as far as is known.
        microbatches, virtual_stages: that it may have had; None: any.
        recompute: what was computed again, where the paper says it.
        seconds: of its step.
        beyond: why the model is not expected to hold; empty: it is.
        calibrates: whether constants are fitted to it.
        added: whether it was predicted once, after all else was settled.
    """

    name: str
    model: Model
    config: ParallelConfig
    microbatches: tuple[int, ...]
    virtual_stages: int | None
    recompute: str | None
    cluster: Cluster
    seconds: float
    beyond: str
    calibrates: bool
    added: bool = False


def runs(first: int = 0) -> list[Run]:
    """All of them that give a grid, in the order of the file; every third calibrates.

    Args:
        first: that calibrates.
    """
    found: list[Run] = []
    for section in yaml.safe_load(DATA.read_text()):
        if "gpus" not in section["columns"]:
            continue
        for values in section["rows"]:
            row = dict(zip(section["columns"], values, strict=True))
            is_apart = section.get("beyond") or section.get("added")
            calibrates = len(found) % EVERY == first and not is_apart
            found.append(_run(section, row, calibrates))
    return found


def _run(section: dict[str, Any], row: dict[str, Any], calibrates: bool) -> Run:
    if "added" in section:
        run = (_experts if "model" in section else _deepspeed)(section, row, calibrates)
        return replace(run, name=section["added"], added=True)
    first = section["source"].split()[0]
    make = {"Narayanan": _gpt, "Korthikanti": _gpt, "Llama": _llama, "Nemotron-4": _nemotron}
    return make.get(first, _experts)(section, row, calibrates)


def _gpt(section: dict[str, Any], row: dict[str, Any], calibrates: bool) -> Run:
    old = "tflops_per_gpu" in row
    model = Model(
        f"gpt-{row['params_b']}b", row["layers"], row["hidden"], row["heads"],
        section["vocabulary"], section["sequence"], row["batch"], biases=True, dropout=True,
        tied=True, attention="plain",
    )  # fmt: skip
    config = ParallelConfig(
        tp=row["tp"], pp=row["pp"], dp=row["gpus"] // row["tp"] // row["pp"],
        recompute="full" if old else "selective", sequence_parallel=not old, zero_stage=0,
        gradient_bytes=2 if old else 4, overlap=False,
    )  # fmt: skip
    work = model.recomputed_flops_per_token * model.tokens
    seconds = work / row["gpus"] / row["tflops_per_gpu"] / 1e12 if old else row["step_s"]
    who = "Narayanan 2021" if old else "Korthikanti 2022"
    return Run(
        f"{who}, GPT {row['params_b']:g}B", model, config, (1, 2, 4, 8, 16),
        row.get("interleave"), config.recompute, _cluster(section), seconds, "", calibrates,
    )  # fmt: skip


def _deepspeed(section: dict[str, Any], row: dict[str, Any], calibrates: bool) -> Run:
    """As Narayanan's, of a paper that says the seconds."""
    run = _gpt(section, {**row, "tflops_per_gpu": 1.0}, calibrates)
    microbatches = (row["microbatch"],) if "microbatch" in row else run.microbatches
    return replace(run, microbatches=microbatches, seconds=row["step_s"])


def _llama(section: dict[str, Any], row: dict[str, Any], calibrates: bool) -> Run:
    model = replace(
        MODELS["llama3-405b"], sequence=row["sequence"], batch=row["batch_per_dp"] * row["dp"]
    )
    config = ParallelConfig(tp=row["tp"], cp=row["cp"], pp=row["pp"], dp=row["dp"])
    causal = model.flops_per_token - 1.5 * model.layers * model.score_flops
    seconds = causal * model.tokens / row["gpus"] / row["tflops_per_gpu"] / 1e12
    return Run(
        f"Llama 3 405B, {row['sequence'] // 1024}k", model, config, (1,), None, "none",
        _cluster(section), seconds, "", calibrates,
    )  # fmt: skip


def _nemotron(section: dict[str, Any], row: dict[str, Any], calibrates: bool) -> Run:
    model = replace(MODELS["nemotron-4-340b"], batch=row["batch"])
    config = ParallelConfig(tp=row["tp"], pp=row["pp"], dp=row["dp"])
    return Run(
        "Nemotron-4 340B", model, config, (1, 2, 4), None, None, _cluster(section), row["step_s"],
        "", calibrates,
    )  # fmt: skip


def _experts(section: dict[str, Any], row: dict[str, Any], calibrates: bool) -> Run:
    model = replace(MODELS[section["model"]], batch=row["batch"])
    config = ParallelConfig(
        tp=row["tp"], pp=row["pp"], dp=row["dp"], ep=row["ep"], etp=row["etp"],
        microbatch=row["microbatch"], recompute=row["recompute"],
    )  # fmt: skip
    work = model.flops_per_token * model.tokens
    if "tokens_s_per_gpu" in row:
        seconds = model.tokens / row["gpus"] / row["tokens_s_per_gpu"]
    else:
        seconds = row.get("step_s") or work / row["gpus"] / row["tflops_per_gpu"] / 1e12
    return Run(
        model.name, model, config, (row["microbatch"],), row["interleave"], row["recompute"],
        _cluster(section), seconds, section.get("beyond", ""), calibrates,
    )  # fmt: skip


def _cluster(section: dict[str, Any]) -> Cluster:
    device = section["device"]
    cluster = CLUSTERS[KINDS[device["name"]]]
    levels = list(cluster.levels)
    if "network_gb_per_s" in device:
        levels[-1] = replace(levels[-1], bandwidth=device["network_gb_per_s"] * 1e9)
    if "per_rack" in device:
        levels[1] = replace(levels[1], size=device["per_rack"] // cluster.per_node)
    return cluster if tuple(levels) == cluster.levels else replace(cluster, levels=tuple(levels))


def predict(run: Run, calibration: Calibration = CALIBRATION) -> StepCost:
    """The step of a run; unknown choices are the best that fit.

    Where nothing fits, as papers free what the model counts, memory is left out of account.
    """
    machine = Machine(run.cluster, calibration)
    costs = [
        step_cost(run.model, config, run.cluster, machine=machine) for config in _possible(run)
    ]
    fitting = [cost for cost in costs if cost.memory.total <= run.cluster.device.memory]
    return min(fitting or costs, key=lambda cost: cost.seconds)


def _possible(run: Run) -> Iterator[ParallelConfig]:
    layers = run.config.stage_layers(run.model).most
    for microbatch in run.microbatches:
        for count in [run.virtual_stages] if run.virtual_stages else range(1, layers + 1):
            for recompute in [run.recompute] if run.recompute else ["none", "selective"]:
                config = replace(
                    run.config, microbatch=microbatch, virtual_stages=count, recompute=recompute
                )
                if config.refusal(run.model) is None:
                    yield config


def fit(first: int = 0) -> Calibration:
    """The constants that leave no mean error (of logarithms) where runs calibrate."""
    shares = []
    for device, kind in KINDS.items():
        if device not in dict(CALIBRATION.gemm):
            continue
        low, high = 0.3, 1.0
        chosen = [run for run in runs(first) if run.calibrates and run.cluster is CLUSTERS[kind]]
        for _ in range(20):
            middle = (low + high) / 2
            tried = replace(CALIBRATION, gemm=((device, middle),))
            slow = sum(math.log(predict(run, tried).seconds / run.seconds) for run in chosen) > 0
            low, high = (middle, high) if slow else (low, middle)
        shares.append((device, round(middle, 3)))
    return replace(CALIBRATION, gemm=tuple(shares))


@dataclass(frozen=True)
class Compared:
    """A run beside its prediction, and beside the grids that the search finds."""

    run: Run
    cost: StepCost
    place: int | None
    of: int
    best: StepCost
    reason: str

    @property
    def error(self) -> float:
        return self.cost.seconds / self.run.seconds - 1


def compare(run: Run) -> Compared:
    """A run's prediction, and the place of its grid among all fitting ones."""
    old = run.cluster.device.name == "A100-80GB"
    keys = ("sequence_parallel", "zero_stage", "dp_replicate", "gradient_bytes", "overlap")
    given = {key: getattr(run.config, key) for key in keys}
    if old and run.recompute:
        given["recompute"] = run.recompute
    found = search(run.model, run.config.world_size, run.cluster, **given)
    sizes = [(each.config.tp, each.config.cp, each.config.pp) for each in found.best]
    order = list(dict.fromkeys(sizes))
    own = (run.config.tp, run.config.cp, run.config.pp)
    place = order.index(own) + 1 if own in order else None
    best, reason = found.best[0], ""
    if place is not None and place > 1:
        reason = why_worse(found.best[sizes.index(own)], best)
    return Compared(run, predict(run), place, len(order), best, reason)


def errors(compared: list[Compared]) -> list[float]:
    """Errors of runs neither calibrated on, nor beyond the model, nor added later."""
    return [abs(c.error) for c in compared if _is_held(c.run)]


def _is_held(run: Run) -> bool:
    return not (run.calibrates or run.beyond or run.added)


def markdown(compared: list[Compared]) -> str:
    """The table of docs/choosing.md."""
    lines = [
        "| run | GPUs | grid | published | predicted | error | MFU | place of its grid, and ours |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in compared:
        run, best = each.run, each.best
        place = f"{each.place} of {each.of}" if each.place else f"none of {each.of}"
        if each.place is None or each.place > 3:
            place += f"; ours {describe(best.config)}; {each.reason or 'far slower'}"
        mark = " (calibrated)" if run.calibrates else " (beyond)" if run.beyond else ""
        mark = " (added)" if run.added else mark
        lines.append(
            f"| {run.name}{mark} | {run.config.world_size:,} | {describe(run.config)} | "
            f"{run.seconds:.2f} s | {each.cost.seconds:.2f} s | {each.error:+.1%} | "
            f"{each.cost.mfu:.1%} | {place} |"
        )
    held = errors(compared)
    lines += [
        "",
        f"{len(held)} runs that nothing was calibrated on: {statistics.median(held):.1%} off in "
        f"the median, {max(held):.1%} at worst. Calibrated on "
        f"{sum(c.run.calibrates for c in compared)}. "
        + " ".join(_elsewhere(first) for first in range(1, EVERY)),
    ]
    return "\n".join(lines)


def _elsewhere(first: int) -> str:
    """How far off the others are where another third calibrates."""
    calibration = fit(first)
    held = [run for run in runs(first) if _is_held(run)]
    off = [abs(predict(run, calibration).seconds / run.seconds - 1) for run in held]
    return (
        f"Calibrated on the third from run {first + 1} on instead: {statistics.median(off):.1%}, "
        f"{max(off):.1%} at worst."
    )


def as_json(compared: list[Compared]) -> dict[str, Any]:
    from tests.benchmarks.report import Row, machine, versions

    rows = [
        Row(
            f"{c.run.name}, {c.run.config.world_size} GPUs", "step", "s", c.cost.seconds,
            "published", c.run.seconds, c.cost.seconds / c.run.seconds, None,
        )
        for c in compared
    ]  # fmt: skip
    return {"machine": machine(), "versions": versions(), "rows": [asdict(row) for row in rows]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--markdown", action="store_true", help="the table of the documentation")
    shown.add_argument("--json", action="store_true", help="one JSON object")
    shown.add_argument("--fit", action="store_true", help="the constants, calibrated anew")
    args = parser.parse_args()
    if args.fit:
        print(json.dumps(dict(fit().gemm)))
        return
    compared = [compare(run) for run in runs()]
    print(json.dumps(as_json(compared)) if args.json else markdown(compared))


if __name__ == "__main__":
    main()
