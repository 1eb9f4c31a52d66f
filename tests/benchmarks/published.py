"""Published training runs against the model of a step: time, and the place of the grid they used.

    python tests/benchmarks/published.py [--places | --json | --fit]

`tests/data/published_runs.yaml` holds the runs. Of each kind half, drawn by a fixed seed, calibrate
the constants in `Calibration`, chosen for the least mean error of logarithms. The others are
predicted. Where a paper leaves microbatch or virtual stages open, the model's best that fits
counts. Llama's paper does not say how it counts attention; half of `Model.flops_per_token`'s is
taken, as for causal attention.
"""

from __future__ import annotations

import argparse
import json
import math
import random
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
from commgrid.cost_model.step import StepCost, beyond, step_cost
from commgrid.cost_model.why import why_worse

DATA = Path(__file__).parents[1] / "data" / "published_runs.yaml"
KINDS = {"A100-80GB": "a100", "H100-80GB": "h100"}
SEED = 0
FITTED = ("memory", "eager", "compiled", "host", "fp8", "flash_compiled")
"""Constants that are calibrated beside the share of each device."""


@dataclass(frozen=True)
class Run:
    """A published run.

    Args:
        name: in the table.
        config: the grid that was used, and how a step was run as far as is known.
        microbatches, virtual_stages: that it may have had; None: any.
        recompute: what was computed again, where the paper says it.
        seconds: of its step.
        memory: bytes of the fullest rank, where they are published; 0: they are not.
        calibrates: whether constants are fitted to it.
    """

    name: str
    model: Model
    config: ParallelConfig
    microbatches: tuple[int, ...]
    virtual_stages: int | None
    recompute: str | None
    cluster: Cluster
    seconds: float
    memory: float = 0.0
    calibrates: bool = False

    @property
    def kind(self) -> str:
        """By which errors are reported."""
        if self.config.kernels == "eager":
            return "eager"
        if self.model.experts:
            return "experts"
        return "dense, 16 bits" if self.config.dtype == "bf16" else "dense, 8 bits"

    @property
    def beyond(self) -> str:
        """Why the model is not expected to hold; empty: it is."""
        return beyond(self.model, self.config)


