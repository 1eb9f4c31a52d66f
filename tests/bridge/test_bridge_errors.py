"""Each mistake about a bridge is an error on every rank, which names it; no rank waits."""

from __future__ import annotations

import copy
import os
import pickle
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid.bridge import Bridge, Cut
from commgrid.context_parallel import SequenceSharding
from commgrid.failures import GoneError, named_failures
from commgrid.grid_pairs.pairing import Pairing
from commgrid.testing import run_on_ranks
from commgrid.torch_compat.world import world_store
from tests.flags import hear, tell
from tests.waiting import comes, until, until_waits

SOURCE, TARGET = (0, 1), (2, 3)


def grids(**axes: Any) -> tuple[Any, Any]:
    """The grids of ranks 0 and 1 and of ranks 2 and 3; None for a grid without this rank."""
    source, target = dist.get_rank() in SOURCE, dist.get_rank() in TARGET
    how = {"timeout": 2.0, "startup_timeout": 20.0, **axes}
    return (
        commgrid.initialize(name="source", ranks=list(SOURCE), **how) if source else None,
        commgrid.initialize(name="target", ranks=list(TARGET), **how) if target else None,
    )


def given(*shape: int, **how: Any) -> Any:
    """A tensor on the source's ranks."""
    return (
        torch.ones(*shape, **{"requires_grad": True, **how}) if dist.get_rank() in SOURCE else None
    )


def said(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# Wrong arguments of the first call, by rank; and the error of all ranks.
CALLS: dict[str, tuple[dict[str, Any], Callable[[int], Any], str]] = {
    "dim": ({"dim": 2}, lambda rank: given(4, 6),
            "SpecError: bridge 'bridge': dim=2 of group 'dp', but the source's tensors have 2 "
            "dims; expected -2 to 1"),
    "lengths": ({}, lambda rank: given(4 + rank, 6 + rank),
                "ShapeError: bridge 'bridge': rank 0 gave a tensor of shape (4, 6), rank 1 of "
                "(5, 7); they hold the same positions of dim 1, whose lengths must be equal"),
    "dims": ({}, lambda rank: given(4, 6) if rank == 0 else given(4),
             "ShapeError: bridge 'bridge': rank 0 gave a tensor of (4, 6) float32, rank 1 of (4,) "
             "float32; expected one dtype and number of dims on the source's ranks"),
    "dtypes": ({}, lambda rank: given(4, 6, dtype=torch.float64 if rank else torch.float32),
               "ShapeError: bridge 'bridge': rank 0 gave a tensor of (4, 6) float32, rank 1 of "
               "(4, 6) float64; expected one dtype and number of dims on the source's ranks"),
    "no tensor": ({}, lambda rank: given(4, 6) if rank == 0 else None,
                  "ShapeError: bridge 'bridge': nothing can cross, since rank 1 gave no tensor, "
                  "though it is on the source's stage; the source's ranks call bridge(x)"),
    "a tensor": ({}, lambda rank: torch.ones(4),
                 "ShapeError: bridge 'bridge': nothing can cross, since rank 2 gave a tensor, "
                 "though it is not on the source's stage; others call bridge(None)"),
    "a list": ({}, lambda rank: [1.0] if rank == 1 else given(4),
               "ShapeError: bridge 'bridge': nothing can cross, since rank 1 gave something else "
               "than a tensor; the source's ranks call bridge(x) with one"),
    "gradients": ({}, lambda rank: given(4, requires_grad=rank == 0),
                  "SpecError: bridge 'bridge': rank 0 came with a tensor that needs a gradient, "
                  "rank 1 without; the gradients' way back needs all of them, or none"),
    "one dim twice": ({"target_sequence": Cut(-2, "tp")}, lambda rank: given(4, 6),
                      "SpecError: bridge 'bridge': groups 'dp', 'tp' cut one dim; name a group "
                      "along all their axes instead, such as 'dp_cp'"),
    "another length": (
        {"source_sequence": Cut(0, "dp", SequenceSharding.contiguous(8, 2))},
        lambda rank: given(5, 6),
        "ShapeError: bridge 'bridge': source: dim 0 has 10 positions as (5, 5) over group 'dp', "
        "its sharding expects 8 as (4, 4); make the sharding of these lengths"),
    "zigzag": ({"target_sequence": Cut(0, "dp", "zigzag")}, lambda rank: given(5, 6),
               "ShapeError: bridge 'bridge': target: dim 0 cannot be cut as its sharding "
               "says: zigzag cannot cut 10 positions for 2 ranks: expected a multiple "
               "of 4; pad the sequence, or use packed([10], 2), which takes any"),
}  # fmt: skip

# Arguments that do not fit the grids; and what all ranks say of them.
ARGUMENTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "cp": ({"cp": 2}, {},
           "SpecError: source: the ranks along cp hold parts or copies, and nothing says which: "
           "cut along it (source_sequence=Cut(dim, 'cp'), or group='dp_cp'), or name it in "
           "copies=('tp', 'cp')"),
    "copies of tp": ({"dp": 1, "tp": 2}, {"group": "tp", "copies": ()}, "nothing"),
    "cut over tp": ({}, {"group": "tp"},
                    "SpecError: source: the ranks along dp hold parts or copies, and nothing says "
                    "which: cut along it (source_sequence=Cut(dim, 'dp'), or group='tp_dp'), or "
                    "name it in copies=('tp', 'dp')"),
    "partial": ({}, {"partial": ("tpp",)},
                "SpecError: partial=('tpp',): 'tpp' is no axis of the target, only tp, cp, dp, pp; "
                "did you mean 'tp'?"),
    "copies": ({}, {"copies": ("tp", "cq")},
               "SpecError: copies=('tp', 'cq'): 'cq' is no axis of either grid, only tp, cp, dp, "
               "pp; did you mean 'cp'?"),
    "sequence": ({}, {"target_sequence": (1, "tp")},
                 "SpecError: sequence=(1, 'tp'): expected Cut(dim, group), or with a sharding"),
    "sharding": ({}, {"target_sequence": Cut(0, "dp", SequenceSharding.packed([3, 5], 3))},
                 "SpecError: target: the sharding of dim 0 is over 3 ranks, group 'dp' has 2; give "
                 "it parts=2"),
    "group": ({}, {"group": "dq"}, "UnknownGroupError: no group is named 'dq'"),
    "stage": ({}, {"target_stage": 1},
              "SpecError: target_stage=1: expected a stage of 1, or -1 for the last"),
    "pp": ({}, {"group": "pp"},
           "SpecError: source: groups pp run along pp; expected each axis once, and not pp"),
    "one axis twice": ({}, {"source_sequence": Cut(1, "dp_cp")},
                       "SpecError: source: groups dp, dp_cp run along dp, dp, cp; expected each "
                       "axis once"),
    "some ranks": ({"groups": {"ends": {"of": "dp", "pick": ["first"]}}}, {"group": "ends"},
                   "SpecError: source: group 'ends' has only some of the ranks along its axes"),
}  # fmt: skip


