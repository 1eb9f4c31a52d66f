"""Session of checks: ranks that are started once and run one check after the other.

Starting ranks on a GPU takes longer than most checks do. A check that fails leaves the session as
it is. Of one that hangs the ranks are killed, and the next check starts new ones.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest

import commgrid
from commgrid.testing import Ranks
from tests.gpu.on_gpus import Where, nccl_variables

LIMIT = 60.0
"""Seconds that a check may take."""
START_SECONDS = 60.0
"""Seconds that the ranks may take to start."""
OTHERS_SECONDS = 10.0
"""Seconds that a check may still take once it has failed on a rank."""

Check = Callable[[Where], str]


class Session:
    """Ranks that run several checks in one start.

    Args:
        where: on a GPU, or emulated.
        world_size: number of ranks.
    """

    def __init__(self, where: Where, world_size: int) -> None:
        self._where, self._world_size = where, world_size
        self._ranks: Ranks | None = None
        self._lines: list[Connection] = []

    def run(self, check: Any, limit: float = LIMIT) -> str:
        """Run a check on every rank, and return what rank 0 has found.

        Args:
            check: a module's function, or a test made by `on_two_ranks`.
            limit: seconds.

        Raises:
            AssertionError: the check failed, with each rank's traceback; or hung, with its stacks.
        """
        if self._ranks is None:
            self._ranks = self._start()
        for line in self._lines:
            line.send(check)
        told = self._answers(limit)
        if len(told) < self._world_size:
            silent = [rank for rank in range(self._world_size) if rank not in told]
            stacks, said = self._end(), _failures(told)
            head = f"{check.__name__} has not ended on ranks {silent} within {limit:g} s"
            if said:
                head = f"{check.__name__} failed, and has not ended on ranks {silent}"
            raise AssertionError("\n".join([head, *stacks, *said]))  # the cause last
        if len(self._ranks.living()) < self._world_size:
            self._end()
        if said := _failures(told):
            raise AssertionError(f"{check.__name__} failed\n" + "\n".join(said))
        how, text = told[0]
        if how == "skipped":
            pytest.skip(text)
        return text

    def _start(self) -> Ranks:
        context: Any = multiprocessing.get_context(self._where.method)
        pairs = [context.Pipe() for _ in range(self._world_size)]
        self._lines = [ours for ours, _ in pairs]
        self._ranks = ranks = Ranks(
            serve, self._world_size, self._where, per_rank=[(rank, theirs) for rank, (_, theirs) in
            enumerate(pairs)], backend=None, launcher="torchrun", environ=nccl_variables,
            method=self._where.method, check=False,
        ).start()  # fmt: skip
        for _, theirs in pairs:
            theirs.close()
        told = self._answers(START_SECONDS)
        if len(told) < self._world_size or _failures(told):
            raise AssertionError("\n".join(["the ranks have not started", *self._end()]))
        return ranks

    def _answers(self, limit: float) -> dict[int, tuple[str, str]]:
        """Collect answers within a limit, which a failed or ended rank shortens."""
        told: dict[int, tuple[str, str]] = {}
        until = time.monotonic() + limit
        while len(told) < self._world_size and time.monotonic() < until:
            for rank, line in enumerate(self._lines):
                if rank in told:
                    continue
                lives = self._ranks is not None and rank in self._ranks.living()
                with contextlib.suppress(EOFError):
                    if line.poll(0.01):
                        told[rank] = line.recv()
                if rank not in told and not lives:
                    told[rank] = ("failed", f"rank {rank} has ended")
                if told.get(rank, ("", ""))[0] == "failed":
                    until = min(until, time.monotonic() + OTHERS_SECONDS)
        return told

    def _end(self) -> list[str]:
        """Kill the ranks; return where each was."""
        ranks, self._ranks = self._ranks, None
        if ranks is None:
            return []
        ranks.end()
        told = [str(outcome) for outcome in ranks.outcomes.values()]
        ranks.close()
        return told

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        for line in self._lines:
            with contextlib.suppress(OSError):
                line.send(None)
        if self._ranks is not None:
            self._ranks.timeout = OTHERS_SECONDS
            self._ranks.wait()
        self._end()


def _failures(told: dict[int, tuple[str, str]]) -> list[str]:
    return [
        f"--- rank {rank}\n{text}" for rank, (how, text) in sorted(told.items()) if how == "failed"
    ]


def serve(where: Where, rank: int, line: Connection) -> None:
    """Run checks that come over a line, each with grids of its own, until None comes."""
    warnings.simplefilter("default")  # a forked rank has pytest's filters
    where.take_device(rank)
    commgrid.join(backend=where.backend)
    line.send(("passed", ""))
    while (check := line.recv()) is not None:
        told = ("passed", "")
        try:
            told = ("passed", str(getattr(check, "check", check)(where)))
        except pytest.skip.Exception as skipped:
            told = ("skipped", str(skipped))
        except BaseException:
            told = ("failed", traceback.format_exc())
        try:
            commgrid.destroy()
        except BaseException:
            told = ("failed", "\n".join([told[1], traceback.format_exc()]))
        line.send(told)
    commgrid.shutdown()


def on_two_ranks(check: Check) -> Callable[..., None]:
    """Make a test of a check, which then runs in the session of its module."""

    def test(session: Session, record_property: Callable[[str, object], None]) -> None:
        record_property("found", session.run(test))

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(test, name, getattr(check, name))
    test.check = check  # type: ignore[attr-defined]
    return test
