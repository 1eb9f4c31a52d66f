"""Every supported release of megatron-core: the same functions, answers and losses."""

from __future__ import annotations

from importlib.metadata import version as installed
from pathlib import Path

import pytest

from megatron_adapter import SUPPORTED as VERSIONS
from tests.megatron_adapter.wheels import on_release, vendors
from tests.peers import parallel_state  # noqa: F401  (skips where there is no megatron-core)

HERE = "tests.megatron_adapter.on_release"
SHORT = VERSIONS[-1]
"""What the short run asks: the newest."""
ENDS = [VERSIONS[0], SHORT]
"""The oldest and the newest: what costs minutes is asked of them alone where others repeat it."""


def unless_installed(version: str) -> None:
    """Of that one test_functions and test_gpt ask the same, and more."""
    if version == installed("megatron-core"):
        pytest.skip(f"{version} is installed: tested by test_functions and test_gpt")


@pytest.mark.nightly("0.15.3", "0.16.1", "0.17.1", "0.18.2")
@pytest.mark.parametrize("version", VERSIONS)
def test_the_adapter_has_what_the_release_has(version: str) -> None:
    assert on_release(version, HERE, "table") == []


@pytest.mark.nightly
@pytest.mark.parametrize("version", VERSIONS)
def test_hyper_comm_grids_enumerate_as_megatrons(version: str) -> None:
    on_release(version, HERE, "grids")


@pytest.mark.nightly
@pytest.mark.parametrize("version", VERSIONS)
def test_collections_have_megatrons_groups(version: str) -> None:
    unless_installed(version)
    on_release(version, HERE, "collections", timeout=400)


@pytest.mark.nightly("0.15.3-*", "0.16.1-*", "0.17.1-*", "0.18.2-*", "0.19.2-8")
@pytest.mark.parametrize("world", [2, 8])  # test_functions has 4 too
@pytest.mark.parametrize("version", VERSIONS)
def test_every_function_on_every_rank(version: str, world: int) -> None:
    unless_installed(version)
    count = 3 if version == SHORT else 6
    assert on_release(version, HERE, "functions", world, count, timeout=600) >= count


@pytest.mark.nightly
@pytest.mark.parametrize(("version", "world"), [*((v, 16) for v in ENDS), (SHORT, 64)])
def test_every_function_on_every_rank_of_a_large_world(version: str, world: int) -> None:
    unless_installed(version)
    assert on_release(version, HERE, "large_world", world, timeout=900) >= 3


@pytest.mark.nightly
def test_what_an_older_release_has_no_variables_for() -> None:
    on_release("0.15.3", HERE, "newer_state")


CASES = {
    "--tp 2 --sequence-parallel": 2,
    "--pp 2 --vpp 2": 2,
    "--tp 2 --pp 2 --distributed-optimizer": 8,
    "--experts 4 --ep 2": 2,
    "--experts 4 --ep 2 --tp 2 --etp 1 --sequence-parallel --distributed-optimizer": 4,
}
"""Arguments of the example, and the number of ranks."""
IN_ANOTHER = ("--tp 2 --sequence-parallel", "--experts 4 --ep 2")
"""What the larger ones have too."""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("version", "given"),
    [(v, c) for v in VERSIONS for c in CASES if v in ENDS or c not in IN_ANOTHER],
)
def test_losses_are_the_same_to_the_last_bit(version: str, given: str) -> None:
    unless_installed(version)
    short = f"{given} --steps 3 --microbatches 2"  # of the installed one test_gpt has longer runs
    for found in on_release(version, HERE, "losses", short, CASES[given], timeout=600):
        assert len(found["megatron"]) == 3
        assert found["commgrid"] == found["megatron"]
        assert found.get("collection", found["megatron"]) == found["megatron"]
        assert ("collection" in found) == (version != "0.15.3")


def test_a_vendors_copy_of_the_newest_installs(tmp_path: Path) -> None:
    """With one getter more and other defaults; Megatron's own groups are the oracle."""
    on_release(vendors(SHORT, tmp_path), HERE, "vendors", timeout=400)


def test_a_release_whose_known_getters_read_more_is_refused() -> None:
    found = on_release(SHORT, HERE, "what_a_release_adds")
    assert any("get_data_parallel_group reads _DATA_PARALLEL_GROUP_WITH_CP_W" in o for o in found)