def wrong_calls() -> dict[str, str]:
    source, target = grids()
    found = {}
    for name, (told, give, _) in CALLS.items():
        bridge = Bridge(source, target, **told)
        found[name] = said(lambda: bridge(give(dist.get_rank())))  # noqa: B023
        if name == "dim":
            continue
        bridge.destroy()
        found[f"{name}, destroyed"] = said(lambda: bridge(None))  # noqa: B023
    return found


def wrong_arguments() -> dict[str, str]:
    found = {}
    for name, (axes, told, _) in ARGUMENTS.items():
        source, target = grids(**axes)
        found[name] = said(lambda: Bridge(source, target, **told))  # noqa: B023
        commgrid.destroy("source"), commgrid.destroy("target")
        dist.barrier()
    source, target = grids()
    dim = 1 if dist.get_rank() == 3 else 0
    found["mismatch"] = said(lambda: Bridge(source, target, dim=dim))
    bridge = Bridge(source, target)  # and yet it can be made
    found["pickle"] = said(lambda: pickle.dumps(bridge))
    found["copy"] = said(lambda: copy.deepcopy(bridge))
    return found


class Slow:
    """A store that counts the end of a call only when others wait in the next one."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def add(self, *args: Any) -> int:
        until_waits("rank 1", "rank 3")
        return int(self._store.add(*args))


def again_at_once() -> str:
    """The first ranks of both grids are slow to end a call that has failed."""
    end = Pairing._end_calls

    def end_slowly(self: Any, error: BaseException) -> None:
        self._driver.store = Slow(self._driver.store)  # type: ignore[assignment]
        end(self, error)

    Pairing._end_calls = end_slowly  # type: ignore[method-assign]
    source, target = grids()
    dim = 1 if dist.get_rank() == 3 else 0
    found = said(lambda: Bridge(source, target, dim=dim))
    comes(f"rank {dist.get_rank()}")
    Bridge(source, target).destroy()
    return found


def test_who_tries_again_at_once_waits_for_the_next_call() -> None:
    """It was the call before that seemed open, of which nothing more came."""
    for found in run_on_ranks(again_at_once, 4):
        assert found.startswith("GridMismatchError")


def test_what_does_not_fit_is_an_error_on_every_rank() -> None:
    for found in run_on_ranks(wrong_calls, 4):
        for name, (_, _, expected) in CALLS.items():
            assert found[name] == expected, name
            if name != "dim":
                assert found[f"{name}, destroyed"].startswith(
                    "GridDestroyedError: bridge 'bridge' was destroyed"
                )


@pytest.mark.full
def test_arguments_that_do_not_fit_are_errors_on_every_rank() -> None:
    for found in run_on_ranks(wrong_arguments, 4):
        for name, (_, _, expected) in ARGUMENTS.items():
            assert found[name].startswith(expected), name
        assert "source_cuts" in found["mismatch"]
        assert "on rank 3" in found["mismatch"]
        assert found["mismatch"].startswith("GridMismatchError")
        for how in ("pickle", "copy"):
            assert found[how].startswith(
                "CommGridError: bridge 'bridge' cannot be pickled or copied"
            )


def test_what_one_process_can_tell_alone() -> None:
    with pytest.raises(commgrid.SpecError, match="both None, so that this rank has no part in it"):
        Bridge(None, None)
    grid = commgrid.initialize()
    with pytest.raises(commgrid.SpecError, match="source_grid='dp': expected a grid, or None on"):
        Bridge("dp", grid)  # type: ignore[arg-type]
    with pytest.raises(commgrid.SpecError, match="sharding='zig': expected 'contiguous'"):
        Cut(0, "dp", "zig")
    with pytest.raises(commgrid.SpecError, match="dim='0': expected the number of a tensor's dim"):
        Bridge(grid, grid, dim="0")  # type: ignore[arg-type]
    with pytest.raises(commgrid.SpecError, match="expected a name, or the source's and the target"):
        Bridge(grid, grid, group=("dp", "dp", "dp"))  # type: ignore[arg-type]
    bridge = Bridge(grid, grid)
    dist.destroy_process_group()  # behind the grid's back, as where a program starts it anew
    with pytest.raises(commgrid.GridNotInitializedError, match="that has ended; both grids live"):
        Bridge(grid, grid)
    bridge.destroy()
    commgrid.shutdown()
    with pytest.raises(commgrid.GridDestroyedError, match="grid 'default' was destroyed"):
        Bridge(grid, grid)


# -- ranks that do not come ---------------------------------------------------------------


def absent(missing: int, when: str, told: tuple[int, ...]) -> str:
    """Return a rank's error if another one does not come."""
    source, target = grids()
    rank = dist.get_rank()
    if when == "bridge":
        if rank == missing:
            hear(*(str(each) for each in told))
            return ""
        text = said(lambda: Bridge(source, target, startup_timeout=5.0))
        tell(str(rank))
        return text
    bridge = Bridge(source, target, timeout=3.0)
    if when != "first":  # shapes are known then
        loss = bridge(given(4, 6))
        assert loss is not None
    if rank == missing:
        hear(*(str(each) for each in told))
        return ""
    call = loss.sum().backward if when == "backward" else lambda: bridge(given(4, 6))
    text = said(call)
    tell(str(rank))
    return text


