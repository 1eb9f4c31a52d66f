"""train_gpt's command line: how it is started, and flags and files that say what is wrong."""

import contextlib
import io
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import commgrid
from commgrid.testing import run_on_ranks
from tests.examples.curves import ROOT, load

SMALL = ["--layers", "2", "--hidden", "64", "--batch-size", "8", "--seq-len", "16"]


def started(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=300
    )


SCRIPT = ROOT / "examples" / "train_gpt.py"


@pytest.mark.full
def test_under_torchrun() -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = started(*torchrun, SCRIPT, *SMALL, "--tp", "2", "--steps", "2")
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
    sample = ["--sample", "lazy", "--sample-tokens", "8"]
    done = started(SCRIPT, *SMALL, "--steps", "3", "--data", text, *sample)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "grid   1 rank (cpu)"
    assert lines[3].startswith("step    1  loss 5.5")
    assert lines[5] == "--- a sample"
    assert lines[6].startswith("lazy")


@pytest.mark.full
def test_an_error_is_one_line_and_a_code() -> None:
    done = started(SCRIPT, "--tp", "2", "--steps", "1")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("SpecError: axes: tp=2 · cp=1 · pp=1 = 2 does")


# -- flags ------------------------------------------------------------------------------------

WRONG = [
    ("--tp 2", "axes: tp=2 · cp=1 · pp=1 = 2 does not divide 1 ranks"),
    ("--dtype fp8", "invalid choice: 'fp8'"),
    ("--config nowhere.yaml", "--config nowhere.yaml"),
    ("--hidden 100", "--hidden 100 is not a multiple of --heads 8"),
    ("--kv-heads 3", "num_kv_heads=3 does not divide num_heads=8"),
    ("--grad-accum 3", "--microbatches (--grad-accum) 3 does not divide the 16 sequences"),
    ("--layers 1 --chunks 2", "--layers 1 are fewer than --pp 1 × --chunks 2"),
    ("--chunks 2 --schedule zb-h1", "num_chunks=2: schedule 'zb-h1' has one chunk"),
    ("--schedule 1f2b", "invalid choice: '1f2b'"),
    ("--dropout 1", "--dropout: 1: expected 0 or more, and less than 1"),
    ("--clip-grad -1", "--clip-grad: -1: expected 0 or more"),
    ("--ep 2", "are about --experts N"),
    ("--experts 4 --top-k 5", "--top-k 5 is more than --experts 4"),
    ("--experts 4 --capacity-factor 0", "0: expected above 0, such as 1.25"),
    ("--experts 4 --ep 2", "ep=2"),
    ("--data nowhere.txt", "--data nowhere.txt: "),
    ("--data /dev/null", "0 bytes are less than --seq-len + 2 = 66"),
    ("--grid nowhere.yaml", "--grid nowhere.yaml: there is no such file"),
    ("--tpp 2", "unknown flag --tpp; did you mean '--tp'?"),
    ("--steps -1", "--steps: -1: expected a whole number, 0 or more"),
    ("--lr nan", "--lr: nan: expected 0 or more"),
    ("--min-lr 1e-4", "--min-lr and --lr-decay-steps are about --lr-decay"),
    ("--lr-decay linear --min-lr 1", "--min-lr 1.0 is above --lr 0.002"),
    ("--lr-decay cosine", "--warmup 20 leaves no step of 9 to --lr-decay cosine"),
    ("--eval-every 1 --held-out 1", "1: expected above 0 and below 1"),
    ("--eval-every 1 --held-out 1e-5", "bytes to evaluate on, less than --seq-len"),
    ("--sample ''", "--sample '': give a prompt"),
    ("--metrics /dev/null/x", "--metrics /dev/null/x: cannot be written (/dev/null is"),
    ("--save /dev/null", "--save /dev/null: cannot be written (/dev/null is no folder)"),
    ("--keep 2", "are about --save"),
    # FSDP2
    ("--fsdp --pp 2", "without --zero1 and --pp"),
    ("--fsdp --zero1", "without --zero1 and --pp"),
    ("--dp-replicate 2", "is about --fsdp"),
    ("--fsdp --dp 3 --dp-replicate 2", "2 does not divide --dp 3"),
    # sequences over cp
    ("--cp 8 --seq-len 6", "--seq-len 6 is less than --cp 8"),
    (
        "--cp 4 --tp 2 --sequence-parallel --seq-len 20",
        "--seq-len 20 cannot be shared equally by --cp 4 × --tp 2 with --sequence-parallel; "
        "expected a multiple of 8",
    ),
    ("--cp 3 --pp 2 --packed --seq-len 20", "in one shape; expected a multiple of 3"),
    ("--cp 3 --cp-comm ulysses", "ulysses cannot share the 8 heads (8 of keys) of a tp rank"),
    ("--cp 4 --tp 4 --cp-comm ulysses", "the 2 heads (2 of keys) of a tp rank among --cp 4"),
    ("--cp 5 --cp-comm 2d", "--cp-comm 2d cannot split --cp 5"),
    ("--cp 9 --cp-comm 2d", "--cp-comm 2d cannot split --cp 9: the ranks inside share the 8"),
    ("--cp-comm ring", "--cp-comm is about --cp N"),
    ("--cp 2 --dropout 0.1", "--dropout 0.1 is of attention too, which has none"),
    ("--packed --dropout 0.1", "--dropout 0.1 is of attention too, which has none"),
    ("--cp 2 --cp-comm rign", "invalid choice: 'rign'"),
    # switches
    ("--switch tp=4", "--switch tp=4: expected step=N:FLAGS, such as step=10:tp=4,dp=2,zero1"),
    ("--switch step=ten:tp=4", "--switch step=ten:tp=4: expected step=N:FLAGS"),
    ("--switch step=9:tp=4", "--switch step=9:tp=4: expected a step from 1 to 8"),
    ("--switch step=5:hidden=4", "--switch step=5:hidden=4: 'hidden' is none of tp, dp, pp, cp"),
    ("--switch step=5:tp", "--switch step=5:tp: tp needs a value, as tp=2"),
    ("--switch step=5:tp=none", "tp=none: tp: none: expected a whole number, 1 or more"),
    ("--switch step=5:zero1=2", "--switch step=5:zero1=2: zero1 takes no value"),
    ("--switch step=5:fsdp,pp=2", "pp=2: --fsdp shards the optimizer too, and is without --zero1"),
    ("--switch step=5:tp=2 --switch step=5:dp=2", "there is one after step 5 already"),
    ("--switch step=5:tp=3", "--switch after step 5: axes: tp=3"),  # before the first step
]


