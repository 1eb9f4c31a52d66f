"""One table of train_gpt's jobs: each has the curve of one process, however it is cut."""

import random
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import commgrid
from commgrid import checkpoint
from commgrid.runtime.registry import live_grids
from commgrid.testing import run_on_ranks
from tests.examples.curves import (
    Record,
    agree,
    alone,
    curve,
    load,
    on_ranks,
    run,
    same_curve,
    without_numpy,
)

BASE = (
    "--layers 2 --hidden 16 --heads 4 --kv-heads 2 --batch-size 8 --seq-len 24 --clip-grad 1 "
    "--lr 1e-2 --dtype fp64 --steps 4"
)
DEEP = "--layers 4"
LOOK = (
    "--eval-every 2 --eval-batches 3 --held-out 0.3 --temperature 0 --sample-tokens 6 "
    "--sample 'a\nheading\n===\nab cd'"
)
"""Evaluations, and a sample whose prompt has two documents. The model sees 24 bytes of it."""
DRAWN = f"{LOOK} --temperature 0.8"

# Ranks, flags of the model, and flags of the cut. A wrong cut changes the first loss or gradient
# norm, a wrong optimizer those of the next steps. So four steps are enough, and some rows train 20.
SHORT = [
    (2, "", "--tp 2 --sequence-parallel --zero1"),
    (4, "--steps 20", "--tp 2 --zero1 --grad-accum 2"),
    (2, "", "--fsdp --microbatches 2"),
    (4, "--experts 4", "--fsdp --ep 2 --tp 2 --sequence-parallel --etp 1"),
    (2, "", "--cp 2 --cp-comm ring"),
    (2, "--packed", "--cp 2 --zero1"),
    (2, "--experts 8", "--ep 2 --etp 1 --tp 2 --sequence-parallel"),
    (2, "", "--pp 2 --schedule 1f1b --microbatches 4"),
    (4, "--tie-embeddings", "--pp 2 --tp 2 --schedule zb-h1 --microbatches 4"),
    (2, f"{DEEP} --tie-embeddings", "--pp 2 --chunks 2 --schedule interleaved --microbatches 4"),
    (4, f"{DEEP} --tie-embeddings {LOOK}", "--pp 2 --tp 2 --sequence-parallel --schedule zb-h1"),
    (4, f"--experts 4 {LOOK}", "--ep 2 --tp 2 --fsdp --microbatches 2"),
    (4, f"{DEEP} --steps 6",
     "--dp 4 --switch step=2:tp=2,zero1 --switch step=4:pp=4,schedule=zb-h1"),
]  # fmt: skip
FULL = [
    (1, "", "--sequence-parallel --zero1 --grad-accum 2"),
    (2, "", "--dp 2 --zero1 --grad-accum 2"),
    (4, "", "--tp 4 --sequence-parallel --zero1"),
    (4, "--dtype fp32 --steps 20", "--tp 2 --sequence-parallel --zero1"),
    (8, "--heads 8", "--tp 8"),
    (8, "", "--dp 8 --zero1"),
    # FSDP2 and HSDP
    (2, "--dtype fp32", "--fsdp --dp-replicate 2"),
    (2, "--experts 4", "--fsdp --ep 2"),  # one rank has each expert
    (4, "--tie-embeddings", "--fsdp --dp-replicate 2"),
    # sequences over cp: whole texts, packs of documents, lengths that 2 · cp does not divide
    (1, "--packed", "--microbatches 2"),  # longer packs, or fewer
    (4, "", "--cp 4 --cp-comm 2d"),
    (4, "--packed", "--cp 4 --cp-comm ulysses"),
    (4, "--seq-len 22", "--cp 4"),
    (4, "", "--cp 2 --tp 2 --sequence-parallel --zero1 --cp-comm allgather"),
    (4, "--packed", "--cp 2 --pp 2 --microbatches 4 --schedule zb-h1"),
    (4, "--packed --experts 4", "--cp 2 --dp 2 --ep 2 --fsdp"),
    (6, "--packed", "--cp 3 --tp 2 --sequence-parallel"),
    # the auxiliary loss is of a microbatch, which cp and tp share
    (4, "--experts 4 --aux-loss-coef 0.1", "--cp 2 --tp 2 --ep 2 --etp 1 --sequence-parallel"),
    (4, f"--packed {LOOK}", "--cp 2 --pp 2"),
    # regions that do not factor into each other: ep above dp, etp below or above tp
    (4, "--experts 8", "--ep 4 --etp 1 --tp 2 --sequence-parallel --zero1"),
    (4, "--experts 8", "--ep 2 --etp 2 --microbatches 2"),
    (4, "--experts 8", "--ep 1 --etp 4 --tp 2 --zero1"),
    (8, "--experts 8 --tie-embeddings", "--ep 2 --etp 2 --tp 2 --pp 2 --microbatches 2"),
    # pipelines
    (4, f"{DEEP} --tie-embeddings --steps 20", "--pp 4 --schedule zb-h1 --microbatches 4 --zero1"),
    (4, DEEP, "--pp 4 --schedule gpipe --microbatches 4"),
    (8, DEEP, "--pp 2 --tp 2 --chunks 2 --microbatches 4 --sequence-parallel --zero1"),
    # evaluation and sample
    (2, f"{DEEP} {DRAWN}", "--pp 2 --chunks 2 --microbatches 4"),
    # other grids on the way
    (8, f"{DEEP} --steps 10",
     "--tp 2 --pp 2 --dp 2 --switch step=2:tp=4,dp=2,zero1 --switch step=4:fsdp,dp-replicate=2 "
     "--switch step=6:tp=2,pp=2,chunks=2,sequence-parallel --switch step=8:cp=2,tp=2"),
]  # fmt: skip
NIGHTLY = [
    *((tp * dp, f"--dtype {dtype} --steps 20", f"--tp {tp} --dp {dp} {more}")
      for dtype, tp, dp, more in product(
          ("fp64", "fp32"), (1, 2, 4), (1, 2),
          ("--grad-accum 2", "--sequence-parallel --zero1", "--zero1 --grad-accum 2",
           "--sequence-parallel"))),
    (8, "--steps 20", "--tp 2 --dp 4"),
    (8, "--dtype fp32 --steps 20", "--tp 2 --dp 4"),
    (4, "--steps 20", "--fsdp --tp 2 --sequence-parallel"),
    (4, "--experts 4 --steps 20", "--fsdp --ep 2"),
    (8, "--experts 4 --steps 20", "--fsdp --tp 2 --ep 2 --etp 2 --dp-replicate 2"),
    *((ranks, f"{model} --steps 20", cut) for ranks, model, cut in [
        (4, "", "--cp 4 --cp-comm ring"),
        (4, "--packed", "--cp 4 --cp-comm 2d"),
        (4, "--packed", "--cp 2 --dp 2 --fsdp --cp-comm allgather"),
        (4, "--experts 4", "--cp 2 --dp 2 --ep 4"),
        (6, "", "--cp 3 --dp 2 --zero1"),
        (6, "--seq-len 22", "--cp 3 --pp 2"),
        (8, "", "--cp 2 --tp 2 --pp 2 --sequence-parallel --cp-comm ulysses"),
        (8, "", "--cp 4 --tp 2 --sequence-parallel --cp-comm 2d"),
        (8, "", "--cp 8"),
        (8, "--packed --experts 4",
         "--cp 2 --tp 2 --dp 2 --ep 4 --etp 1 --sequence-parallel --zero1"),
        (8, "", "--cp 2 --tp 2 --dp 2 --fsdp --dp-replicate 2 --sequence-parallel"),
        (2, "--experts 8", "--ep 2 --etp 1 --zero1"),
        (2, "--experts 8", "--ep 1 --etp 2"),
        (4, "--experts 8", "--ep 2 --etp 2 --tp 4"),
        (4, "--experts 8", "--ep 2 --etp 1 --tp 2 --pp 2 --schedule zb-h1 --microbatches 4"),
        (8, "--experts 8", "--ep 8 --etp 1 --tp 2 --sequence-parallel"),
        (8, "--experts 8", "--ep 4 --etp 2 --zero1"),
        (8, "--experts 8", "--ep 4 --etp 1 --pp 2 --microbatches 2 --zero1"),
    ]),
    (4, LOOK, "--fsdp --tp 2"),
    (4, f"--experts 4 {LOOK}", "--ep 2 --tp 2 --zero1"),
    (2, f"--experts 4 {LOOK}", "--ep 2 --fsdp"),
    (4, LOOK, "--cp 2 --pp 2"),
    (8, LOOK, "--pp 2 --tp 2 --zero1 --sequence-parallel"),
    (8, f"{DEEP} {DRAWN}", "--fsdp --tp 2 --dp-replicate 2"),
    (8, f"--experts 4 {LOOK}", "--pp 2 --ep 2 --etp 2 --tp 2"),
    (8, f"{DEEP} --tie-embeddings {LOOK}", "--pp 4 --dp 2 --schedule 1f1b --microbatches 4"),
    (8, f"{DEEP} --experts 8 --tie-embeddings --steps 15",
     "--ep 4 --tp 2 --switch step=3:ep=2,etp=1,zero1 --switch step=6:pp=2,ep=2,schedule=gpipe "
     "--switch step=9:fsdp,ep=4,etp=1 --switch step=12:tp=2"),
    *((pp * tp * dp, f"--layers {max(pp, 2) * chunks} {tied} --steps 20",
       f"--pp {pp} --tp {tp} --dp {dp} --schedule {schedule} --chunks {chunks} --microbatches 4 "
       f"{more}")
      for pp, tp, dp, (schedule, chunks), (tied, more) in product(
          (1, 2, 4), (1, 2), (1, 2),
          [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("gpipe", 2)],
          [("", "--zero1 --sequence-parallel"), ("--tie-embeddings", "")])
      if pp * tp * dp <= 8 and (pp > 1 or schedule in ("1f1b", "interleaved"))),
]  # fmt: skip