@pytest.mark.full
@pytest.mark.parametrize(
    ("missing", "when", "expected", "told"),
    [
        (1, "bridge", "rank 1 did not arrive", (0, 2, 3)),
        (0, "bridge", "no source grid has come to meet the target grid of ranks 2-3", (2, 3)),
        (1, "first", "rank 1 did not come to call 0, to which others have come", (0, 2, 3)),
        (2, "first", "rank 2 did not come to call 0, to which others have come", (0, 1, 3)),
        (1, "later", "rank 1 is gone or has not come to forward of call 1", (3,)),
        (2, "backward", "rank 2 is gone or has not come to backward of call 0", (0,)),
    ],
)
def test_a_rank_that_does_not_come_is_named(
    missing: int, when: str, expected: str, told: tuple[int, ...]
) -> None:
    # A bridge that failed leaves keys in the store.
    found = run_on_ranks(absent, 4, missing, when, told, check=False)
    for rank in told:
        assert expected in found[rank], (rank, found[rank])


def killed(folder: Path, seen: bool) -> None:
    """Rank 3 dies after the first call; the others write down what their errors say.

    Args:
        seen: whether its end is seen before the next call, where sending to it fails.
    """
    source, target = grids()
    bridge = Bridge(source, target)
    bridge(given(4, 6)).sum().backward()
    dist.barrier()  # until its gradients have arrived
    grid, rank = source or target, dist.get_rank()
    if rank == 3:
        (folder / "3").write_text(str(os.getpid()))
        tell("3")
        hear("0", "1", "2")
        os.kill(os.getpid(), signal.SIGKILL)
    tell(str(rank))
    if seen:
        hear("3")
        until(lambda: has_ended(int((folder / "3").read_text())), "rank 3 ends")

    def step() -> None:
        with named_failures(grid):
            bridge(given(4, 6)).sum().backward()
            dist.all_reduce(torch.ones(1), group=grid.get_group("dp"))

    (folder / str(rank)).write_text(said(step))


