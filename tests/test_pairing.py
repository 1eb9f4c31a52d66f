"""How two grids find each other: the board, on threads and a store in memory; and on ranks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

import commgrid
from commgrid.bridge import Bridge
from commgrid.runtime import board, pairing
from commgrid.runtime.board import BOARD, find
from commgrid.runtime.pairing import Card
from commgrid.runtime.roll import Line
from commgrid.runtime.torch_world import world_store
from commgrid.testing import run_on_ranks
from commgrid.transfer import Transfer
from tests.mortal import CountingStore, Killed, MortalLine, MortalStore
from tests.waiting import comes, until, until_threads_wait, until_waits

Caller = tuple[Sequence[str], Sequence[str | None], str]


def caller(side: str, who: str, wants: str | None = None, what: str = "this") -> Caller:
    """What one is, whom it looks for, and its card."""
    other = "target" if side == "source" else "source"
    return (what, side, who), (what, other, wants), f"card of {who}"


class Finding:
    """One that looks for the other side, on a thread of its own."""

    def __init__(self, store: Any, one: Caller, seconds: float = 100.0, among: int = 2) -> None:
        self.store, self.found = CountingStore(store), ""
        self._given = one, seconds, among
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        one, seconds, among = self._given
        line = Line(self.store, among)
        self.found = str(find(self.store, line, *one, time.monotonic() + seconds))
        line.close()

    def end(self) -> str:
        self.thread.join(120)
        assert not self.thread.is_alive()
        return self.found


def waiting(store: Any) -> list[str]:
    """Who is on the board."""
    if not store.check([BOARD]):
        return []
    return [entry[1][2] for entry in json.loads(store.get(BOARD))["waiting"]]


def await_waiting(store: Any, *who: str) -> None:
    until(lambda: waiting(store) == list(who), f"{who} on the board")


def test_the_nth_of_one_side_meets_the_nth_of_the_other() -> None:
    store, sources = HashStore(), []
    for number in range(3):
        sources.append(Finding(store, caller("source", f"s{number}")))
        await_waiting(store, *(f"s{each}" for each in range(number + 1)))
    other = Finding(store, caller("target", "else", what="that"), seconds=3.0)
    await_waiting(store, "s0", "s1", "s2", "else")
    for number in range(3):
        target = Finding(store, caller("target", f"t{number}"))
        assert target.end() == f"card of s{number}"
        assert sources[number].end() == f"card of t{number}"
    assert other.end() == "None"
    assert waiting(store) == []
    assert store.num_keys() == 1  # the board's


def test_who_knows_the_other_meets_no_third() -> None:
    store = HashStore()
    early = Finding(store, caller("source", "s0"))
    await_waiting(store, "s0")
    choosy = Finding(store, caller("target", "t0", wants="s1"))
    await_waiting(store, "s0", "t0")
    assert Finding(store, caller("source", "s2", wants="t9"), seconds=0.1).end() == "None"
    wanted = Finding(store, caller("source", "s1"))
    assert (wanted.end(), choosy.end()) == ("card of t0", "card of s1")
    late = Finding(store, caller("target", "t1"))
    assert (late.end(), early.end()) == ("card of s0", "card of t1")


def test_who_waits_does_not_ask_again_and_again() -> None:
    """Of many ranks; of few, one looks a moment first."""
    store = HashStore()
    long = Finding(store, caller("source", "s0"), among=1000)
    await_waiting(store, "s0")
    until_threads_wait([long.thread])
    before = sum(long.store.calls.values())
    time.sleep(0.4)  # in which it does nothing
    assert sum(long.store.calls.values()) == before <= 4
    assert Finding(store, caller("target", "t0")).end() == "card of s0"
    assert long.end() == "card of t0"
    assert sum(long.store.calls.values()) <= before + 4


@pytest.mark.parametrize("side", ["source", "target"])
def test_who_is_gone_is_not_met(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at each of its calls of the store, alone there; two that come later meet."""
    monkeypatch.setattr(board, "_ANSWER_SECONDS", 0.5)
    other = "target" if side == "source" else "source"
    for left in range(4):
        store = HashStore()
        mortal = MortalStore(store, left)
        with pytest.raises(Killed):
            find(mortal, MortalLine(mortal, 2), *caller(side, "gone"), time.monotonic() + 60)
        first = Finding(store, caller(other, "first"))
        await_waiting(store, "first")
        second = Finding(store, caller(side, "second"))
        assert (first.end(), second.end()) == ("card of second", "card of first"), left
    assert waiting(store) == []


