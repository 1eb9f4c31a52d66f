"""The main job: the same curve on any grid, a loss that falls, and flags that say what is wrong."""

import contextlib
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import commgrid
from commgrid.testing import run_on_ranks
from tests.examples.curves import ROOT, curve, load, run, same_curve, same_start, steps_of
from tests.sizes import full

SMALL = ["--layers", "2", "--hidden", "64", "--batch-size", "8", "--seq-len", "16"]


# What may be cut without the curve noticing: sizes of tp and dp, then switches, and the number of
# microbatches, in turn (all 48 combinations take three minutes, and were run once).
TURNS = [
    [["--grad-accum", "2"], ["--sequence-parallel", "--zero1"]],
    [["--zero1", "--grad-accum", "2"], ["--sequence-parallel"]],
]
CUTS = [
    (tp, dp, flags)
    for i, (tp, dp) in enumerate(((1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2)))
    for flags in TURNS[i % 2]
]
TINY = [
    "--layers", "1", "--hidden", "32", "--heads", "4", "--kv-heads", "2", "--batch-size", "8",
    "--seq-len", "8", "--steps", "20", "--clip-grad", "1.5",
]  # fmt: skip


def curves(tp: int, dp: int, jobs: dict[str, list[str]], folder: Path) -> dict[str, Any]:
    """What each job's metrics say, all run one after the other on the same ranks."""
    given = [
        [*job, "--tp", str(tp), "--dp", str(dp), "--metrics", str(folder / name)]
        for name, job in jobs.items()
    ]
    run_on_ranks(run, tp * dp, *given, backend=None, launcher="torchrun", timeout=300)
    return {name: curve(folder / name) for name in jobs}


@pytest.mark.full("fp32")
@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
def test_same_curve_however_it_is_cut(dtype: str, tmp_path: Path) -> None:
    alone = {"alone": [*TINY, "--dtype", dtype]}
    reference = curves(1, 1, alone, tmp_path)["alone"]
    assert [row["step"] for row in reference] == list(range(1, 21))
    assert any(row["grad_norm"] > 1.5 for row in reference)  # so that clipping clips
    # fp32 has wider bounds and the same code: every third cut.
    cuts = CUTS[1::3] if dtype == "fp32" else CUTS if full() else CUTS[2::5]
    for tp, dp in dict.fromkeys((tp, dp) for tp, dp, _ in cuts):
        jobs = {
            "-".join([str(tp), str(dp), *flags]): [*TINY, "--dtype", dtype, *flags]
            for t, d, flags in cuts if (t, d) == (tp, dp)
        }  # fmt: skip
        for name, rows in curves(tp, dp, jobs, tmp_path).items():
            try:
                same_curve(rows, reference, dtype)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


def on_own_ranks(jobs: dict[str, list[str]], rank: int) -> None:
    """Each rank trains the job that lists it."""
    (job,) = (job for ranks, job in jobs.items() if str(rank) in ranks.split(","))
    train_gpt = load()
    train_gpt.train(train_gpt.parse(job))


@pytest.mark.full
def test_two_jobs_on_ranks_of_one_world(tmp_path: Path) -> None:
    """On (0, 1, 2, 4, 5, 7) the curve of six plain ranks, beside another grid on (3, 6)."""
    job = [*TINY, "--batch-size", "12", "--dtype", "fp64", "--tp", "2"]
    reference = curves(2, 3, {"plain": job}, tmp_path)["plain"]
    jobs = {
        ranks: [*job, "--ranks", ranks, "--metrics", str(tmp_path / ranks)]
        for ranks in ("0,1,2,4,5,7", "3,6")
    }
    per_rank = [(rank,) for rank in range(8)]
    run_on_ranks(
        on_own_ranks, 8, jobs, per_rank=per_rank, backend=None, launcher="torchrun", timeout=300
    )
    for ranks in jobs:
        same_curve(curve(tmp_path / ranks), reference, "fp64")