def has_ended(process: int) -> bool:
    """Whether a process has ended, and closed its connections, though its parent may not know."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.full
@pytest.mark.parametrize("seen", [False, True])
def test_who_waits_for_a_rank_that_died_is_told(seen: bool, tmp_path: Path) -> None:
    """Rank 1 exchanges with rank 3; rank 0 waits for rank 1 only, and learns why."""
    with pytest.raises(AssertionError):
        run_on_ranks(killed, 4, tmp_path, seen)
    for rank in (0, 1):
        text = (tmp_path / str(rank)).read_text()
        assert text.startswith(("PeerFailedError", "PeerTimeoutError"))
        assert re.search(r"rank 3 is gone or (has not come to|does not answer)", text), text
        assert "in bridge 'bridge'" in text or "bridge 'bridge': rank 3" in text
    assert (tmp_path / "2").read_text().startswith(("PeerFailedError", "PeerTimeoutError"))


def failing_target(named: bool) -> str:
    """Rank 3 fails while it computes with its part; 0 and 1 wait for their gradients.

    Args:
        named: whether rank 3 itself tells that it fails; else its grid finds out.
    """
    source, target = grids()
    bridge, rank = Bridge(source, target), dist.get_rank()
    grid = source or target

    def step() -> None:
        with named_failures(grid):
            loss = bridge(given(4, 6)).sum()
            if rank == 3:
                raise ValueError("bad sample") if named else GoneError("rank 9 is gone")
            if target is not None:
                dist.all_reduce(torch.ones(1), group=target.get_group("dp"))
            loss.backward()

    text = said(step)
    tell(str(rank))
    hear("0", "1", "2", "3")  # a rank that ends is gone
    return text


@pytest.mark.full
@pytest.mark.parametrize(
    ("named", "cause"), [(True, "rank 3 failed"), (False, "rank 9 is gone")], ids=["tells", "asks"]
)
def test_a_failure_within_one_grid_is_what_the_other_grid_is_told(named: bool, cause: str) -> None:
    """Ranks 2 and 3 live when they close the bridge, so that ranks 0 and 1 do not name them."""
    found = run_on_ranks(failing_target, 4, named, check=False)
    for text in found[:2]:
        assert text.startswith(f"PeerFailedError: {cause}"), text
        assert "in bridge 'bridge': rank " in text


# -- what may change, and what is left ----------------------------------------------------


def later_calls() -> list[str]:
    source, target = grids()
    rank = dist.get_rank()
    bridge, dynamic = Bridge(source, target), Bridge(source, target, name="any", dynamic=True)
    found = []
    for rows in (4, 3, 0, 5):
        y = dynamic(given(rows, 2))
        assert rank in SOURCE or (y.shape == (rows, 2) and y.requires_grad)
        y.sum().backward()
    bridge(given(4, 6)).sum().backward()
    with torch.no_grad():  # another agreement: nothing comes back
        y = bridge(given(3, 6))
        assert not y.requires_grad
        assert rank in SOURCE or y.shape == (3, 6)
    if rank in SOURCE:
        found.append(said(lambda: bridge(given(5, 6))))
    bridge.forget_shapes()
    assert rank in SOURCE or bridge(None).shape == (5, 6)
    if rank in SOURCE:
        bridge(given(5, 6))
    bridge.forget_shapes()
    frozen = bridge(given(2, requires_grad=False) if rank in SOURCE else None)
    assert not frozen.requires_grad
    dist.barrier()
    bridge.finish()
    if rank in SOURCE:
        x = torch.ones(4, 6).requires_grad_()
        bridge.forget_shapes()
        bridge._live.exchange("a call", [(x.detach(), rank + 2)], [])
        with torch.no_grad():
            x += 1
        found.append(said(bridge.finish))
    else:
        bridge._live.exchange("a call", [], [(torch.empty(4, 6), rank - 2)])
    return found


def test_later_calls() -> None:
    for found in run_on_ranks(later_calls, 4)[:2]:
        assert found[0] == (
            "ShapeError: bridge 'bridge': rank {} gives (5, 6) float32 that needs a gradient, but "
            "gave (4, 6) float32 that needs a gradient in the first call; give every call one "
            "shape, make the bridge with dynamic=True, or call forget_shapes() on all ranks"
        ).format(found[0].split("rank ")[1][0])
        assert "a call was sending was changed in place before it had left" in found[1]


def cycles() -> list[int]:
    source, target = grids()
    groups, keys = [], []
    for _ in range(4):
        bridge = Bridge(source, target)
        bridge(given(2, 2)).sum().backward()
        bridge.destroy()
        bridge.destroy()
        dist.barrier()
        keys.append(world_store().num_keys())
        groups.append(len(dist.distributed_c10d._world.pg_map))
        dist.barrier()
    assert len(set(groups)) == 1
    commgrid.destroy("source"), commgrid.destroy("target")
    return keys


@pytest.mark.full
def test_nothing_is_left_of_a_bridge() -> None:
    for keys in run_on_ranks(cycles, 4):
        assert keys[1] == keys[-1], keys


# -- several bridges, in each side's own order --------------------------------------------


def two_encoders() -> dict[str, Any]:
    """Encoders on rank 0 and on ranks 1 and 2, one model on 2 and 3; each in its own order."""
    rank = dist.get_rank()
    first = commgrid.initialize(name="first", ranks=[0]) if rank == 0 else None
    second = commgrid.initialize(name="second", ranks=[1, 2]) if rank in (1, 2) else None
    model = commgrid.initialize(name="model", ranks=[2, 3]) if rank in (2, 3) else None
    bridges = {}
    if rank in (0, 2, 3):
        bridges["first"] = Bridge(first, model, name="first")
    if rank in (1, 2, 3):
        bridges["second"] = Bridge(second, model, name="second", dim=1)
    weights = {"first": torch.arange(4.0).requires_grad_(), "second": torch.full((2,), 3.0)}
    weights["second"].requires_grad_()
    if rank == 0:  # all forwards, then all backwards
        losses = [bridges["first"](torch.outer(weights["first"], torch.full((3,), float(i + 1))))
                  for i in range(5)]  # fmt: skip
        for loss in losses:
            loss.backward()
        bridges["first"].destroy()
        return {"first": weights["first"].grad}
    for i in range(5):
        x = weights["second"].outer(torch.ones(2)) * (i + 1) if rank in (1, 2) else None
        y = bridges["second"](x)
        if rank == 1:
            y.backward()
            continue
        seen = bridges["first"](None)
        ((i + 1) * seen.sum() + 10 * y.sum()).backward()
    for bridge in bridges.values():  # waits until the last gradients have left
        bridge.destroy()
    return {"second": weights["second"].grad} if rank in (1, 2) else {}


@pytest.mark.full
def test_several_encoders_into_one_model_in_their_own_orders() -> None:
    found = run_on_ranks(two_encoders, 4)
    squares = sum(i * i for i in range(1, 6))
    assert found[0]["first"].tolist() == [3.0 * squares] * 4
    for rank in (1, 2):  # each of its rows has 2 columns
        assert found[rank]["second"].tolist() == [2 * 10.0 * 15] * 2
