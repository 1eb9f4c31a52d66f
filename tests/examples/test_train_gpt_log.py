"""What train_gpt says and writes, and how it ends: at its last step, at Ctrl-C, with an error."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from commgrid import checkpoint
from commgrid.testing import run_on_ranks
from tests.engines.said import killed_after, wait_for_step
from tests.examples.curves import ROOT, curve, load

TINY = [
    "--layers", "1", "--hidden", "16", "--heads", "4", "--batch-size", "4", "--seq-len", "4",
    "--lr", "1e-2",
]  # fmt: skip
SCRIPT = str(ROOT / "examples" / "train_gpt.py")


def heard(job: list[str]) -> list[str]:
    """The lines that training prints on this rank, and what it ends with if it fails."""
    train_gpt, out, err = load(), io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            train_gpt.train(train_gpt.parse(job))
        except SystemExit as error:
            return [str(error)]
    return out.getvalue().splitlines()


def heard_of_all(*jobs: list[str]) -> list[list[str]]:
    return [heard(job) for job in jobs]


def test_lines_of_a_run(tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    job = [*TINY, "--steps", "7", "--log-every", "3", "--save", saved, "--tie-embeddings"]
    job += ["--save-every", "2", "--save-in-background"]
    first, second = run_on_ranks(heard, 2, job, backend=None, launcher="torchrun")
    assert second == []
    assert first[0] == "grid   dp 2 on 2 ranks (cpu)"
    assert first[1].startswith("model  7,")
    assert first[1].endswith(" parameters: 1 block of width 16, fp32")
    assert first[2] == "steps  7 of 16 tokens each: 4 sequences of 4 bytes"
    steps = first[3:-1]
    assert [line.split()[1] for line in steps] == ["1", "3", "6", "7"]
    row = r"step +\d+  loss \d\.\d{4}  lr \d\.\d\de-\d\d  grad norm \d\.\d{3}  [\d,]+ tokens/s"
    assert all(re.match(row, line) for line in steps), steps
    assert [line.endswith(" s left") for line in steps] == [False, True, True, False]
    loss = steps[-1].split()[3]
    assert re.fullmatch(
        rf"done: 7 steps in [\d.]+ s, to step 7, loss {loss}; step 7 is saved in {saved}; "
        rf"to go on: --resume {saved} --steps 14",
        first[-1],
    )
    assert checkpoint.steps(saved) == [2, 4, 6, 7]
    changed = [*job, "--resume", saved, "--steps", "8", "--seed", "3"]
    again, told = run_on_ranks(
        heard_of_all, 1, [*job, "--resume", saved], changed, backend=None, launcher="torchrun"
    )[0]
    assert again[3:] == ["goes on after step 7", "trained nothing: step 7 of --steps 7 is done"]
    assert told[4] == "with other flags, so not as one run would: --seed 3 (was 0)"
    assert told[-1].startswith("done: 1 step in ")


@pytest.mark.full
def test_parameters_of_a_rank_are_said() -> None:
    lines = run_on_ranks(
        heard, 2, [*TINY, "--steps", "0", "--fsdp"], backend=None, launcher="torchrun"
    )
    whole, own = map(int, re.findall(r"[\d,]+", lines[0][1].replace(",", ""))[:2])
    assert whole / 2 <= own < whole


@pytest.mark.full("--save", "--tensorboard")
@pytest.mark.parametrize("flag", ["--metrics", "--save", "--tensorboard"])
def test_what_cannot_be_written_is_said_at_the_start_by_one_rank(flag: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    path = str(tmp_path / "file" / "run")
    told = run_on_ranks(heard_with_board, 2, [*TINY, flag, path], backend=None, launcher="torchrun")
    (line,) = told[0]
    assert re.fullmatch(
        rf"{flag} {path}: cannot be written \({tmp_path}/file.* is no folder\); .*", line
    )
    assert told[1] == ["1"]


BOARD: list[tuple[Any, ...]] = []


class Board:
    """Stands for TensorBoard's writer."""

    def __init__(self, folder: str, purge_step: int) -> None:
        BOARD.append((folder, purge_step))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        BOARD.append((name, value, step))

    def close(self) -> None:
        BOARD.append(("close",))


def heard_with_board(job: list[str]) -> list[str]:
    module: Any = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Board
    sys.modules["torch.utils.tensorboard"] = module
    return heard(job)


def board_of(job: list[str]) -> list[tuple[Any, ...]]:
    heard_with_board(job)
    return BOARD


def test_tensorboard_is_given_all_figures_by_one_rank(tmp_path: Path) -> None:
    folder, metrics = str(tmp_path / "board"), tmp_path / "metrics"
    job = [*TINY, "--steps", "3", "--eval-every", "2", "--tensorboard", folder]
    job += ["--metrics", str(metrics)]
    first, second = run_on_ranks(board_of, 2, job, backend=None, launcher="torchrun")
    assert second == []
    assert first[0] == (folder, 1)
    assert first[-1] == ("close",)
    figures = {(name, step): value for name, value, step in first[1:-1]}
    for row in curve(metrics):
        for name in ("loss", "grad_norm", "tokens_per_s"):
            assert figures.pop((name, row["step"])) == row[name]
        assert figures.pop(("learning_rate", row["step"])) == pytest.approx(row["step"] * 5e-4)
    assert [step for _, step in figures] == [2, 3]
    assert {name for name, _ in figures} == {"evaluation_loss"}


