"""Ranks that were configured differently, doubled or missing: named on all ranks, in time.

Four ranks each. What differs in a grid's arguments is found at once, whatever the time limit;
who never comes is named when it is over. `tests/test_no_hang.py` has each of them at every place
of eight ranks, and `tests/test_agreement.py` what is behind it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import commgrid
from commgrid import CommGridError
from commgrid.runtime import registry, torch_world
from commgrid.testing import free_port, run_on_ranks

WORLD, ODD = 4, 2
PLENTY = 60.0  # seconds: who differs is found long before
LITTLE = 8.0  # where somebody is waited for: torch's TCP client was seen to stall for 5 s
SLACK = 20.0

Seen = tuple[str, str, float]


@dataclass(frozen=True)
class Fault:
    """One mistake.

    Args:
        usual, odd: the arguments of three ranks and of the odd one.
        said: in the message of each rank; `{odd}` is the odd rank.
        kind: of the error.
        before: what the odd rank does first, such as setting a variable.
        waits: whether it takes until startup_timeout.
        alone: what the odd rank itself says, where it cannot reach the others.
    """

    usual: dict[str, Any]
    odd: dict[str, Any]
    said: str
    kind: str = "GridMismatchError"
    before: Callable[[], object] = lambda: None
    waits: bool = False
    alone: str = ""


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


YAML = {"axes": {"tp": 2, "dp": -1}}
FAULTS = {
    "sizes": Fault(
        {"tp": 2}, {"tp": 4}, r"spec\.axes\.tp is 4 on rank {odd} and 2 on ranks 0-1, 3"
    ),
    "order": Fault(
        {"tp": 2, "pp": 2}, {"tp": 2, "pp": 2, "order": "pp-cp-ep-dp-tp"},
        r"spec\.order is 'pp-cp-dp-tp' on rank {odd} and 'tp-cp-dp-pp' on ranks 0-1, 3",
    ),
    "YAML": Fault(
        {"config": YAML}, {"config": {**YAML, "groups": {"ag": "dp"}}},
        r"spec\.groups\.ag is 'dp' on rank {odd} and 'not given' on ranks 0-1, 3",
    ),
    "versions": Fault(
        {}, {}, r"versions\.torch is '2\.11\.0' on rank {odd} and '\S+' on ranks 0-1, 3",
        before=other_versions,
    ),
    "world size": Fault(
        {}, {}, r"world_size is 3 on rank {odd} and 4 on ranks 0-1, 3", before=smaller_world
    ),
    "port": Fault(
        {}, {}, r"rank {odd} did not arrive within startup_timeout \(ranks 0-1, 3 did\)",
        "PeerTimeoutError", before=other_port, waits=True,
        alone=r"nobody serves the store at 127\.0\.0\.1:\d+ within startup_timeout",
    ),
    "a duplicate rank": Fault(
        {}, {}, r"rank {odd} did not arrive within startup_timeout \(ranks 0-1, 3 did\)",
        "PeerTimeoutError", before=other_rank, waits=True,
        alone=r"Another process has come as rank 1 too",
    ),
}  # fmt: skip


MISSING = Fault({}, {}, "", waits=True)


def attempt(fault: str, rank: int) -> Seen:
    case = FAULTS.get(fault, MISSING)
    if rank == ODD:
        case.before()
    arguments = case.odd if rank == ODD else case.usual
    started = time.monotonic()
    try:
        commgrid.initialize(startup_timeout=LITTLE if case.waits else PLENTY, **arguments)
    except CommGridError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "no error", "", time.monotonic() - started


@pytest.mark.full("port", "a duplicate rank")
@pytest.mark.parametrize("fault", FAULTS)
def test_all_ranks_say_who_is_different(fault: str) -> None:
    case = FAULTS[fault]
    ranks = [(rank,) for rank in range(WORLD)]
    found = run_on_ranks(attempt, WORLD, fault, per_rank=ranks, backend=None, launcher="torchrun")
    for rank, (kind, message, seconds) in enumerate(found):
        print(f"{fault}: rank {rank} after {seconds:.1f} s: {kind}: {message}")
        said = case.said.replace("{odd}", str(ODD))
        if case.alone and rank in (ODD, 1):  # of a doubled rank either may be taken for the other
            said = f"{said}|{case.alone}"
        assert kind == case.kind, message
        assert re.search(said, message), message
        assert seconds < (LITTLE + SLACK if case.waits else PLENTY / 2)


@pytest.mark.full
def test_a_missing_rank_is_named_by_all_others() -> None:
    ranks = [(rank,) for rank in range(WORLD)]
    how: dict[str, Any] = {"init": None, "launcher": "torchrun", "absent": [ODD]}
    found = run_on_ranks(attempt, WORLD, "a missing rank", per_rank=ranks, **how)
    assert found.pop(ODD) is None
    for kind, message, seconds in found:
        assert kind == "PeerTimeoutError"
        assert f"rank {ODD} did not arrive within startup_timeout (ranks 0-1, 3 did)" in message
        assert seconds < LITTLE + SLACK
