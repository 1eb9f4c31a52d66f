"""train_gpt on two hosts: over a slow wire that loses packets, a cut one, and with a host gone."""

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.agents import Job, job
from tests.engines.said import JOB, LONG, row, tracebacks, wait_until
from tests.engines.wire import Wire, wire
from tests.examples.curves import curve, same_curve, undisturbed

TIMEOUT = 6  # before TCP gives up, when torchrun's agent ends the ranks of its node
ERROR = re.compile(r"^(?:\[\S+\]:)?(?:PeerFailed|PeerTimeout)Error: (.*)$", re.M)
TWO_BY_TWO = ["--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "0"]


@contextlib.contextmanager
def wired(delay: float = 0.0, loss: float = 0.0) -> Iterator[Wire]:
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(wire(delay, loss))
        except OSError as error:
            pytest.skip(f"no network namespaces or TUN interfaces here: {error}")
        yield made


def start(running: Job, flags: list[str]) -> None:
    running.start(TWO_BY_TWO, ["train_gpt", json.dumps({}), *flags])


def trained(running: Job, step: int) -> None:
    """Waits until a step is done."""
    line = f"step {step:4}"
    try:
        wait_until(lambda: line in text(running, 0), line)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{running.said()}") from None


def text(running: Job, node: int) -> str:
    return running.log(node).read_text(errors="replace")


def heard(running: Job, node: int) -> list[str]:
    """What a node's ranks have said of the failure, a line each; none has a traceback."""
    said = text(running, node)
    assert tracebacks(said, "train_gpt.py") == 0, said
    lines = ERROR.findall(said)
    assert lines, said
    return list(lines)


def named(told: list[str]) -> set[str]:
    """The ranks that are said to be gone or out of reach."""
    blamed = " ".join(re.split(r" (?:is|are) gone ", line)[0] for line in told)
    return set(re.findall(r"\d+", blamed))


@pytest.mark.nightly
def test_a_slow_wire_that_loses_packets(tmp_path: Path) -> None:
    """50 ms each way, and every hundredth packet never arrives."""
    metrics = tmp_path / "metrics"
    reference = undisturbed(JOB, tmp_path / "alone")
    with wired(0.05, 0.01) as made, job(made.hosts, timeout=200) as running:
        start(running, [*JOB, "--tp", "2", "--steps", "8", "--metrics", str(metrics)])
        assert running.wait([0, 1]) == [0, 0], running.said()
    assert not running.processes()
    same_curve(curve(metrics), reference[:8], "fp64")
    row("two hosts: 50 ms and 1 % loss", "all of it", "nothing: the same curve", 0)


@pytest.mark.nightly
@pytest.mark.parametrize("gone", ["cut", "host_of_the_store"])
def test_a_host_that_cannot_be_reached(gone: str) -> None:
    """Each side names the ranks of the other, within the timeout, and ends."""
    with wired() as made, job(made.hosts, timeout=120) as running:
        start(running, [*LONG, "--tp", "2", "--timeout", str(TIMEOUT)])
        trained(running, 3)
        made.cut()
        left = [0, 1]
        if gone == "host_of_the_store":
            os.killpg(running.agents[0].pid, signal.SIGKILL)
            left = [1]
        for node in left:
            wait_until(lambda node=node: ERROR.search(text(running, node)), f"an error of {node}")
        running.wait(left)
        assert not running.processes()
        for node in left:
            told = heard(running, node)
            row(f"two hosts: {gone}, node {node}", "a step", "; ".join(told), 0)
            others = {str(rank) for rank in ((2, 3), (0, 1))[node]}
            assert others <= named(told), told
