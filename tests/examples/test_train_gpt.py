"""The main job: the same curve on any grid, a loss that falls, and flags that say what is wrong."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.ranks import run_on_ranks

ROOT = Path(__file__).parents[2]
SMALL = ["--layers", "2", "--hidden", "64", "--batch-size", "8", "--seq-len", "16"]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt", ROOT / "examples" / "train_gpt.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(arguments: list[str]) -> None:
    train_gpt = load()
    train_gpt.generate = lambda *_: ""  # most of a short run's time, and of no concern here
    train_gpt.train(train_gpt.parse(arguments))


def curve(tp: int, dp: int, dtype: str, folder: Path) -> list[dict[str, float]]:
    path = folder / f"{tp}-{dp}-{dtype}.jsonl"
    arguments = [*SMALL, "--tp", str(tp), "--dp", str(dp), "--steps", "20", "--dtype", dtype]
    run_on_ranks(run, tp * dp, [*arguments, "--metrics", str(path)], init=None, launcher="torchrun")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("dtype", "bound"), [("fp64", 1e-9), ("fp32", 1e-4)])
def test_same_curve_on_any_grid(dtype: str, bound: float, tmp_path: Path) -> None:
    # The bound of promise 6: sums in another order differ by some ulps, which 20 steps of Adam
    # amplify by a few orders of magnitude and no more.
    reference = curve(1, 1, dtype, tmp_path)
    assert [row["step"] for row in reference] == list(range(1, 21))
    for tp, dp in [(2, 1), (1, 2), (4, 2), (2, 4), (1, 8), (8, 1)]:
        for ours, theirs in zip(curve(tp, dp, dtype, tmp_path), reference, strict=True):
            for key in ("loss", "grad_norm"):
                assert ours[key] == pytest.approx(theirs[key], rel=bound), (tp, dp, ours["step"])


def test_metrics_carry_at_least_12_digits(tmp_path: Path) -> None:
    rows = curve(1, 1, "fp64", tmp_path)
    assert all(len(repr(row["loss"]).replace(".", "")) >= 12 for row in rows[:5])
    assert set(rows[0]) == {"step", "loss", "grad_norm", "tokens_per_s"}


def test_bare_python_is_a_world_of_one(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    done = subprocess.run(
        [sys.executable, ROOT / "examples/train_gpt.py", *SMALL, "--steps", "3", "--data", text],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("HyperCommGrid('default', tp=1 cp=1 dp=1 pp=1, rank 0)")
    assert lines[1].startswith("step    1  loss 5.5")
    assert "--- a sample" in lines


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tp", "2"], "axes: tp=2 · cp=1 · pp=1 = 2 does not divide 1 ranks"),
        (["--dtype", "fp8"], "invalid choice: 'fp8'"),
        (["--config", "nowhere.yaml"], "--config nowhere.yaml"),
        (["--hidden", "100"], "--hidden 100 is not a multiple of --heads 8"),
        (["--data", "nowhere.txt"], "--data nowhere.txt: "),
        (["--data", "/dev/null"], "0 bytes are less than --seq-len + 2 = 66"),
    ],
)
def test_wrong_flags_are_named(arguments: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples/train_gpt.py", *arguments, "--steps", "1"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode != 0
    assert said in done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tpp: 2", "unknown key 'tpp'; did you mean 'tp'?"),
        ("tp: two", "tp: 'two': invalid positive value"),
        ("dtype: fp8", "dtype: 'fp8': invalid choice"),
        ("steps: 0", "steps: 0: 0: expected 1 or more"),
        ("batch_size: 2.5", "batch_size: 2.5: invalid positive value"),
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


def test_flags_go_before_the_config(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("tp: 2\nsteps: 7\nlr: 2e-3")
    args = load().parse(["--config", str(path), "--steps", "3"])
    assert (args.tp, args.steps, args.lr) == (2, 3, 0.002)