def runs(seed: int = SEED) -> list[Run]:
    """All of them that give a grid, in the order of the file; of each kind half calibrates.

    Args:
        seed: of the draw.
    """
    found: list[Run] = []
    for section in yaml.safe_load(DATA.read_text()):
        if "gpus" in section["columns"]:
            rows = (
                dict(zip(section["columns"], values, strict=True)) for values in section["rows"]
            )
            found += [_run(section, {**section, **row}) for row in rows]
    draw, of_kind = random.Random(seed), {}
    for place, run in enumerate(found):
        if not run.beyond:
            of_kind.setdefault(run.kind, []).append(place)
    drawn = {one for places in of_kind.values() for one in draw.sample(places, len(places) // 2)}
    return [replace(run, calibrates=place in drawn) for place, run in enumerate(found)]


def _run(section: dict[str, Any], row: dict[str, Any]) -> Run:
    first = section["source"].split()[0]
    make = {
        "Narayanan": _gpt, "Korthikanti": _gpt, "Llama": _llama, "Nemotron-4": _nemotron,
        "Smith": _deepspeed, "BigScience": _deepspeed, "Megatron": _experts,
    }  # fmt: skip
    run = make.get(first, _recent)(section, row)
    return replace(run, name=section.get("name", run.name))


def _recent(section: dict[str, Any], row: dict[str, Any]) -> Run:
    """Run from a page whose rows hold every setting."""
    model = replace(MODELS[row["model"]], batch=row["batch"], sequence=row["sequence"])
    inner = row["tp"] * row["cp"] * row["pp"]
    keys = ("tp", "cp", "pp", "microbatch", "recompute", "dtype", "kernels", "zero_stage")
    config = ParallelConfig.of(
        dp=row["gpus"] // inner, ep=row.get("ep", 1), etp=1 if model.experts else None,
        dispatch=row.get("dispatch", "rows"), tp_overlap=row.get("tp_overlap", False),
        **{key: row[key] for key in keys},
    )  # fmt: skip
    stages = range(row["interleave"], 0, -1)  # uneven ones, as of 94 layers, are not modelled
    each = next(v for v in stages if replace(config, virtual_stages=v).refusal(model) is None)
    device = section.get("device", {})
    cluster = CLUSTERS[device.get("cluster") or row["cluster"]]
    if "name" in device:
        own = replace(
            cluster.accelerator, name=device["name"], memory=device["memory_gb"] * 1e9,
            memory_bandwidth=device["memory_gb_per_s"] * 1e9,
        )  # fmt: skip
        cluster = replace(cluster, device=own)
    return Run(
        f"{row['model']}, {cluster.accelerator.name}, {config.dtype}", model, config,
        (config.microbatch,), each, config.recompute, cluster,
        model.tokens / row["gpus"] / row["tokens_s_per_gpu"], row.get("memory_gib", 0) * 2**30,
    )  # fmt: skip


def _gpt(section: dict[str, Any], row: dict[str, Any]) -> Run:
    old = "tflops_per_gpu" in row
    model = Model(
        f"gpt-{row['params_b']}b", row["layers"], row["hidden"], row["heads"],
        section["vocabulary"], section["sequence"], row["batch"], biases=True, dropout=True,
        tied=True, attention="plain",
    )  # fmt: skip
    config = ParallelConfig.of(
        tp=row["tp"], pp=row["pp"], dp=row["gpus"] // row["tp"] // row["pp"],
        recompute="full" if old else "selective", sequence_parallel=not old, zero_stage=0,
        gradient_bytes=2 if old else 4, overlap=False,
    )  # fmt: skip
    work = model.recomputed_flops_per_token * model.tokens
    seconds = work / row["gpus"] / row["tflops_per_gpu"] / 1e12 if old else row["step_s"]
    who = "Narayanan 2021" if old else "Korthikanti 2022"
    return Run(
        f"{who}, GPT {row['params_b']:g}B", model, config, (1, 2, 4, 8, 16),
        row.get("interleave"), config.recompute, _cluster(section), seconds,
    )  # fmt: skip


def _deepspeed(section: dict[str, Any], row: dict[str, Any]) -> Run:
    """As Narayanan's, of a paper that says the seconds."""
    run = _gpt(section, {**row, "tflops_per_gpu": 1.0})
    microbatches = (row["microbatch"],) if "microbatch" in row else run.microbatches
    return replace(run, microbatches=microbatches, seconds=row["step_s"])


def _llama(section: dict[str, Any], row: dict[str, Any]) -> Run:
    model = replace(
        MODELS["llama3-405b"], sequence=row["sequence"], batch=row["batch_per_dp"] * row["dp"]
    )
    config = ParallelConfig.of(tp=row["tp"], cp=row["cp"], pp=row["pp"], dp=row["dp"])
    causal = model.flops_per_token - 1.5 * model.layers * model.score_flops
    seconds = causal * model.tokens / row["gpus"] / row["tflops_per_gpu"] / 1e12
    return Run(
        f"Llama 3 405B, {row['sequence'] // 1024}k", model, config, (1,), None, "none",
        _cluster(section), seconds,
    )  # fmt: skip


def _nemotron(section: dict[str, Any], row: dict[str, Any]) -> Run:
    model = replace(MODELS["nemotron-4-340b"], batch=row["batch"])
    config = ParallelConfig.of(tp=row["tp"], pp=row["pp"], dp=row["dp"])
    return Run(
        "Nemotron-4 340B", model, config, (1, 2, 4), None, None, _cluster(section), row["step_s"],
    )  # fmt: skip


def _experts(section: dict[str, Any], row: dict[str, Any]) -> Run:
    model = replace(MODELS[section["model"]], batch=row["batch"])
    config = ParallelConfig.of(
        tp=row["tp"], pp=row["pp"], dp=row["dp"], ep=row["ep"], etp=row["etp"],
        microbatch=row["microbatch"], recompute=row["recompute"],
        dispatch=section.get("dispatch", "rows"),
    )  # fmt: skip
    work = model.flops_per_token * model.tokens
    if "tokens_s_per_gpu" in row:
        seconds = model.tokens / row["gpus"] / row["tokens_s_per_gpu"]
    else:
        seconds = row.get("step_s") or work / row["gpus"] / row["tflops_per_gpu"] / 1e12
    return Run(
        model.name, model, config, (row["microbatch"],), row["interleave"], row["recompute"],
        _cluster(section), seconds,
    )  # fmt: skip


def _cluster(section: dict[str, Any]) -> Cluster:
    device = section["device"]
    cluster = CLUSTERS[KINDS[device["name"]]]
    if "network_gb_per_s" not in device:
        return cluster
    last = replace(cluster.levels[-1], bandwidth=device["network_gb_per_s"] * 1e9)
    return replace(cluster, levels=(*cluster.levels[:-1], last))


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
    """The configs that a run may have had."""
    layers = run.config.stage_layers(run.model).most
    for microbatch in run.microbatches:
        for count in [run.virtual_stages] if run.virtual_stages else range(1, layers + 1):
            for recompute in [run.recompute] if run.recompute else ["none", "selective"]:
                config = replace(
                    run.config, microbatch=microbatch, virtual_stages=count, recompute=recompute
                )
                if config.refusal(run.model) is None:
                    yield config


def fit(seed: int = SEED) -> Calibration:
    """The constants with the least mean error (of logarithms) where runs calibrate.

    One after another goes up or down in ever smaller steps while the error falls.
    """
    chosen = [run for run in runs(seed) if run.calibrates]

    def error(calibration: Calibration) -> float:
        return statistics.mean(
            abs(math.log(predict(run, calibration).seconds / run.seconds)) for run in chosen
        )

    found = CALIBRATION
    least = error(found)
    for step in (1.2, 1.08, 1.03, 1.01):
        for key in [*dict(found.gemm), *FITTED] * 2:
            for times in (step, 1 / step):
                while (now := error(tried := _changed(found, key, times))) < least - 1e-5:
                    found, least = tried, now
    return found


def _changed(calibration: Calibration, key: str, times: float) -> Calibration:
    """With one constant, or the share of one device, so many times as large."""
    if key in FITTED:
        return replace(calibration, **{key: getattr(calibration, key) * times})
    shares = {**dict(calibration.gemm)}
    shares[key] *= times
    return replace(calibration, gemm=tuple(shares.items()))


@dataclass(frozen=True)
class Compared:
    """A run beside its prediction."""

    run: Run
    cost: StepCost

    @property
    def error(self) -> float:
        return self.cost.seconds / self.run.seconds - 1

    @property
    def is_held(self) -> bool:
        """Whether it is neither calibrated on nor beyond the model."""
        return not (self.run.calibrates or self.run.beyond)


def place_of(run: Run) -> str:
    """Rank of a run's grid among the grids that fit, and the best one by the model."""
    keys = (
        "sequence_parallel", "zero_stage", "dp_replicate", "gradient_bytes", "overlap", "dtype",
        "kernels", "dispatch", "tp_overlap",
    )  # fmt: skip
    given = {key: getattr(run.config, key) for key in keys}
    if run.cluster.accelerator.name == "A100-80GB" and run.recompute:
        given["recompute"] = run.recompute
    found = search(run.model, run.config.world_size, run.cluster, **given)
    sizes = [(each.config.tp, each.config.cp, each.config.pp) for each in found.best]
    order, own = list(dict.fromkeys(sizes)), (run.config.tp, run.config.cp, run.config.pp)
    if own not in order:
        return f"none of {len(order)}; ours {describe(found.best[0].config)}"
    place = order.index(own) + 1
    if place == 1:
        return f"1 of {len(order)}"
    worse = why_worse(found.best[sizes.index(own)], found.best[0])
    return f"{place} of {len(order)}; ours {describe(found.best[0].config)}; {worse}"


def markdown(compared: list[Compared], places: bool) -> str:
    """The tables of published.md."""
    heads = ["run", "GPUs", "grid", "published", "predicted", "error", "MFU"]
    if places:
        heads.append("place of its grid, and ours")
    lines = [_row(heads), _row(["---"] * len(heads))]
    for each in compared:
        run = each.run
        mark = " (calibrated)" if run.calibrates else " (beyond)" if run.beyond else ""
        cells = [
            f"{run.name}{mark}", f"{run.config.world_size:,}", describe(run.config),
            f"{run.seconds:.2f} s", f"{each.cost.seconds:.2f} s", f"{each.error:+.1%}",
            f"{each.cost.mfu:.1%}", *([place_of(run)] if places else []),
        ]  # fmt: skip
        lines.append(_row(cells))
    lines += ["", _row(["not calibrated on", "runs", "median", "worst"]), _row(["---"] * 4)]
    kinds = dict.fromkeys(each.run.kind for each in compared if each.is_held)
    of_kind = {kind: [e for e in compared if e.is_held and e.run.kind == kind] for kind in kinds}
    of_kind["all of these"] = [each for each in compared if each.is_held]
    of_kind["beyond what is calibrated"] = [each for each in compared if each.run.beyond]
    for kind, some in of_kind.items():
        off = [abs(each.error) for each in some]
        numbers = [f"{len(off)}", f"{statistics.median(off):.1%}", f"{max(off):.1%}"]
        lines.append(_row([kind, *numbers]))
    return "\n".join(lines)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


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
    shown.add_argument("--places", action="store_true", help="search all grids of each (minutes)")
    shown.add_argument("--json", action="store_true", help="one JSON object")
    shown.add_argument("--fit", action="store_true", help="the constants, calibrated anew")
    args = parser.parse_args()
    if args.fit:
        found = fit()
        print(json.dumps({"gemm": dict(found.gemm), **{k: getattr(found, k) for k in FITTED}}))
        return
    compared = [Compared(run, predict(run)) for run in runs()]
    print(json.dumps(as_json(compared)) if args.json else markdown(compared, args.places))


if __name__ == "__main__":
    main()
