"""A job saved on one grid goes on on another as if it had never stopped."""

from pathlib import Path
from typing import Any

import pytest

import commgrid
from commgrid import checkpoint
from commgrid.testing import run_on_ranks
from tests.examples.curves import curve, run, same_curve
from tests.sizes import full, some

TINY = [
    "--layers", "4", "--hidden", "16", "--heads", "4", "--batch-size", "8", "--seq-len", "4",
    "--clip-grad", "1.5", "--lr", "1e-2", "--dtype", "fp64",
]  # fmt: skip
EXPERTS = [*TINY, "--experts", "8", "--aux-loss-coef", "0"]
STOPPED, LAST = 6, 12
HALF, ALL = ["--steps", str(STOPPED)], ["--steps", str(LAST)]


def cut(tp: int, pp: int, dp: int, *more: str) -> list[str]:
    """Flags of a grid; no --dp with FSDP, which divides what the ranks leave."""
    return ["--tp", str(tp), "--pp", str(pp), "--dp", str(dp), *more]


def train(world: int, *jobs: list[str]) -> None:
    made = run_on_ranks(run, world, *jobs, backend=None, launcher="torchrun", timeout=300)
    assert made == [[0] * len(jobs)] * world


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The curve of one process that never stops."""
    folder = tmp_path_factory.mktemp("alone")
    jobs = {"dense": TINY, "tied": [*TINY, "--tie-embeddings"], "experts": EXPERTS}
    train(1, *[[*job, *ALL, "--metrics", str(folder / name)] for name, job in jobs.items()])
    return {name: curve(folder / name) for name in jobs}


def resumed(
    world: int, saved: Path, jobs: dict[str, list[str]], folder: Path, reference: Any
) -> None:
    given = [
        [*job, *ALL, "--resume", str(saved), "--metrics", str(folder / f"{world}-{name}")]
        for name, job in jobs.items()
    ]
    train(world, *given)
    for name in jobs:
        rows = curve(folder / f"{world}-{name}")
        assert [row["step"] for row in rows] == list(range(STOPPED + 1, LAST + 1))
        try:
            same_curve(rows, reference[STOPPED:], "fp64")
        except AssertionError as error:
            raise AssertionError(f"{world} ranks, {name}: {error}") from error


@pytest.mark.full("tied")
@pytest.mark.parametrize("kind", ["dense", "tied"])
def test_saved_on_2_2_2_and_resumed_on_any_grid(
    kind: str, uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    """Sharded optimizers and not, tied embeddings, sequence parallelism, FSDP2 and HSDP."""
    job = [*TINY, *(["--tie-embeddings"] if kind == "tied" else [])]
    saved = tmp_path / "saved"
    zero1 = ["--zero1"] if kind == "dense" else []
    train(8, [*job, *HALF, *cut(2, 2, 2, *zero1, "--sequence-parallel"), "--save", str(saved)])
    assert checkpoint.steps(saved) == [STOPPED]
    reference = uninterrupted[kind]
    resumed(1, saved, {"alone": job}, tmp_path, reference)
    jobs = {
        "1-4-2": [*job, *cut(1, 4, 2, "--schedule", "zb-h1", "--microbatches", "4")],
        "1-1-8": [*job, *cut(1, 1, 8, "--zero1")],
        "4-1-2": [*job, *cut(4, 1, 2, *zero1)],
        "fsdp": [*job, *cut(2, 1, 4, "--fsdp", "--dp-replicate", "2", "--sequence-parallel")],
    }
    if kind == "tied":
        jobs = {name: jobs[name] for name in ("1-1-8", "1-4-2")}
    resumed(8, saved, {name: jobs[name] for name in some(list(jobs), 1)}, tmp_path, reference)


@pytest.mark.full
def test_saved_by_fsdp_and_by_one_process(uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    fsdp, pipelined = cut(2, 1, 2, "--fsdp"), cut(2, 2, 1)
    for world, flags, then in ((1, [], fsdp), (4, fsdp, pipelined)):
        saved = tmp_path / f"saved-{world}"
        train(world, [*TINY, *HALF, *flags, "--save", str(saved)])
        resumed(4, saved, {"then": [*TINY, *then]}, tmp_path, uninterrupted["dense"])


@pytest.mark.full
def test_experts_on_other_grids(uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    saved, reference = tmp_path / "saved", uninterrupted["experts"]
    train(4, [*EXPERTS, *HALF, *cut(1, 1, 4, "--ep", "4", "--zero1"), "--save", str(saved)])
    resumed(1, saved, {"alone": EXPERTS}, tmp_path, reference)
    if full():
        resumed(2, saved, {"ep-2": [*EXPERTS, *cut(1, 1, 2, "--ep", "2")]}, tmp_path, reference)
    jobs = {
        "ep-2-pp-2": [*EXPERTS, *cut(1, 2, 2, "--ep", "2")],
        "ep-2": [*EXPERTS, *cut(1, 1, 4, "--ep", "2", "--zero1")],
        "ep-2-etp-2": [*EXPERTS, *cut(2, 1, 2, "--ep", "2", "--etp", "2")],
        "fsdp": [*EXPERTS, *cut(1, 1, 4, "--ep", "2", "--fsdp")],
    }
    resumed(4, saved, {name: jobs[name] for name in some(list(jobs), 2)}, tmp_path, reference)


def test_bf16_resumes_its_fp32_copies(tmp_path: Path) -> None:
    """The same grid goes on bit for bit; another one as near as bf16's sums are."""
    job = [*TINY, "--dtype", "bf16"]
    saved, paths = tmp_path / "saved", [tmp_path / name for name in ("through", "again", "other")]
    zero1 = cut(1, 1, 2, "--zero1")
    train(
        2, [*job, *ALL, *zero1, "--metrics", str(paths[0])],
        [*job, *HALF, *zero1, "--save", str(saved)],
        [*job, *ALL, *zero1, "--resume", str(saved), "--metrics", str(paths[1])],
        [*job, *ALL, *cut(2, 1, 1), "--resume", str(saved), "--metrics", str(paths[2])],
    )  # fmt: skip
    through, again, other = (curve(path)[-(LAST - STOPPED) :] for path in paths)
    assert [row["loss"] for row in again] == [row["loss"] for row in through]
    # Logits of bf16 have 8 bits, so that the mean loss is right to some tenths of a percent.
    assert [r["loss"] for r in other] == pytest.approx([r["loss"] for r in through], rel=5e-3)