def test_tensorboard_itself_reads_what_is_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    job = [*TINY, "--steps", "3", "--tensorboard", str(tmp_path)]
    run_on_ranks(heard, 1, job, backend=None, launcher="torchrun")
    found = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in found.Scalars("loss")] == [1, 2, 3]


def without_board(job: list[str]) -> list[str]:
    sys.modules["torch.utils.tensorboard"] = None  # type: ignore[assignment]
    return heard(job)


def test_tensorboard_that_is_not_there_is_said(tmp_path: Path) -> None:
    job = [*TINY, "--tensorboard", str(tmp_path)]
    (told,) = run_on_ranks(without_board, 1, job, backend=None, launcher="torchrun")[0]
    assert told.startswith(f"--tensorboard {tmp_path}: TensorBoard is not installed here (")
    assert told.endswith("; pip install tensorboard, or leave the flag out")


def test_help_is_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load().parse(["--help"])
    said = capsys.readouterr().out
    heads = [line[:-1] for line in said.splitlines() if re.fullmatch(r"[a-z].*:", line)]
    assert heads[0] == "options"
    assert heads[1:] == list(load().flags.GROUPS)
    assert max(map(len, said.splitlines())) <= 100


def test_wrong_flags_are_one_line() -> None:
    with contextlib.redirect_stderr(io.StringIO()) as err, pytest.raises(SystemExit):
        load().parse(["--warmpu", "3"])
    (line,) = err.getvalue().splitlines()
    assert line.endswith("unknown flag --warmpu; did you mean '--warmup'?")


LONG = [*TINY, "--steps", "1000000", "--log-every", "1", "--save-every", "2"]


@pytest.mark.full("*")
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_is_one_line(stop: signal.Signals, tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    started = subprocess.Popen(
        [sys.executable, SCRIPT, *LONG, "--keep", "1", "--save", saved],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with killed_after(started) as running:
        wait_for_step(running, 4)
        running.send_signal(stop)
        out, err = running.communicate(timeout=300)
    assert running.returncode == 128 + stop
    last = out.splitlines()[-1]
    assert re.fullmatch(
        rf"stopped by {stop.name}: \d+ steps in [\d.]+ s, to step \d+, loss \d\.\d{{4}}; "
        rf"step \d+ is saved in {saved}; to go on: --resume {saved}",
        last,
    ), (last, err)
    assert "Traceback" not in err


@pytest.mark.full
def test_a_stop_under_torchrun_is_one_line() -> None:
    """The agent passes the signal on; one rank says so, none has a traceback."""
    started = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         SCRIPT, *TINY, "--steps", "1000000", "--log-every", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with killed_after(started) as running:
        wait_for_step(running, 4)
        running.send_signal(signal.SIGTERM)
        out, err = running.communicate(timeout=300)
    assert [line for line in out.splitlines() if line.startswith("stopped by SIGTERM: ")] == [
        out.splitlines()[-1]
    ]
    assert "train_gpt.py" not in "".join(re.findall(r'File "([^"]+)"', err))


def test_a_signal_that_was_ignored_stays_ignored() -> None:
    """As under nohup, or in the background of a shell."""
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
    told: list[str] = []
    stop = load().told_when_stopped
    try:
        with stop(told.append):
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, ignored)
    assert told == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def fails_at(step: int, job: list[str]) -> list[str]:
    train_gpt = load()
    draw = train_gpt.global_batch

    def no_more(text: Any, now: int, args: Any) -> Any:
        if now == step:
            raise ValueError("no more text")
        return draw(text, now, args)

    train_gpt.global_batch = no_more
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(ValueError):
        train_gpt.train(train_gpt.parse(job))
    return out.getvalue().splitlines()


def test_an_error_is_followed_by_how_to_go_on(tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    job = [*TINY, "--steps", "9", "--save", saved, "--save-every", "2"]
    lines = run_on_ranks(fails_at, 1, 4, job, backend=None, launcher="torchrun")[0]
    assert lines[-1].startswith("stopped by ValueError: 3 steps in ")
    assert lines[-1].endswith(f"; step 2 is saved in {saved}; to go on: --resume {saved}")


def test_who_saves_is_not_told_to(tmp_path: Path) -> None:
    job = [*TINY, "--steps", "9", "--save", str(tmp_path), "--save-every", "4"]
    lines = run_on_ranks(fails_at, 1, 3, job, backend=None, launcher="torchrun")[0]
    assert lines[-1].endswith("; nothing was saved")


WITHOUT_NUMPY = """
import runpy, sys
sys.modules["numpy"] = None  # importing it fails
sys.path.insert(0, sys.argv[1])
sys.argv[0] = "train_gpt.py"
script = sys.argv.pop(1) + "/train_gpt.py"
runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.full
def test_the_first_lines_are_not_about_numpy() -> None:
    folder = str(ROOT / "examples")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NUMPY, folder, *TINY, "--steps", "1"],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith("grid   1 rank (cpu)\n")


def test_metrics_have_no_other_rows(tmp_path: Path) -> None:
    """Whatever else is looked at: machines read them, with at least 12 digits in fp64."""
    metrics = tmp_path / "metrics"
    job = [*TINY, "--steps", "4", "--log-every", "3", "--eval-every", "2", "--sample"]
    job += ["--dtype", "fp64"]
    job += ["--sample-tokens", "2", "--metrics", str(metrics)]
    run_on_ranks(heard, 1, job, backend=None, launcher="torchrun")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert {tuple(row) for row in rows} == {("step", "loss", "grad_norm", "tokens_per_s")}
    assert all(len(repr(row["loss"]).replace(".", "")) >= 12 for row in rows)
