"""What torch's flight recorder says of NCCL's calls, in its own format."""

from __future__ import annotations

import pickle
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

import commgrid
from commgrid.torch_compat import nccl as torch_nccl
from commgrid.torch_compat.suspended_groups import unfinished
from tests.waiting import until

Entry = dict[str, Any]


def entry(
    name: str, number: int, state: str = "completed", *, p2p: bool = True, group: str = "pp"
) -> Entry:
    """An entry as torch 2.11 writes it on a GPU, as far as it is read."""
    return {
        "process_group": (f"commgrid/default/0.1/{group}", group), "is_p2p": p2p,
        "p2p_seq_id": number if p2p else 0, "collective_seq_id": 0 if p2p else number,
        "profiling_name": f"nccl:{name}", "state": state, "retired": False,
    }  # fmt: skip


NAMES = {"commgrid/default/0.1/pp", "commgrid/default/0.1/tp"}


def told(*entries: Entry) -> list[tuple[str, list[str]]]:
    return list(unfinished(entries, NAMES))


def test_a_batch_is_over_with_its_last_entry() -> None:
    """torch completes the single entries never: each suspension after a pipeline was refused."""
    batch = [entry("send 0->1", 1, "scheduled"), entry("recv 0<-1", 1, "scheduled")]
    assert told(*batch, entry("coalesced", 1)) == []
    later = [entry("send 0->1", 2, "scheduled"), entry("coalesced", 2)]
    assert told(*batch, entry("coalesced", 1), *later) == []


@pytest.mark.parametrize("last", ["scheduled", "started"])
def test_a_batch_under_way_is_named_by_its_messages(last: str) -> None:
    batch = [entry("send 0->1", 1, "scheduled"), entry("recv 0<-1", 1, "scheduled")]
    assert told(*batch, entry("coalesced", 1, last)) == [("pp", ["send 0->1", "recv 0<-1"])]
    assert told(*batch) == [("pp", ["send 0->1", "recv 0<-1"])]  # still being issued


def test_calls_of_one_number_on_two_groups_or_of_two_kinds() -> None:
    over = entry("coalesced", 1)
    assert told(entry("send 0->1", 1, "started", group="tp"), over) == [("tp", ["send 0->1"])]
    reduced = entry("all_reduce", 1, "started", p2p=False)
    assert told(reduced, over) == [("pp", ["all_reduce"])]
    assert told(over, entry("recv 0<-1", 2, "started")) == [("pp", ["recv 0<-1"])]


def test_what_has_ended_was_retired_or_is_of_another_group() -> None:
    assert told(entry("all_reduce", 1, p2p=False)) == []
    assert told({**entry("all_reduce", 1, "started", p2p=False), "retired": True}) == []
    assert told(entry("all_reduce", 1, "started", p2p=False, group="dp")) == []


# -- how far a backend is -------------------------------------------------------------------------


class Counting:
    """A backend that has been given so many collectives."""

    uid = 5

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def _get_sequence_number_for_group(self) -> int:
        return self.calls


@pytest.fixture
def status(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What torch's recorder says of the backend."""
    found: dict[str, Any] = {}
    dump = lambda *_: pickle.dumps({"pg_status": {"5": found} if found else {}})  # noqa: E731
    monkeypatch.setattr(_distributed_c10d, "_dump_nccl_trace", dump, raising=False)
    return found


def set_to(status: dict[str, Any], enqueued: int, completed: int) -> None:
    status.update({
        "last_enqueued_collective": enqueued, "last_started_collective": completed,
        "last_completed_collective": completed,
    })  # fmt: skip


def test_whether_a_call_is_under_way(status: dict[str, Any]) -> None:
    assert torch_nccl.has_call_under_way(Counting(0)) is False
    assert torch_nccl.has_call_under_way(Counting(3)) is None  # the recorder is off
    set_to(status, 3, 2)
    assert torch_nccl.has_call_under_way(Counting(3)) is True
    set_to(status, 3, 3)
    assert torch_nccl.has_call_under_way(Counting(3)) is False


def test_a_call_that_holds_a_thread(status: dict[str, Any], monkeypatch: Any) -> None:
    """It has begun, so that torch counts it, and waits for a transport before it is enqueued."""
    grid = commgrid.initialize()
    group, over = grid.get_group("dp"), threading.Event()
    other = grid.get_group("tp")
    options = SimpleNamespace(wait=over.wait)
    monkeypatch.setattr(dist.ProcessGroup, "allreduce", lambda *_: options.wait())
    set_to(status, 2, 2)
    backend = Counting(3)
    assert torch_nccl.held_call(backend, group) == 0  # messages are counted apart
    calling = threading.Thread(
        target=lambda: dist.all_reduce(torch.ones(1), group=group, async_op=True)
    )
    calling.start()
    until(lambda: torch_nccl.is_called_on(group), "the call has begun")
    assert torch_nccl.held_call(backend, group) == 3
    assert other is group or torch_nccl.held_call(backend, other) == 0
    set_to(status, 3, 2)
    assert torch_nccl.held_call(backend, group) == 0  # the device has it
    over.set()
    calling.join()
    set_to(status, 2, 2)
    assert torch_nccl.held_call(backend, group) == 0
    commgrid.shutdown()
