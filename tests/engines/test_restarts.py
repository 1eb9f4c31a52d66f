"""A job on two nodes comes up again whoever of it was killed, and goes on where it was.

Plain torch, in the same agents, comes up in most of these cases and in some only now and then: its
ranks write their addresses under the same keys at every attempt, and one that comes first reads
the address that a killed rank has left ("Connection refused"), or waits until the restarts are used
up. So seen with torch 2.13 where a node's worker is killed once or twice, and where a static
rendezvous restarts two workers on one node. Here it is run where nobody is killed: such a job comes
up in this harness.
Nothing comes up again where the agent that holds the rendezvous is killed.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.engines.agents import LOOPBACK, Host, Job, job, namespaces
from tests.examples.curves import curve, same_curve, undisturbed

TWO_NODES = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3"]
# Which starts of which worker, node.local rank, end in SIGKILL once the job is up.
DEATHS: dict[str, dict[str, list[int]]] = {
    "none": {},
    "first_node_once": {"0.0": [1]},
    "second_node_once": {"1.0": [1]},
    "first_node_twice": {"0.0": [1, 2]},
    "second_node_twice": {"1.0": [1, 2]},
    "one_after_the_other": {"1.0": [1], "0.0": [2]},
    "both": {"0.0": [1], "1.0": [1]},
}


@pytest.fixture(params=["loopback", "namespaces"])
def hosts(request: pytest.FixtureRequest) -> Iterator[tuple[Host, Host]]:
    with ExitStack() as stack:
        if request.param == "loopback":
            yield LOOPBACK
            return
        try:
            made = stack.enter_context(namespaces())
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield made


def results(running: Job) -> list[dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in sorted(running.folder.glob("done-*"))]
    return sorted(found, key=lambda row: int(row["rank"]))


def check_up(running: Job, nodes: list[int], world: int) -> None:
    assert running.wait(nodes) == [0] * len(nodes), running.said()
    came = results(running)
    assert [(row["rank"], row["world"]) for row in came] == [(r, world) for r in range(world)]


@pytest.mark.full("loopback-second_node_once")
@pytest.mark.nightly(
    "loopback-both",
    "loopback-first_node_once",
    "loopback-first_node_twice",
    "loopback-none",
    "loopback-one_after_the_other",
    "loopback-second_node_twice",
    "namespaces-*",
)
@pytest.mark.parametrize(
    ("hosts", "killed"),
    [
        *(("loopback", killed) for killed in DEATHS),
        *(("namespaces", killed) for killed in ("first_node_twice", "second_node_once", "both")),
    ],
    indirect=["hosts"],
)
def test_two_nodes(killed: str, hosts: tuple[Host, Host]) -> None:
    deaths = DEATHS[killed]
    with job(hosts, timeout=300) as running:
        running.start(TWO_NODES, ["commgrid", json.dumps(deaths)])
        check_up(running, [0, 1], 2)
        starts = [int((running.folder / f"starts-{node}.0").read_text()) for node in (0, 1)]
        for worker, dead in deaths.items():
            assert starts[int(worker[0])] > max(dead)
    assert not running.processes()


@pytest.mark.nightly("second_node_once", "first_node_once", "second_node_twice")
@pytest.mark.parametrize("killed", ["first_node_once", "second_node_once", "second_node_twice"])
def test_survivors_that_notice_nothing(killed: str) -> None:
    """Their agent stops them, which it does not count as a restart: TORCHELASTIC_RESTART_COUNT
    differs between the nodes from then on."""
    with job(LOOPBACK, timeout=300) as running:
        running.start(TWO_NODES, ["commgrid", json.dumps(DEATHS[killed])], IDLE="1")
        check_up(running, [0, 1], 2)
    assert not running.processes()


@pytest.mark.nightly
def test_plain_torch_comes_up_too() -> None:
    with job(LOOPBACK, timeout=300) as running:
        running.start(TWO_NODES, ["torch", json.dumps(DEATHS["none"])])
        check_up(running, [0, 1], 2)
    assert not running.processes()


@pytest.mark.nightly
def test_fewer_nodes(hosts: tuple[Host, Host]) -> None:
    """The second agent is killed with its worker, and the first goes on by itself."""
    with job(hosts, timeout=300) as running:
        flags = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3"]
        # The first attempt after the death still counts on the dead node, until its startup ends.
        running.start(flags, ["commgrid", json.dumps({"1.0": [1, 2, 3, 4]})], STARTUP="10")
        wait_for(running.folder / "starts-1.0")
        wait_for(running.folder / "starts-0.0")
        os.killpg(running.agents[1].pid, signal.SIGKILL)
        check_up(running, [0], 1)
    assert not running.processes()


def wait_for(path: Path, seconds: float = 200) -> None:
    until = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.01)  # between two looks


@pytest.mark.nightly
def test_a_static_rendezvous_keeps_the_store() -> None:
    """One agent, whose store still holds the keys of the attempt before."""
    with job(LOOPBACK[:1], timeout=300) as running:
        flags = ["--master-addr", "127.0.0.1", "--nproc-per-node", "2", "--max-restarts", "1"]
        running.start(flags, ["commgrid", json.dumps({"0.1": [1]})])
        check_up(running, [0], 2)
        assert (running.folder / "starts-0.1").read_text() == "2"


TINY = [
    "--layers", "2", "--hidden", "16", "--heads", "4", "--batch-size", "8", "--seq-len", "4",
    "--lr", "1e-2", "--dtype", "fp64", "--steps", "10",
]  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """The curve of one process that nobody kills."""
    return undisturbed(TINY, tmp_path_factory.mktemp("alone") / "metrics")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("hosts", "nodes"), [("loopback", "2"), ("namespaces", "1:2")], indirect=["hosts"]
)
def test_training_goes_on_with_its_curve(
    nodes: str, uninterrupted: list[dict[str, float]], hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    """The same command for the first start and every other: --save and --resume name one folder."""
    saved, metrics = str(tmp_path / "saved"), tmp_path / "metrics"
    flags = [
        *TINY, "--save", saved, "--save-every", "2", "--resume", saved, "--metrics", str(metrics),
    ]  # fmt: skip
    with job(hosts, timeout=300) as running:
        torchrun = ["--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", "3"]
        running.start(torchrun, ["train_gpt", json.dumps({"1.0": [1]}), *flags])
        alive = [0, 1]
        if nodes == "1:2":
            wait_for(Path(saved) / "step_00000004")
            os.killpg(running.agents[1].pid, signal.SIGKILL)
            alive = [0]
        assert running.wait(alive) == [0] * len(alive), running.said()
        said = running.log(0).read_text() + running.log(1).read_text()
    rows = curve(metrics)
    assert [row["step"] for row in rows] == list(range(1, 11))
    same_curve(rows, uninterrupted, "fp64")
    assert "goes on after step 4" in said
