"""`commgrid plan --model …` and `--auto` on a command line."""

import json
import re
from pathlib import Path

import pytest

from commgrid.cli import main
from commgrid.cli.commands.plan_model import start_lines
from commgrid.cost_model.config import ORDERS, ParallelConfig
from commgrid.cost_model.model import MODELS
from commgrid.planning.spec import GridSpec

GPT = ["--model", "gpt-175b", "--batch", "512", "--cluster", "h100", "--world-size", "256"]


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["plan", *argv]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["plan", *argv]) == 2
    return capsys.readouterr().err


def found(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, object]:
    loaded = json.loads(said(capsys, *argv, "--json"))
    assert isinstance(loaded, dict)
    return loaded


def test_the_last_lines_start_the_best_grid(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "--auto", *GPT).strip().split("\n")
    best = re.search(r"GB  (.+?); microbatch", "\n".join(lines))
    assert best is not None
    command, code = lines[-2:]
    grid_alone = command.partition(" --model")[0]
    assert said(capsys, *grid_alone.split()[2:]).startswith("256 ranks")
    chosen = found(capsys, "--auto", *GPT)["best"]
    again = found(capsys, *command.split()[2:])["step"]
    assert isinstance(chosen, list)
    assert again == {key: chosen[0][key] for key in again}  # type: ignore[union-attr]
    sizes = eval(code.replace("commgrid.initialize", "dict"))
    spec = GridSpec.build(**sizes).resolve(256)
    told = dict(pair.split(" ") for pair in best[1].split(" · "))
    assert {axis: spec.layout("dense").shape[axis] for axis in told} == {
        axis: int(size) for axis, size in told.items()
    }


def test_experts_and_order_are_started_too() -> None:
    choice = ParallelConfig.of(tp=2, pp=4, dp=4, ep=2, etp=1, order=ORDERS[1])
    command, code = start_lines(choice)
    assert command == (
        "commgrid plan --tp 2 --pp 4 --ep 2 --etp 1 --order tp-cp-ep-pp-dp --world-size 32"
    )
    assert code == ("commgrid.initialize(tp=2, pp=4, ep=2, etp=1, dp=4, order='tp-cp-ep-pp-dp')")
    sizes = eval(code.replace("commgrid.initialize", "dict"))
    assert GridSpec.build(**sizes).resolve(32).world_size == 32


def test_a_given_grid_is_run_as_well_as_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """The same step as the search finds for these sizes, and as of a preset with them."""
    flags = found(capsys, *GPT, "--tp", "8", "--pp", "4")["step"]
    searched = found(capsys, "--auto", *GPT, "--tp", "8", "--pp", "4", "--cp", "1", "--order",
                     ORDERS[0], "--zero-stage", "1")["best"]  # fmt: skip
    assert isinstance(flags, dict)
    assert isinstance(searched, list)
    assert flags == {key: value for key, value in searched[0].items() if key in flags}
    for name in ("deepspeed", "megatron"):
        preset = found(capsys, *GPT, "--preset", name, "--tp", "8", "--pp", "4")["step"]
        assert preset == flags


def test_a_step_with_fsdp_shares_out_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    """The presets fsdp and hsdp were reckoned as if every rank held all weights."""
    job = ["--model", "llama3-8b", "--cluster", "h100", "--world-size", "64"]
    asked = found(capsys, *job, "--zero-stage", "3")["step"]
    for preset, ranks in (("fsdp", 64), ("hsdp", 8)):  # hsdp shards over 8, and copies over nodes
        step = found(capsys, *job, "--preset", preset)["step"]
        assert isinstance(step, dict)
        assert step["shard"] == "weights"
        if preset == "fsdp":
            assert step["memory_gb"] == asked["memory_gb"]  # type: ignore[index]
        held = 4 * MODELS["llama3-8b"].parameters / ranks / 1e9  # fp32 gradients
        assert step["memory_gb"]["gradients"] == pytest.approx(held, rel=1e-3)
    kept = found(capsys, *job, "--preset", "fsdp", "--zero-stage", "1")["step"]
    assert kept["shard"] == "optimizer"  # type: ignore[index]
    copies = found(capsys, *job, "--preset", "ddp")["step"]
    assert copies["shard"] == "optimizer"  # type: ignore[index]


