"""Transformers and FSDP2 on the grid's groups: the whole model's logits, and a loss that falls."""

import json
import sys
from pathlib import Path

import pytest

import commgrid
from commgrid import checkpoint
from commgrid.testing import run_on_ranks
from tests.examples.curves import load, run_example
from tests.sizes import full

for package in ("transformers", "accelerate"):
    pytest.importorskip(package, reason=f"{package} is not installed: pip install --group interop")


def run(*jobs: list[str]) -> list[int]:
    return run_example(load("transformers_tp"), *jobs)


@pytest.mark.full
def test_logits_are_the_whole_models_and_the_loss_falls(tmp_path: Path) -> None:
    curves = []
    for world, cuts in {1: [1], 4: [1, 2] if full() else [2]}.items():
        paths = [tmp_path / f"{world}-{tp}" for tp in cuts]
        jobs = [
            ["--tp", str(tp), "--metrics", str(path)] for tp, path in zip(cuts, paths, strict=True)
        ]
        for made in run_on_ranks(run, world, *jobs, backend=None, launcher="torchrun", timeout=300):
            assert made == [0] * len(jobs)
        for path in paths:
            first, *rows = (json.loads(line) for line in path.read_text().splitlines())
            assert first["difference"] < 1e-4  # fp32: sums in another order
            curves.append([row["loss"] for row in rows])
    assert curves[0][-1] < curves[0][0] - 1
    for curve in curves[1:]:
        # In fp32 thirty steps of Adam amplify differences of some ulps to less than this.
        assert curve == pytest.approx(curves[0], rel=1e-3)


def refused(folder: str) -> str:
    grid = commgrid.initialize(tp=2)
    example = load("transformers_tp")
    with example.tiny_llama(example.parse([]), grid) as tiny:
        model = example.AutoModelForCausalLM.from_pretrained(
            tiny, tp_plan="auto", device_mesh=grid.device_mesh("tp")
        )
    with pytest.raises(commgrid.CheckpointError) as error:
        checkpoint.save(folder, 1, model, progress=False)
    commgrid.shutdown()
    return str(error.value)


def test_a_checkpoint_does_not_take_its_slices_for_whole_parameters(tmp_path: Path) -> None:
    for told in run_on_ranks(refused, 2, str(tmp_path), backend=None, launcher="torchrun"):
        assert "self_attn.q_proj.weight of shape (32, 64) is a slice of Transformers'" in told
        assert "save_pretrained" in told


def batch_of_three() -> str:
    example = load("transformers_tp")
    with pytest.raises(SystemExit) as error:
        example.train(example.parse(["--batch-size", "3"]))
    commgrid.shutdown()
    return str(error.value)


def test_a_batch_that_cannot_be_shared() -> None:
    for told in run_on_ranks(batch_of_three, 2, backend=None, launcher="torchrun"):
        assert "--batch-size 3 cannot be shared equally by the 2 ranks of dp" in told


def test_it_needs_the_interop_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit, match="pip install --group interop"):
        load("transformers_tp")
