"""Names that share a communicator, by a program's sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid.testing import run_on_ranks

PAIRS: dict[str, tuple[tuple[str, str], dict[str, Any]]] = {
    "cp 1": (("tp", "cp_tp"), {"tp": 2}),
    "etp 1": (("ep", "ep_etp"), {"ep": 2, "etp": 1}),
    "regions": (("pp", "pp_edp_ep"), {"pp": 2, "etp": 1}),
    "pick": (("pp", "ends"), {"pp": 2, "groups": {"ends": {"of": "pp", "pick": [0, 1]}}}),
    "split": (("cp", "a"), {"cp": 2, "groups": {"ab": {"of": "cp", "split": {"a": 2, "b": 1}}}}),
    "options": (("tp", "slow"), {"tp": 2, "groups": {"slow": {"of": "tp", "timeout": 1800.0}}}),
}  # fmt: skip
"""Two names with the same two ranks, by what makes them so, and the sizes that do."""


def opposite(first: str, second: str, given: dict[str, Any]) -> tuple[tuple[float, ...], ...]:
    """Sums over two names, started in opposite order on even and odd ranks; those that are right.

    Ranks add 1, 2, … over the first name and 100, 1000, … over the second.
    """
    grid = commgrid.initialize(**given)
    addend = {first: lambda rank: 1.0 + rank, second: lambda rank: 100.0 + 900.0 * rank}
    tensors = {name: torch.tensor([value(grid.rank)]) for name, value in addend.items()}
    works = [
        dist.all_reduce(tensors[name], group=grid.get_group(name), async_op=True)
        for name in ((first, second) if grid.rank % 2 == 0 else (second, first))
    ]
    for work in works:
        assert work is not None
        work.wait()
    right = tuple(sum(map(addend[name], grid.get_ranks(name))) for name in (first, second))
    return tuple(tensors[name].item() for name in (first, second)), right


@pytest.mark.parametrize("cp", [1, 2])
def test_sums_over_tp_and_cp_tp_in_opposite_order_are_right_at_any_size(cp: int) -> None:
    """With cp 1 the two shared a communicator, and the sums were 1001 and 102."""
    found = run_on_ranks(opposite, 2 * cp, "tp", "cp_tp", {"tp": 2, "cp": cp})
    assert all(sums == right for sums, right in found)
    if cp == 1:
        assert found == [((3.0, 1100.0), (3.0, 1100.0))] * 2


@pytest.mark.parametrize("why", PAIRS)
def test_sums_in_opposite_order_are_right_whatever_makes_the_ranks_equal(why: str) -> None:
    pair, given = PAIRS[why]
    assert run_on_ranks(opposite, 2, *pair, given) == [((3.0, 1100.0), (3.0, 1100.0))] * 2


def shares(share: str) -> dict[str, bool]:
    found = {}
    for why, ((first, second), given) in PAIRS.items():
        grid = commgrid.initialize(**given, share=share)
        assert grid.get_ranks(first) == grid.get_ranks(second) == (0, 1)
        found[why] = grid.get_group(first) is grid.get_group(second)
        commgrid.destroy()
    return found


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        ("aliases", set()),
        ("region", {"cp 1", "etp 1", "split"}),  # these ask for one order on all ranks
        ("all", {"cp 1", "etp 1", "split", "regions", "pick"}),
    ],
)
def test_what_each_choice_shares(share: str, expected: set[str]) -> None:
    for found in run_on_ranks(shares, 2, share):
        assert {why for why, same in found.items() if same} == expected


def alone() -> int:
    """Names of this rank alone are one communicator, and sums over it are what they were."""
    groups = {
        "same": "dp_cp", "own": {"of": "cp", "own": True}, "quick": {"of": "cp", "timeout": 9.0},
        "head": {"of": "pp", "pick": ["first"]},
    }  # fmt: skip
    grid = commgrid.initialize(pp=2, groups=groups)
    one = grid.get_group("cp")
    names = [*("tp", "dp", "cp_tp", "dp_cp", "same"), *["head"] * grid.is_member("head")]
    assert all(grid.get_group(name) is one for name in names)
    assert len({one, grid.get_group("own"), grid.get_group("quick")}) == 3
    assert grid.is_member("head") == (grid.rank == 0)
    for name in (*names, "own", "quick"):
        assert grid.get_ranks(name) == (grid.rank,)
        x = torch.tensor([5.0 + grid.rank])
        dist.all_reduce(x, group=grid.get_group(name))
        assert x.item() == 5.0 + grid.rank
    grid.check()
    return len(grid.communicators)


def test_groups_of_one_rank_are_one_communicator() -> None:
    # 8 names of pp, those of one rank, and of these own and quick by themselves.
    assert run_on_ranks(alone, 2) == [11, 11]