def test_diff_compares_the_steps_of_two_grids(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["--model", "llama3-70b", "--cluster", "h100", "--world-size", "256"]
    grids = [["--tp", "8", "--pp", "4"], ["--tp", "4", "--pp", "8"]]
    steps = [found(capsys, *job, *grid)["step"] for grid in grids]
    sets = ["--set", "axes.tp=8", "--set", "axes.pp=4"]
    before = ["megatron", "--set", "axes.tp=4", "--set", "axes.pp=8"]
    assert main(["diff", *before, *job, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["steps"]["after"] == steps[1]
    assert main(["diff", "megatron", *sets, *job]) == 0
    text = capsys.readouterr().out
    assert "a step of llama3-70b on h100" in text
    assert re.search(rf" → {steps[0]['total_gb']:.1f} GB a rank", text)  # type: ignore[index]
    assert main(["diff", "megatron", *sets, "--world-size", "256", "--model", "llama3-70b"]) == 2
    assert "--cluster: needed" in capsys.readouterr().err


def test_what_does_not_fit_is_shown_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, *GPT, "--tp", "8", "--max-memory", "40")
    assert re.search(r"Memory of a rank: \d+\.\d GB of 40: does not fit", text)
    assert "recompute full" in text


def test_flags_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    told = found(
        capsys, "--auto", *GPT, "--tp", "8", "--order", ORDERS[1], "--microbatch", "2",
        "--recompute", "full", "--zero-stage", "3", "--max-memory", "50", "--top", "3",
    )  # fmt: skip
    best = told["best"]
    assert isinstance(best, list)
    assert 1 <= len(best) <= 3
    for each in best:
        assert each["axes"]["tp"] == 8
        assert (each["order"], each["microbatch"]) == (ORDERS[1], 2)
        assert (each["recompute"], each["zero_stage"], each["shard"]) == ("full", 3, "weights")
        assert each["total_gb"] <= 50
    assert told["limit_gb"] == 50
    assert told["model"]["batch"] == 512  # type: ignore[index]


def test_why_has_every_number(capsys: pytest.CaptureFixture[str]) -> None:
    """Each time and each memory that is printed stands again below, with formula and source."""
    text = said(capsys, *GPT, "--tp", "8", "--pp", "4", "--why")
    shown, _, why = text.partition("Where these numbers are from:")
    parts = re.findall(r"^  (?:.+?) {2,}([\d.]+ GB) +[\d.]+%$", shown, re.M)
    assert len(parts) == 6
    for size in parts:
        assert f" {size}  " in why
    assert why.count("from: ") > 15
    assert "calibrated on half of the published runs" in why
    told = found(capsys, "--tp", "2", "--world-size", "8", "--why")["why"]
    names = [each["name"] for each in told]  # type: ignore[attr-defined]
    assert names == ["device memory"]
    assert all(each["formula"] and each["source"] for each in told)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["--auto", "--world-size", "8"], "--model: needed for the time and memory of a step"),
        (["--model", "gpt-22b", "--world-size", "8"], "--cluster: needed for the time and memory"),
        (["--auto", *GPT[:-2]], "--world-size: needed; --auto fills so many devices"),
        (["--auto", *GPT, "--preset", "ddp"], "--auto beside --preset: it chooses the grid itself"),
        (["--auto", *GPT, "--top", "0"], "--top 0: expected a whole number from 1 on"),
        (["--auto", *GPT, "--tp", "x"], "--tp x: expected a whole number"),
        (["--auto", *GPT, "--max-memory", "nan"], "--max-memory nan: expected GB above 0"),
        (["--auto", *GPT, "--order", "pp-tp"], "order='pp-tp': expected tp-cp-ep-dp-pp, "),
        (["--auto", *GPT, "--tp", "0"], "tp=0: expected a whole number from 1 on"),
        (["--auto", *GPT, "--zero-stage", "2"], "--zero-stage 2: expected 0, 1 or 3"),
        (["--auto", *GPT, "--zero-stage", "all"], "--zero-stage all: expected 0, 1 or 3"),
        ([*GPT, "--axis", "node=2", "--order", "tp-cp-ep-node-dp-pp"], "axes.node: a step's model"),
        ([*GPT, "--tp", "8", "--ep", "2"], "no grid is valid; ep=2: model 'gpt-175b' has no exper"),
        (["--auto", *GPT[:-1], "252"], "does not fill nodes of 8 devices"),
    ],
)  # fmt: skip
def test_bad_input(capsys: pytest.CaptureFixture[str], argv: list[str], error: str) -> None:
    told = refused(capsys, *argv)
    assert error in told
    assert told.count("\n") == 1


def test_a_model_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import yaml

    path = tmp_path / "ours.yaml"
    path.write_text(yaml.safe_dump(MODELS["llama3-8b"].to_dict() | {"name": "ours"}))
    text = said(capsys, "--auto", "--model", str(path), "--cluster", "h100", "--world-size", "64")
    assert text.startswith("ours: 8.0 billion parameters, steps of 1,024 · 8,192 tokens, on 64")