# Flags of the model, and the grids that train two steps each: ranks and flags of the cut.
CHAINS_SHORT = [(DEEP, "4 --tp 2 --pp 2 --sequence-parallel | 1 | 4 --zero1")]
CHAINS_FULL = [
    (DEEP,
     "8 --tp 2 --pp 2 --zero1 --sequence-parallel | 1 | 4 --tp 2 --fsdp --sequence-parallel | "
     "4 --tp 2 --pp 2 | 4 --pp 4 --schedule zb-h1 --microbatches 4 | 4 --fsdp --dp-replicate 2"),
    (f"{DEEP} --tie-embeddings",
     "4 --tp 2 --pp 2 --sequence-parallel | 4 --zero1 | 4 --pp 4 | 1"),
    ("--experts 8 --aux-loss-coef 0",
     "4 --ep 4 --zero1 | 1 | 4 --ep 2 --pp 2 | 2 --ep 2 --zero1 | 4 --ep 2 --tp 2 --etp 2 | "
     "4 --ep 2 --fsdp"),
    ("--packed", "4 --cp 4 | 4 --cp 2"),
    # Saved after an evaluation, which leaves some of FSDP's weights gathered.
    ("--warmup 2 --lr-decay cosine --lr-decay-steps 5 --eval-every 1 --eval-batches 1",
     "2 --fsdp --save-every 1 | 2 --pp 2"),
]  # fmt: skip
CHAINS_NIGHTLY = [
    (DEEP,
     "8 --tp 2 --pp 2 --zero1 --sequence-parallel | 8 --zero1 | 8 --tp 4 --zero1 | "
     "8 --pp 4 --schedule zb-h1 --microbatches 4 | "
     "8 --tp 2 --fsdp --dp-replicate 2 --sequence-parallel | 1"),
]  # fmt: skip