def test_saving_now_and_then_and_metrics_go_on(tmp_path: Path) -> None:
    saved, metrics = tmp_path / "saved", tmp_path / "metrics"
    job = [*TINY, "--metrics", str(metrics), "--save", str(saved), "--save-every", "2"]
    train(1, [*job, "--steps", "5", "--keep", "2"])
    assert checkpoint.steps(saved) == [4, 5]
    (saved / "step_00000005").rename(tmp_path / "elsewhere")
    train(1, [*job, "--steps", "6", "--resume", str(saved)])
    assert [row["step"] for row in curve(metrics)] == [1, 2, 3, 4, 5, 6]
    assert checkpoint.steps(saved) == [4, 6]


def refused(*jobs: list[str]) -> list[str]:
    """What each job that cannot go on says."""
    told = []
    for job in jobs:
        with pytest.raises((SystemExit, commgrid.CheckpointError)) as error:
            run(job)
        commgrid.destroy()
        told.append(str(error.value))
    return told


def test_another_model_is_refused(tmp_path: Path) -> None:
    saved, nothing = str(tmp_path / "saved"), str(tmp_path / "nothing")
    train(1, [*TINY, "--steps", "1", "--save", saved])
    jobs = {
        ("--resume", nothing): "is no folder",
        ("--resume", saved, "--hidden", "32"): "of another model, whose shapes differ",
        ("--resume", saved, "--heads", "2"): "saved with --heads 4, not 2",
        ("--resume", saved, "--layers", "3"): "of another model: it also has model.blocks.3",
        ("--resume", saved, "--layers", "5"): "of another model: it has no model.blocks.4",
    }
    given = [[*TINY, "--steps", "2", *flags] for flags in jobs]
    (told,) = run_on_ranks(refused, 1, *given, backend=None, launcher="torchrun", timeout=300)
    for text, expected in zip(told, jobs.values(), strict=True):
        assert expected in text