def refusal(flags: list[str]) -> str:
    """The error of a command line, also of one for more ranks than there are."""
    train_gpt, sequences, said = load(), load("gpt_training/sequences"), io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            args = train_gpt.parse(flags)
            sequences.split_of_cp(args)
            sequences.check_context(args, None)
            train_gpt.train(args)
        except (SystemExit, commgrid.CommGridError) as error:
            assert "step " not in out.getvalue()  # nothing was trained
            return said.getvalue() or f"{error}"
    return "nothing"


@pytest.mark.parametrize(("flags", "said"), WRONG)
def test_wrong_flags_are_named(flags: str, said: str) -> None:
    given = ["--steps", "9", *shlex.split(flags)]
    (told,) = run_on_ranks(refusal, 1, given, backend=None, launcher="torchrun")
    assert said in told
    assert told.strip().count("\n") == 0


# -- configs ---------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 2, "pp": 2}, {"tp": 2, "pp": 2, "order": "tp-cp-pp-dp"},
        {"tp": 2, "ep": 4, "etp": 1}, {"ep": 2, "etp": 1, "tp": 2, "order": "tp-cp-ep-pp-dp"},
        {"dp_replicate": 2, "dp_shard": -1},
    ],
    ids=str,
)  # fmt: skip
def test_a_planned_grid_is_the_one_that_trains(sizes: dict[str, Any], tmp_path: Path) -> None:
    """What `commgrid plan -o grid.yaml` writes, as `--grid grid.yaml`."""
    path, spec = tmp_path / "grid.yaml", commgrid.GridSpec.build(**sizes)
    path.write_text(spec.to_yaml())
    experts = ["--experts", "8"] if "ep" in sizes else []
    args = load().parse(["--grid", str(path), *experts])
    given = load("gpt_training/grid").grid_arguments(args)
    trains = commgrid.GridSpec.build(**{**given, "groups": None})
    assert trains.resolve(16).shape == spec.resolve(16).shape
    assert trains.order == spec.order
    assert load().parse(["--grid", str(path), *experts, "--cp", "2"]).cp == 2


def test_a_grid_with_groups_of_its_own_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text("axes: {tp: 2, dp: -1}\ngroups: {model: tp}\n")
    with pytest.raises(SystemExit):
        load().parse(["--grid", str(path)])
    assert "describes more than sizes and an order" in capsys.readouterr().err
