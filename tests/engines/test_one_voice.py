"""What all ranks would say alike is said by one: an error of sizes, a stop by a signal."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from commgrid.runtime import alike
from commgrid.testing import free_port
from tests.engines.said import LONG, killed_after, tracebacks, wait_for_step
from tests.examples.curves import ROOT, load

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
OWN = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_who_speaks() -> None:
    speaks = alike.is_first_of_command
    assert speaks({})
    assert speaks({"RANK": "8", "LOCAL_RANK": "0"})
    assert not speaks({"RANK": "1", "LOCAL_RANK": "1"})
    assert speaks({"SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert not speaks({"SLURM_PROCID": "2", "SLURM_LOCALID": "0"})


@pytest.mark.parametrize("served", [False, True])
def test_a_rank_is_silent_where_rank_0_has_the_error_too(
    served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 would serve the store otherwise, and then the error is this rank's own."""
    port = free_port()
    given = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost"}
    for name, value in {**given, "MASTER_PORT": str(port), "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(alike, "_STORE_SECONDS", 0.3)
    printed: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, value, trace: printed.append(value))
    with pytest.raises(alike.SpecError) as caught, alike.said_once():
        raise alike.SpecError("axes: tp=3")
    other = ValueError("another one")
    sys.excepthook(ValueError, other, None)
    with socket.create_server(("127.0.0.1", port)) if served else socket.socket():
        sys.excepthook(type(caught.value), caught.value, None)
    assert printed == [other, *([caught.value] if served else [])]


@pytest.mark.full
@pytest.mark.parametrize(("sizes", "who"), [("3", "0"), ("1 + 2 * rank", "1")], ids=["all", "one"])
def test_sizes_that_do_not_fit_under_torchrun(sizes: str, who: str, tmp_path: Path) -> None:
    """A plain script: one traceback, of the first that has the error, be it the only one."""
    script = tmp_path / "plain.py"
    script.write_text(
        f"import os, commgrid\nrank = int(os.environ['RANK'])\ncommgrid.initialize(tp={sizes})\n"
    )
    command = [*TORCHRUN, "--tee", "3", str(script)]  # --tee marks each line with its rank
    done = subprocess.run(command, env=OWN, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    said = re.findall(r"^\[default(\d)\]:.*SpecError: axes: ", done.stderr, re.M)
    assert said == [who], done.stderr


def test_torchrun_does_not_end_the_first_before_it_has_spoken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 ended at once without a word, and torchrun rank 0 with it, which was later."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    with pytest.raises(SystemExit):
        load().parse(["--tpp", "2"])
    assert slept == [alike._AGENT_SECONDS]  # in which torchrun ends it, if the first has it too
    assert "unknown flag --tpp" in capsys.readouterr().err  # it is alone with it
    failed, flags = alike.SpecError("axes: tp=3"), load().flags
    assert flags.last_words(failed) == "SpecError: axes: tp=3"
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    assert flags.last_words(failed) == 1


@pytest.mark.full
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_of_plain_processes_is_one_line(stop: signal.Signals) -> None:
    port = str(free_port())
    ranks = []
    with contextlib.ExitStack() as started:
        for rank in ("0", "1"):
            place = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "MASTER_PORT": port}
            one = subprocess.Popen(
                [sys.executable, "examples/train_gpt.py", *LONG],
                cwd=ROOT,
                text=True,
                env={**OWN, **place, "MASTER_ADDR": "127.0.0.1"},
                start_new_session=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            ranks.append(started.enter_context(killed_after(one)))
        wait_for_step(ranks[0], 3)
        for each in ranks:
            each.send_signal(stop)
        said = [each.communicate(timeout=100) for each in ranks]
    assert [each.returncode for each in ranks] == [128 + stop] * 2
    out, err = ("".join(texts) for texts in zip(*said, strict=True))
    assert out.count(f"stopped by {stop.name}: ") == 1
    assert tracebacks(err) == 0, err
