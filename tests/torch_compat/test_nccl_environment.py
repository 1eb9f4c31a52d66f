"""Variables by which torch's NCCL leaves failures to commgrid, and those that prevent it."""

from __future__ import annotations

import logging
import os

import pytest

import commgrid
from commgrid.testing import run_on_ranks
from commgrid.torch_compat import nccl as torch_nccl
from tests.flags import meet
from tests.nccl_stand_in import NAME, LazyGroup, install

HANDLES, BLOCKS = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT"
DUMPS, WAITS = "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"


@pytest.fixture(autouse=True)
def _none_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in (HANDLES, BLOCKS, DUMPS, WAITS):
        monkeypatch.delenv(key, raising=False)


def test_a_rank_is_named_without_waiting_for_a_dump(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's watchdog slept four times 15 s after each timeout, whether or not it dumped."""
    before = dict(os.environ)
    with torch_nccl.errors_are_ours():
        assert {key: os.environ[key] for key in (HANDLES, DUMPS, WAITS)} == {
            HANDLES: "0", DUMPS: "0", WAITS: "1",
        }  # fmt: skip
    assert dict(os.environ) == before
    monkeypatch.setenv(WAITS, "500")
    with torch_nccl.errors_are_ours():
        assert os.environ[WAITS] == "500"  # as the job's script says


@pytest.mark.parametrize(("key", "value", "said"), [
    (HANDLES, "1", "lets torch end this process"),
    (HANDLES, "3", "lets torch end this process"),
    (BLOCKS, "1", "a late rank is not named"),
    ("", "", ""), (HANDLES, "0", ""), (BLOCKS, "0", ""),
])  # fmt: skip
def test_what_a_job_script_disables_is_told_by_name(
    monkeypatch: pytest.MonkeyPatch, key: str, value: str, said: str
) -> None:
    if key:
        monkeypatch.setenv(key, value)
    told = torch_nccl.what_disables_the_watch(started_here=True)
    assert len(told) == bool(said)
    assert all(f"{key}={value}" in each and said in each for each in told)


def test_a_world_that_the_program_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    (told,) = torch_nccl.what_disables_the_watch(started_here=False)
    assert f"without {DUMPS}=0" in told
    assert "480 s" in told
    monkeypatch.setenv(DUMPS, "0")
    assert torch_nccl.what_disables_the_watch(started_here=False) == []


def starts(watch: bool) -> int:
    """Start two grids; return how often the environment was changed meanwhile."""
    install()
    os.environ[BLOCKS] = "1"
    changes: list[str] = []
    seen: list[str | None] = []
    change, create = type(os.environ).__setitem__, LazyGroup.__init__

    def changed(environ: object, key: str, value: str) -> None:
        changes.append(key)
        change(os.environ, key, value)

    def created(group: LazyGroup, *args: object) -> None:
        seen.append(os.environ.get(WAITS))
        create(group, *args)  # type: ignore[arg-type]

    type(os.environ).__setitem__ = changed  # type: ignore[assignment]
    LazyGroup.__init__ = created  # type: ignore[method-assign]
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("commgrid").addHandler(handler)
    for name in ("default", "second"):
        commgrid.initialize(
            tp=2, backend=NAME, connect="none", watch=watch, name=name, timeout=30.0
        )
    type(os.environ).__setitem__ = change  # type: ignore[assignment]
    assert len(seen) > 12
    assert sum(f"{BLOCKS}=1 lets no thread" in each for each in told) == watch
    assert seen[-1] == ("1" if watch else None)
    meet(int(os.environ["RANK"]), 4)
    return changes.count(WAITS)


@pytest.mark.parametrize("watch", [True, False])
def test_it_changes_once_a_grid_and_warns_once(watch: bool) -> None:
    """It changed for every group, beside NCCL's threads that read it."""
    found = run_on_ranks(
        starts, 4, watch, backend=None, launcher="torchrun", check=False, timeout=100
    )
    assert found == [2 * watch] * 4
