"""Ranks that are configured differently, doubled or missing: every other rank names them.

Four real ranks each; `tests/rendezvous` has every place of many ranks, in virtual time. Where all
ranks come, `startup_timeout` is longer than the test may last, so that an error is one that came
without waiting for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import commgrid
from commgrid import CommGridError, PeerTimeoutError
from commgrid.runtime import registry
from commgrid.testing import free_port, run_on_ranks
from commgrid.torch_compat import world as torch_world
from tests.flags import hear, meet, tell
from tests.process_groups import group_count
from tests.waiting import comes, until_waits

WORLD = 4
RANKS = [(rank,) for rank in range(WORLD)]
FOREVER = 600.0
WAITED = 15.0  # for a rank that never comes; the others have so long to come themselves

YAML = {"axes": {"tp": 2, "dp": -1}}
DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "sizes": ({"tp": 2}, {"tp": 4}, r"spec\.axes\.tp is 4 on rank {odd} and 2 on {others}"),
    "order": (
        {"tp": 2, "pp": 2}, {"tp": 2, "pp": 2, "order": "pp-cp-ep-dp-tp"},
        r"spec\.order is 'pp-cp-dp-tp' on rank {odd} and 'tp-cp-dp-pp' on {others}",
    ),
    "YAML": (
        {"config": YAML}, {"config": {**YAML, "groups": {"ag": "dp"}}},
        r"spec\.groups\.ag is 'dp' on rank {odd} and 'not given' on {others}",
    ),
    "timeout": ({}, {"timeout": 5}, r"timeout is 5.0 on rank {odd} and None on {others}"),
    "backend": ({}, {"backend": "cpu:gloo"}, r"backend is 'cpu:gloo' on rank {odd} and"),
    "fewer ranks": (
        {}, {"ranks": range(2)}, r"ranks is \[\d, \d, 1\] on rank {odd} and \[0, 4, 1\] on"
    ),
}  # fmt: skip
"""What three ranks give to `initialize`, what the odd one gives, and what all of them raise."""
ODD = (0, 1, 0, 1, 0, 1)
"""Ranks that fewer ranks have a place for."""


def attempt(startup: float, **given: Any) -> tuple[str, str]:
    try:
        commgrid.initialize(startup_timeout=startup, **given)
    except CommGridError as error:
        assert not commgrid.is_initialized()
        return type(error).__name__, str(error)
    return "no error", ""


def all_differ(folder: str, rank: int) -> list[tuple[str, str]]:
    """One difference after the other, and then none."""
    done = dist.FileStore(f"{folder}/done", WORLD)
    found = []
    for (what, (usual, other, _)), odd in zip(DIFFERENT.items(), ODD, strict=True):
        found.append(attempt(FOREVER, **(other if rank == odd else usual)))
        done.set(f"{what} {rank}", "")
        done.wait([f"{what} {each}" for each in range(WORLD)])
    assert commgrid.initialize(tp=2).get_ranks("tp") == ((0, 1) if rank < 2 else (2, 3))
    meet(rank, WORLD)  # the store goes with rank 0
    return found


@pytest.mark.parametrize(
    "how", [{"backend": "gloo"}, {"backend": None, "launcher": "torchrun"}], ids=["up", "down"]
)
def test_all_ranks_say_who_was_given_something_else(how: dict[str, Any], tmp_path: Path) -> None:
    """Whether torch.distributed is up before or not."""
    for found in run_on_ranks(all_differ, WORLD, str(tmp_path), per_rank=RANKS, **how):
        for (kind, message), (_, _, said), odd in zip(found, DIFFERENT.values(), ODD, strict=True):
            assert kind == "GridMismatchError", message
            assert re.search(with_names(said, odd), message), message


def with_names(said: str, odd: int) -> str:
    others = "ranks 1-3" if odd == 0 else f"ranks {'0' if odd == 1 else f'0-{odd - 1}'}"
    tail = "" if odd in (0, 3) else ", 3" if odd == 2 else ", 2-3"
    return said.replace("{odd}", str(odd)).replace("{others}", others + tail)


# -- before ranks can meet ---------------------------------------------------------------


def other_versions() -> None:
    mine = torch_world.versions()
    other: Any = lambda: {**mine, "torch": "2.11.0"}  # noqa: E731
    registry.versions = torch_world.versions = other


def smaller_world() -> None:
    os.environ["WORLD_SIZE"] = "3"


def other_port() -> None:
    os.environ["MASTER_PORT"] = str(free_port())


def other_rank() -> None:
    os.environ["RANK"] = "1"


def launched(before: Callable[[], object], startup: float, rank: int) -> tuple[str, str]:
    if rank == 2:
        before()
    return attempt(startup)


def launch(before: Callable[[], object], startup: float, **how: Any) -> list[tuple[str, str]]:
    given = {"per_rank": RANKS, "backend": None, "launcher": "torchrun", **how}
    # The ranks set variables of the environment.
    return run_on_ranks(launched, WORLD, before, startup, **given, check=False)


@pytest.mark.parametrize(
    ("before", "said"),
    [
        (other_versions, r"versions\.torch is '2\.11\.0' on rank 2 and '\S+' on ranks 0-1, 3"),
        (smaller_world, r"world_size is 3 on rank 2 and 4 on ranks 0-1, 3"),
    ],
)
def test_a_rank_that_was_launched_differently(before: Callable[[], object], said: str) -> None:
    for kind, message in launch(before, FOREVER):
        assert kind == "GridMismatchError"
        assert re.search(said, message), message


ABSENT = r"rank 2 did not arrive within startup_timeout \(ranks 0-1, 3 did\)"
UNSERVED = r"nobody serves the store at 127\.0\.0\.1:\d+ within startup_timeout"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("before", "alone"), [(other_port, UNSERVED), (other_rank, "Another process has come as rank")]
)
def test_a_rank_that_cannot_reach_the_others(before: Callable[[], object], alone: str) -> None:
    """Either process of a doubled rank may be taken for the other."""
    for rank, (kind, message) in enumerate(launch(before, WAITED)):
        assert kind == "PeerTimeoutError"
        assert re.search(f"{ABSENT}|{alone}" if rank in (1, 2) else ABSENT, message), message


@pytest.mark.nightly
@pytest.mark.parametrize(("absent", "said"), [(2, ABSENT), (0, UNSERVED)])
def test_a_process_that_is_never_started(absent: int, said: str) -> None:
    """Where it is the store's server nobody can say who is missing, and the address is named."""
    for rank, told in enumerate(launch(lambda: None, WAITED, absent=[absent])):
        if rank != absent:
            assert told[0] == "PeerTimeoutError"
            assert re.search(said, told[1]), told[1]