def sized(size: str, rows: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
    """Cases of a test, with the marker of a size of run."""
    marks = () if size == "short" else getattr(pytest.mark, size)
    for row in rows:
        name = " ".join(f"{part}" for part in row).replace(LOOK, "look").strip()
        yield pytest.param(*row, marks=marks, id=name.replace("  ", " "))


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of documents of 7 to 40 bytes."""
    draw, path = random.Random(0), tmp_path_factory.mktemp("text") / "text"

    def letters(most: int) -> str:
        return "".join(draw.choice("abcdefgh ") for _ in range(draw.randint(1, most)))

    documents = (f"{letters(6)}\n{draw.choice('=*-') * 3}\n{letters(30)}\n" for _ in range(60))
    path.write_text("".join(documents))
    return path


def as_alone(ours: Record, job: str) -> None:
    """Fail unless one process records the same."""
    theirs = alone(job)
    assert any(row["grad_norm"] > 1 for row in theirs.rows)  # so that clipping clips
    agree(ours, theirs, "fp32" if "--dtype fp32" in job else "fp64")


@pytest.mark.parametrize(
    ("ranks", "model", "cut"),
    [*sized("short", SHORT), *sized("full", FULL), *sized("nightly", NIGHTLY)],
)
def test_same_curve_however_it_is_cut(ranks: int, model: str, cut: str, text: Path) -> None:
    job = f"{BASE} --data {text} {model}"
    (ours,) = on_ranks(ranks, f"{job} {cut}")
    as_alone(ours, job)
    if LOOK in model:  # each of these cuts shards the weights
        assert ours.parameters[1] < ours.parameters[0]


@pytest.mark.parametrize(
    ("model", "grids"),
    [
        *sized("short", CHAINS_SHORT),
        *sized("full", CHAINS_FULL),
        *sized("nightly", CHAINS_NIGHTLY),
    ],
)
def test_same_curve_across_checkpoints(model: str, grids: str, text: Path, tmp_path: Path) -> None:
    """Each grid resumes what the one before it has saved, as if the job had never stopped."""
    job, whole = f"{BASE} --data {text} {model}", Record()
    for index, grid in enumerate(grids.split(" | ")):
        ranks, _, cut = grid.partition(" ")
        done, saved = 2 * index, tmp_path / f"{index}"
        resume = f"--resume {tmp_path / f'{index - 1}'}" if index else ""
        (part,) = on_ranks(int(ranks), f"{job} {cut} --steps {done + 2} --save {saved} {resume}")
        assert [row["step"] for row in part.rows] == [done + 1, done + 2]
        assert checkpoint.steps(saved)[-1] == done + 2
        whole.rows += part.rows
        whole.evaluations |= part.evaluations
        whole.parameters, whole.groups = part.parameters, whole.groups + part.groups
    as_alone(whole, f"{job} --steps {done + 2}")


def test_the_references_differ_and_learn(text: Path) -> None:
    """So that a case which is compared with the wrong one fails."""
    job = f"{BASE} --data {text} --steps 20"
    found = [alone(f"{job} {more}").rows for more in ("", "--packed", DEEP, "--tie-embeddings")]
    assert len({rows[0]["loss"] for rows in found}) == len(found)
    assert all(rows[-1]["loss"] < rows[0]["loss"] for rows in found)


# -- part of the world -------------------------------------------------------------------


def on_own_ranks(jobs: dict[str, list[str]], rank: int) -> None:
    """Train the job that lists this rank."""
    (job,) = (job for ranks, job in jobs.items() if str(rank) in ranks.split(","))
    train_gpt = load()
    train_gpt.train(train_gpt.parse(job))


def side_by_side(world: int, jobs: dict[str, str], folder: Path) -> list[list[dict[str, float]]]:
    """The curve of each job, all in one world, by the ranks that begin it."""
    files = [folder / ranks for ranks in jobs]
    given = {
        ranks: f"{job} --metrics {path}".split()
        for (ranks, job), path in zip(jobs.items(), files, strict=True)
    }
    per_rank = [(rank,) for rank in range(world)]
    run_on_ranks(on_own_ranks, world, given, per_rank=per_rank, backend=None, launcher="torchrun")
    return [curve(path) for path in files]


@pytest.mark.full
def test_two_jobs_on_ranks_of_one_world(text: Path, tmp_path: Path) -> None:
    job = f"{BASE} --data {text}"
    jobs = {ranks: f"{job} --tp 2 --ranks {ranks}" for ranks in ("0,1,3,5", "2,4")}
    for found in side_by_side(6, jobs, tmp_path):
        same_curve(found, alone(job).rows, "fp64")


def test_ranks_that_are_not_listed_end_at_once(text: Path, tmp_path: Path) -> None:
    job = f"{BASE} --data {text}"
    (found,) = side_by_side(3, {"0,1,2": f"{job} --ranks 2,0"}, tmp_path)
    same_curve(found, alone(job).rows, "fp64")


# -- jobs whose curve is another one -----------------------------------------------------


@pytest.mark.full
def test_bf16_falls_as_fp32_and_resumes_its_fp32_copies(text: Path, tmp_path: Path) -> None:
    """Bit for bit on the same grid; on another one, as close as sums in bf16 are."""
    job = f"{BASE} --data {text} --steps 12 --dtype"
    cut = "--dp 2 --zero1 --sequence-parallel"
    through, fp32, _, again, other = on_ranks(
        2, f"{job} bf16 {cut}", f"{job} fp32 {cut}",
        f"{job} bf16 {cut} --steps 6 --save {tmp_path}", f"{job} bf16 {cut} --resume {tmp_path}",
        f"{job} bf16 --tp 2 --resume {tmp_path}",
    )  # fmt: skip
    losses, *others = ([row["loss"] for row in one.rows] for one in (through, fp32, again, other))
    # bf16 keeps 8 bits of weights and activations: 2^-9 of a loss near 5.5 is 0.01.
    assert losses == pytest.approx(others[0], abs=0.05)
    assert losses[6:] == others[1]
    # Logits of bf16 have 8 bits, so that the mean loss is right to some tenths of a percent.
    assert losses[6:] == pytest.approx(others[2], rel=5e-3)


@pytest.mark.parametrize(
    "flags",
    ["--tp 2 --dropout 0.2 --sequence-parallel",
     "--experts 8 --ep 2 --capacity-factor 1 --aux-loss-coef 0.01"],
)  # fmt: skip
def test_what_depends_on_the_grid_trains(flags: str, text: Path) -> None:
    (found,) = on_ranks(2, f"{BASE} --data {text} --steps 20 {flags}")
    assert found.rows[-1]["loss"] < found.rows[0]["loss"] - 0.5


# -- checkpoints -------------------------------------------------------------------------


def test_saving_now_and_then_and_metrics_go_on(text: Path, tmp_path: Path) -> None:
    saved, metrics = tmp_path / "saved", tmp_path / "metrics"
    job = f"{BASE} --data {text} --metrics {metrics} --save {saved} --save-every 2"
    on_ranks(1, f"{job} --steps 5 --keep 2")
    assert checkpoint.steps(saved) == [4, 5]
    (saved / "step_00000005").rename(tmp_path / "elsewhere")
    on_ranks(1, f"{job} --steps 6 --resume {saved}")
    assert [row["step"] for row in curve(metrics)] == [1, 2, 3, 4, 5, 6]
    assert checkpoint.steps(saved) == [4, 6]


def refused(*jobs: list[str]) -> list[str]:
    """Error of each job."""
    told = []
    for job in jobs:
        with pytest.raises((SystemExit, commgrid.CheckpointError)) as error:
            run(job)
        commgrid.destroy()
        told.append(str(error.value))
    return told


def test_another_model_is_refused(text: Path, tmp_path: Path) -> None:
    saved, job = tmp_path / "saved", f"{BASE} --data {text} --experts 4"
    on_ranks(1, f"{job} --steps 1 --save {saved}")
    jobs = {
        f"--resume {tmp_path / 'nothing'}": "is no folder",
        f"--resume {saved} --hidden 32": "of another model, whose shapes differ",
        f"--resume {saved} --top-k 1": "saved with --top-k 2, not 1",
        f"--resume {saved} --layers 1": "of another model: it also has model.blocks.1",
        f"--resume {saved} --layers 3": "of another model: it has no model.blocks.2",
    }
    given = [f"{job} {flags}".split() for flags in jobs]
    (told,) = run_on_ranks(refused, 1, *given, backend=None, launcher="torchrun")
    for said, expected in zip(told, jobs.values(), strict=True):
        assert expected in said


def resumed_shape(*jobs: list[str]) -> dict[str, int]:
    """The axes of the grid on which the last job ends."""
    train_gpt, shape = load(), {}
    down, commgrid.shutdown = commgrid.shutdown, commgrid.destroy
    for job in jobs:
        if job is jobs[-1]:
            commgrid.shutdown = lambda: shape.update(live_grids()[0].shape)
        train_gpt.train(train_gpt.parse(job))
    commgrid.shutdown = down
    down()
    return shape


@pytest.mark.full
def test_a_resumed_job_is_on_the_grid_of_its_step(text: Path, tmp_path: Path) -> None:
    job = f"{BASE} --data {text} --dp 4 --steps 6 --switch step=1:tp=2 --switch step=2:tp=4"
    jobs = [f"{job} --steps 3 --save {tmp_path}", f"{job} --resume {tmp_path}"]
    given = [one.split() for one in jobs]
    for shape in run_on_ranks(resumed_shape, 4, *given, backend=None, launcher="torchrun"):
        assert (shape["dp"], shape["tp"]) == (1, 4)


@pytest.mark.full
def test_numpy_is_not_needed(text: Path) -> None:
    """The test group installs it, commgrid does not."""
    job = f"{BASE} --data {text} --pp 2 --tie-embeddings --steps 2"
    assert "step    2" in without_numpy("tests.examples.curves.run", 2, job.split())
