"""What launchers' variables mean, without starting anything."""

import pytest

from commgrid import SpecError
from commgrid.store.launch import Launch, first_host

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NODELIST": "gpu[007-010],cpu1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "16",
}  # fmt: skip
BATCH = {
    "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_NPROCS": "8", "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NNODES": "2", "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_GTIDS": "0",
}  # fmt: skip
"""What SLURM 22.05.8 gave the shell of a batch script of 8 tasks on 2 nodes."""


def test_torchrun() -> None:
    made = Launch.from_environment(TORCHRUN)
    assert made == Launch(3, 8, 1, "node0", 29500, hosts_store=False)
    assert Launch.from_environment({**TORCHRUN, "RANK": "0"}).hosts_store
    agent = {**TORCHRUN, "RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert not Launch.from_environment(agent).hosts_store
    restarted = {**agent, "TORCHELASTIC_RESTART_COUNT": "2"}
    assert Launch.from_environment(restarted) == Launch.from_environment(agent)
    by_hand = {key: TORCHRUN[key] for key in TORCHRUN if key != "LOCAL_RANK"}
    assert Launch.from_environment(by_hand).local_rank is None


def test_slurm() -> None:
    made = Launch.from_environment(SLURM)
    assert (made.rank, made.world_size, made.local_rank) == (5, 16, 1)
    assert (made.address, made.port) == ("gpu007", 20000 + 123456 % 10000)
    assert Launch.from_environment({**SLURM, "SLURM_PROCID": "0"}).hosts_store
    steps = {**SLURM, "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NODELIST": "gpu009"}
    assert Launch.from_environment(steps).world_size == 8
    assert Launch.from_environment(steps).address == "gpu009"
    older = {key: SLURM[key] for key in SLURM if key != "SLURM_STEP_NUM_TASKS"}
    assert Launch.from_environment(older).world_size == 16
    given = Launch.from_environment({**SLURM, "MASTER_ADDR": "here", "MASTER_PORT": "77"})
    assert (given.address, given.port) == ("here", 77)


def test_a_bare_python_in_a_batch_script_is_a_world_of_one() -> None:
    """SLURM_PROCID and SLURM_NTASKS are set there as well, and nobody else would come."""
    assert Launch.from_environment(BATCH) == Launch()


def test_the_shell_that_salloc_opens_on_a_node_is_a_world_of_one() -> None:
    shell = {**BATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}
    made = Launch.from_environment(shell)
    assert (made.world_size, made.address, made.hosts_store) == (1, None, False)


def test_torchrun_inside_an_allocation_goes_first() -> None:
    assert Launch.from_environment({**SLURM, **TORCHRUN}).world_size == 8


def test_nobody() -> None:
    assert Launch.from_environment({}) == Launch()
    assert Launch.from_environment({"MASTER_ADDR": "left over"}) == Launch()


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("n[3,7-9]", "n3"),
        ("n[01-04]-ib,x", "n01-ib"),
        ("r[1]n[5]", "r1n5"),
    ],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            {"RANK": "0"},
            r"RANK set but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT; start with",
        ),
        ({**TORCHRUN, "RANK": "x"}, r"RANK='x': expected a number"),
        ({**TORCHRUN, "RANK": "8"}, r"rank 8 does not fit a world of 8"),
        (
            {**SLURM, "SLURM_STEP_NUM_TASKS": "four"},
            r"SLURM_STEP_NUM_TASKS='four': expected a number",
        ),
    ],
)
def test_broken_environments_are_named(environment: dict[str, str], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        Launch.from_environment(environment)
