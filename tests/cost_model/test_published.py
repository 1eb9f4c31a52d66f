"""The step's model against published runs: what it promises, on runs it was not calibrated on."""

import statistics

import pytest

from commgrid.cost_model.calibration import CALIBRATION
from tests.benchmarks.published import FITTED, Compared, fit, markdown, predict, runs
from tests.docs.pages import DOCS, ROOT


def test_held_out_runs_are_predicted() -> None:
    """Half of the runs are calibrated on, the other half is within 10 % in the median and 25 %,
    but for one: tensor parallelism beside 128 small experts, which waits for the host."""
    known = [run for run in runs() if not run.beyond]
    held = [run for run in known if not run.calibrates]
    assert len(known) >= 80
    assert len(known) <= 2 * len(held)
    off = [abs(predict(run).seconds / run.seconds - 1) for run in held]
    assert statistics.median(off) < 0.07
    assert sum(each > 0.25 for each in off) == 1
    assert max(off) < 0.35


@pytest.mark.full
def test_the_constants_are_those_that_the_runs_give() -> None:
    found = fit()
    assert dict(found.gemm) == pytest.approx(dict(CALIBRATION.gemm), rel=0.02)
    for key in FITTED:
        assert getattr(found, key) == pytest.approx(getattr(CALIBRATION, key), rel=0.02), key


def test_memory_of_published_runs() -> None:
    """Full recomputation was 33 to 40 % low: PyTorch's loss keeps logits in fp32 three times.

    torchtitan's selective recomputation keeps less than the model counts, and less with each
    release.
    """
    known = [run for run in runs() if run.memory and run.config.pp == 1]
    off = {
        how: [predict(run).memory.total / run.memory - 1 for run in known if run.recompute == how]
        for how in ("full", "selective")
    }
    assert len(off["full"]) == 5
    assert all(abs(each) < 0.2 for each in off["full"]), off
    assert all(0 < each < 0.7 for each in off["selective"]), off


def test_the_tables_are_as_printed() -> None:
    printed = markdown([Compared(run, predict(run)) for run in runs()], places=False)
    assert (ROOT / "tests/benchmarks/published.md").read_text("utf-8").endswith(f"\n{printed}\n")
    summary = printed.partition("\n\n")[2]
    assert summary in (DOCS / "choosing.md").read_text("utf-8")