# -- while a grid is made ----------------------------------------------------------------


def late(rank: int) -> tuple[int, ...]:
    """Rank 3 comes when the others have given up, and before they try again."""
    if rank == 3:
        hear(*(f"rank {other} has given up" for other in range(3)))
        comes("rank 3")
    else:
        with pytest.raises(PeerTimeoutError, match=r"rank 3 did not arrive within startup_timeout"):
            commgrid.initialize(tp=2, startup_timeout=4)
        tell(f"rank {rank} has given up")
        until_waits("rank 3")
    return commgrid.initialize(tp=2).get_ranks("tp")


@pytest.mark.full
def test_a_failed_attempt_does_not_spoil_the_next() -> None:
    found = run_on_ranks(late, WORLD, per_rank=RANKS)
    assert found == [(0, 1), (0, 1), (2, 3), (2, 3)]


def fails_half_way(rank: int) -> tuple[str, str]:
    """Rank 2 fails at its third communicator; nobody keeps a group, and WORLD still works."""
    from commgrid.torch_compat import groups as torch_groups

    before = group_count()
    create = torch_groups.create_group
    made = []

    def failing(*args: Any, **kwargs: Any) -> Any:
        if rank == 2 and len(made) == 2:
            raise RuntimeError("injected")
        made.append(create(*args, **kwargs))
        return made[-1]

    torch_groups.create_group = failing
    outcome = attempt(FOREVER, tp=2, pp=2)
    torch_groups.create_group = create
    assert group_count() == before
    dist.barrier()
    grid = commgrid.initialize(tp=2, pp=2)
    grid.check()
    return outcome


def test_an_initialize_that_fails_half_way_leaves_nothing() -> None:
    # A grid that failed leaves keys in the store.
    for _, message in run_on_ranks(fails_half_way, WORLD, per_rank=RANKS, check=False):
        assert "injected" in message, message


def lost(rank: int) -> str | None:
    """Rank 3 falls silent after all have agreed, while groups are being made."""
    from commgrid.torch_compat import groups as torch_groups

    create = torch_groups.create_group

    def creating(*args: Any, **kwargs: Any) -> Any:
        if rank == 3:
            hear("0 is through", "1 is through", "2 is through")
            raise KeyboardInterrupt
        return create(*args, **kwargs)

    torch_groups.create_group = creating
    try:
        with pytest.raises(PeerTimeoutError) as told:
            commgrid.initialize(tp=2, startup_timeout=4)
    except KeyboardInterrupt:
        return None
    tell(f"{rank} is through")
    return str(told.value)


@pytest.mark.full
def test_a_rank_that_is_lost_half_way_is_the_one_that_is_named() -> None:
    # A grid that failed leaves keys in the store.
    *others, silent = run_on_ranks(lost, WORLD, per_rank=RANKS, check=False)
    assert silent is None
    for message in others:
        assert ": rank 3 did not get as far as 'created' within startup_timeout" in message


def interrupted(rank: int) -> Any:
    """Ctrl-C while waiting, then a second try: the rank is not counted twice."""
    from commgrid.store.key_wait import Line

    if rank == 0:
        within = Line.within

        def pressed(*args: Any) -> bool:
            Line.within = within  # type: ignore[method-assign]
            raise KeyboardInterrupt

        Line.within = pressed  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            commgrid.initialize(tp=2)
        tell("rank 0 has given up")
    else:
        hear("rank 0 has given up")  # who had met it before would raise what it has told
    return commgrid.initialize(tp=2).get_ranks("tp")


def test_ctrl_c_and_a_second_try() -> None:
    assert run_on_ranks(interrupted, 2, per_rank=RANKS[:2]) == [(0, 1), (0, 1)]