def test_ranks_that_are_not_listed_end_at_once(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics"
    job = [*TINY, "--steps", "2", "--ranks", "2,0", "--metrics", str(metrics)]
    jobs = {"0,1,2": job}
    per_rank = [(rank,) for rank in range(3)]
    run_on_ranks(
        on_own_ranks, 3, jobs, per_rank=per_rank, backend=None, launcher="torchrun", timeout=300
    )
    assert [row["step"] for row in curve(metrics)] == [1, 2]


@pytest.mark.full("fp64")
@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
def test_same_curve_on_eight_ranks(dtype: str, tmp_path: Path) -> None:
    arguments = [*SMALL, "--steps", "20", "--dtype", dtype]
    reference = curves(1, 1, {"alone": arguments}, tmp_path)["alone"]
    assert len(reference) == 20
    for index, (tp, dp) in enumerate([(2, 4), (8, 1), (1, 8)] if dtype == "fp64" else [(2, 4)]):
        name = f"{tp}-{dp}"
        rows = curves(tp, dp, {name: [*arguments, *steps_of(index)]}, tmp_path)[name]
        same_start(rows, reference, dtype, index)


@pytest.mark.full
def test_bf16_falls_as_fp32_does(tmp_path: Path) -> None:
    jobs = {
        dtype: [*TINY, "--dtype", dtype, "--sequence-parallel", "--zero1"]
        for dtype in ("fp32", "bf16")
    }
    found = curves(2, 2, jobs, tmp_path)
    # bf16 keeps 8 bits of weights and activations: 2^-9 of a loss near 5.5 is 0.01.
    for ours, theirs in zip(found["bf16"], found["fp32"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=0.05)


def test_dropout_trains(tmp_path: Path) -> None:
    job = [*TINY, "--dropout", "0.2", "--sequence-parallel", "--lr", "1e-2"]
    rows = curves(2, 2, {"dropout": job}, tmp_path)["dropout"]
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5


def test_metrics_carry_at_least_12_digits(tmp_path: Path) -> None:
    job = [*TINY, "--dtype", "fp64"]
    rows = curves(1, 1, {"digits": job}, tmp_path)["digits"]
    assert all(len(repr(row["loss"]).replace(".", "")) >= 12 for row in rows[:5])
    assert set(rows[0]) == {"step", "loss", "grad_norm", "tokens_per_s"}


def test_under_torchrun() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         ROOT / "examples/train_gpt.py", *SMALL, "--tp", "2", "--steps", "2"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "grid   tp 2 on 2 ranks (cpu)"
    assert lines[3].startswith("step    1  loss 5.")
    assert lines[4].startswith("step    2  loss 5.")
    assert lines[5].startswith("done: 2 steps in ")


@pytest.mark.full
def test_bare_python_is_a_world_of_one(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    done = subprocess.run(
        [sys.executable, ROOT / "examples/train_gpt.py", *SMALL, "--steps", "3", "--data", text,
         "--sample", "lazy", "--sample-tokens", "8"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "grid   1 rank (cpu)"
    assert lines[3].startswith("step    1  loss 5.5")
    assert lines[5] == "--- a sample"
    assert lines[6].startswith("lazy")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tp", "2"], "axes: tp=2 · cp=1 · pp=1 = 2 does not divide 1 ranks"),
        (["--dtype", "fp8"], "invalid choice: 'fp8'"),
        (["--config", "nowhere.yaml"], "--config nowhere.yaml"),
        (["--hidden", "100"], "--hidden 100 is not a multiple of --heads 8"),
        (["--kv-heads", "3"], "num_kv_heads=3 does not divide num_heads=8"),
        (
            ["--grad-accum", "3"],
            "--microbatches (--grad-accum) 3 does not divide the 16 sequences",
        ),
        (
            ["--layers", "1", "--chunks", "2"],
            "--layers 1 are fewer than --pp 1 × --chunks 2",
        ),
        (["--chunks", "2", "--schedule", "zb-h1"], "num_chunks=2: schedule 'zb-h1' has one chunk"),
        (["--schedule", "1f2b"], "invalid choice: '1f2b'"),
        (["--dropout", "1"], "--dropout: 1: expected 0 or more, and less than 1"),
        (["--clip-grad", "-1"], "--clip-grad: -1: expected 0 or more"),
        (["--ep", "2"], "are about --experts N"),
        (["--experts", "4", "--top-k", "5"], "--top-k 5 is more than --experts 4"),
        (["--experts", "4", "--capacity-factor", "0"], "0: expected above 0, such as 1.25"),
        (["--experts", "4", "--ep", "2"], "ep=2"),
        (["--data", "nowhere.txt"], "--data nowhere.txt: "),
        (["--data", "/dev/null"], "0 bytes are less than --seq-len + 2 = 66"),
        (["--tpp", "2"], "unknown flag --tpp; did you mean '--tp'?"),
        (["--steps", "-1"], "--steps: -1: expected a whole number, 0 or more"),
        (["--lr", "nan"], "--lr: nan: expected 0 or more"),
        (["--min-lr", "1e-4"], "--min-lr and --lr-decay-steps are about --lr-decay"),
        (["--lr-decay", "linear", "--min-lr", "1"], "--min-lr 1.0 is above --lr 0.002"),
        (["--lr-decay", "cosine"], "--warmup 20 leaves no step of 1 to --lr-decay cosine"),
        (["--eval-every", "1", "--held-out", "1"], "1: expected above 0 and below 1"),
        (["--eval-every", "1", "--held-out", "1e-5"], "bytes to evaluate on, less than --seq-len"),
        (["--sample", ""], "--sample '': give a prompt"),
        (["--metrics", "/dev/null/x"], "--metrics /dev/null/x: cannot be written (/dev/null is"),
        (["--save", "/dev/null"], "--save /dev/null: cannot be written (/dev/null is no folder)"),
    ],
)
def test_wrong_flags_are_named(arguments: list[str], said: str) -> None:
    assert said in run_on_ranks(refusal, 1, [*arguments, "--steps", "1"], backend=None)[0]


def refusal(arguments: list[str]) -> str:
    """What the command line says and ends with."""
    train_gpt, said = load(), io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            train_gpt.train(train_gpt.parse(arguments))
        except (SystemExit, commgrid.CommGridError) as error:
            return f"{said.getvalue()}{error}"
    return "nothing"


@pytest.mark.full
def test_an_error_is_one_line_and_a_code() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples/train_gpt.py", "--tp", "2", "--steps", "1"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("SpecError: axes: tp=2 · cp=1 · pp=1 = 2 does")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tpp: 2", "unknown key 'tpp'; did you mean 'tp'?"),
        ("tp: two", "tp: two: expected a whole number, 1 or more"),
        ("dtype: fp8", "dtype: invalid choice: 'fp8'"),
        ("steps: -1", "steps: -1: expected a whole number, 0 or more"),
        ("batch_size: 2.5", "batch_size: 2.5: expected a whole number, 1 or more"),
        ("zero1: 2", "zero1: 2: expected true or false"),
        ("sample: ''", "--sample '': give a prompt"),
        ("- tp", "expected a mapping of flags"),
    ],
)
def test_wrong_config_is_named(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(SystemExit):
        load().parse(["--config", str(path)])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "configs").glob("*.yaml")), ids=str)
def test_configs_that_come_with_it_are_read(path: Path) -> None:
    args = load().parse(["--config", str(path)])
    assert f"tp{args.tp}" in path.stem
    assert args.pp == 1 or f"pp{args.pp}" in path.stem


def test_the_older_name_of_microbatches_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("grad_accum: 4")
    assert load().parse(["--config", str(path)]).microbatches == 4
    assert load().parse(["--grad-accum", "2"]).microbatches == 2


def test_flags_go_before_the_config(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("tp: 2\nsteps: 7\nlr: 2e-3\nzero1: true")
    args = load().parse(["--config", str(path), "--steps", "3"])
    assert (args.tp, args.steps, args.lr, args.zero1) == (2, 3, 0.002, True)