def test_who_was_slow_to_answer_comes_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    slow = Finding(store, caller("source", "slow"))
    await_waiting(store, "slow")
    monkeypatch.setattr(board, "_ANSWER_SECONDS", 0.0)  # gives up before anybody could answer
    quick = Finding(store, caller("target", "quick"))
    assert (quick.end(), slow.end()) == ("card of slow", "card of quick")
    assert store.num_keys() == 1


def test_what_a_card_says_comes_back() -> None:
    for spec in (
        commgrid.GridSpec.build(dp=2, tp=2).resolve(4),
        commgrid.GridSpec.build(dp=2, tp=2, ranks=range(4, 12, 2)).resolve(),
        commgrid.GridSpec.build(dp=-1, ranks=[3, 1, 7]).resolve(),
    ):
        card = Card("grid@0/0.1", spec, "gloo", 2.5, True)
        assert Card.from_text(card.to_text()) == card
    assert card.first == 3


# -- on ranks -----------------------------------------------------------------------------


def said(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def no_find(*_: Any) -> None:
    raise ValueError("no more")


def engines() -> dict[str, Any]:
    """Ranks 0 and 1 send to 2 and 3, and to 4; all under one name, some late, some twice."""
    rank, found = dist.get_rank(), {}
    trainer = commgrid.initialize(name="trainer", ranks=[0, 1]) if rank < 2 else None
    ranks = [2, 3] if rank in (2, 3) else [4]
    engine = commgrid.initialize(name="engine", ranks=ranks) if rank >= 2 else None
    mine = {"w": torch.full((4,), float(rank))}
    model, served = (mine, None) if rank < 2 else (None, mine)

    def transfer(**options: Any) -> Transfer:
        how = {"copies": "any", "timeout": 60, **options}
        made = Transfer(model, served, source_grid=trainer, target_grid=engine, **how)
        made.run()
        return made

    if rank < 4:
        found["bytes"] = said(lambda: transfer(max_bytes=64 if rank < 3 else 128))
    dist.barrier()
    if rank == 0:  # rank 1 comes late to a call that is over, and waits for the next
        found["nobody"] = said(lambda: transfer(timeout=1))
    dist.barrier()
    if rank in (0, 1, 2):  # rank 3 does not come
        found["late"] = said(lambda: transfer(timeout=4))
    dist.barrier()
    keys = []
    for _ in range(3):
        if rank < 4:
            transfer().close()
        dist.barrier()
        if rank not in (2, 3):
            transfer().close()
        dist.barrier()
        keys.append(world_store().num_keys())
        dist.barrier()
    found["keys"], found["w"] = keys, mine["w"].tolist()
    if rank < 4:  # which is told by the first of its grid, of which rank 0 is
        found["bridge"] = said(lambda: Bridge(trainer, engine, dim=rank // 3, startup_timeout=60))
    if rank < 2:  # rank 1 waits to be told when rank 0 fails; later it would wait for the next call
        if rank == 0:
            until_waits("rank 1 at broken")
            pairing.find, find = no_find, pairing.find
        else:
            comes("rank 1 at broken")
        found["broken"] = said(lambda: Bridge(trainer, None, name="broken"))
        if rank == 0:
            pairing.find = find
    if rank < 2:  # rank 1 gives up before the first of its grid, which came later, can tell it
        if rank == 0:
            until_waits("rank 1")
        else:
            comes("rank 1")
        how = {"source_grid": trainer, "timeout": 3}
        found["alone"] = said(lambda: Transfer(mine, None, name="alone", **how))
    return found


@pytest.mark.full
def test_a_trainer_meets_its_engines_one_after_the_other() -> None:
    # A grid that failed leaves keys in the store.
    ranks = run_on_ranks(engines, 5, check=False)
    for rank, found in enumerate(ranks):
        if rank < 4:
            assert found["bytes"].startswith("GridMismatchError: transfer 'default': ranks dis")
            assert "max_bytes is 128 on rank 3 and 64 on ranks 0-2" in found["bytes"]
            assert found["bridge"].startswith("GridMismatchError: bridge 'bridge': ranks disagree")
            assert "on rank 3" in found["bridge"]
        if rank < 2:
            assert found["alone"].startswith(
                "PeerTimeoutError: transfer 'alone': no target grid has come to meet the source "
                "grid of ranks 0-1 within timeout"
            ), rank
        if rank < 3:
            assert "rank 3 did not arrive within timeout" in found["late"]
        assert found["keys"][0] == found["keys"][-1]
        assert found["w"][0] == (rank if rank < 2 else found["w"][-1])
    assert "no target grid has come" in ranks[0]["nobody"]
    assert ranks[0]["broken"] == "ValueError: no more"
    told = "PeerFailedError: bridge 'broken': rank 0 failed: ValueError('no more')"
    assert ranks[1]["broken"] == told  # long before its timeout
    assert ranks[4]["w"][0] in (0.0, 1.0)
