"""Pipelines' schedules in the check before a run."""

from __future__ import annotations

import dataclasses
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid import SpecError
from commgrid.call_analysis import verification as verify
from commgrid.call_analysis.program import Batch, Wait, calls_of
from commgrid.call_analysis.rules import RULES
from commgrid.call_analysis.verification import check
from commgrid.call_records.call import Call
from commgrid.pipeline import (
    Backward,
    Forward,
    Pipeline,
    Schedule,
    gpipe,
    make_schedule,
    one_f_one_b,
    simulate,
)
from commgrid.pipeline_schedules.proof import Around, check_schedule, programs_of
from commgrid.pipeline_schedules.schedule import SCHEDULES
from commgrid.testing import run_on_ranks
from tests.pipeline_schedules.proved_schedules import prove_all, schedules
from tests.sizes import full


def test_all_schedules_finish() -> None:
    """All 2,900 take a minute: `python -m tests.pipeline_schedules.proved_schedules`."""
    few = (range(1, 9), [1, 2, 3, 5, 8, 12, 16, 24, 32]) if full() else ([1, 2, 3, 8], [1, 4, 8])
    count, calls = prove_all(schedules(*few, [1, 2, 4] if full() else [1, 3]))
    assert count == (666 if full() else 84)
    assert calls > 10_000


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_rule_set_finds_what_the_strictest_does(name: str) -> None:
    """What `prove` leaves out because strict includes it."""
    schedule = make_schedule(name, 4, 8, 2 if name in ("gpipe", "interleaved") else 1)
    for rules in RULES:
        for around in (None, Around(copies=2), Around(shared=True), Around(3, True, True)):
            found = check(programs_of(schedule, around), rules)
            assert found.finishes, str(found)


def test_a_mutated_program_is_found() -> None:
    """So that the proof is not empty: two messages of one stage swapped, and it does not finish."""
    made = programs_of(one_f_one_b(3, 4))
    found = set()
    middle = made[1]
    at = [i for i, step in enumerate(middle) if isinstance(step, Batch)]
    for i, j in pairwise(at):
        steps = list(middle)
        steps[i], steps[j] = steps[j], steps[i]
        try:
            verdict = check({**made, 1: steps}, "strict")
        except SpecError:
            continue  # waits for what comes later now
        found.add(verdict.kind)
    assert found & {"circle", "differs"}


def orders(*stages: str) -> Schedule:
    """A schedule from words such as `F0 F1 B0 B1`."""
    kinds = {"F": Forward, "B": Backward}
    made = tuple(
        tuple(kinds[word[0]](stage, 0, int(word[1:])) for word in words.split())
        for stage, words in enumerate(stages)
    )
    return Schedule("own", len(stages), len(made[0]) // 2, 1, made)


def test_a_circle_of_stages_is_named_by_microbatch() -> None:
    with pytest.raises(SpecError) as found:
        check_schedule(orders("F0 B0 F1 B1", "F0 F1 B0 B1"))
    assert str(found.value).splitlines()[1:] == [
        "  stage 0 waits for the gradient of microbatch 0 between parts 0 and 1, before B0",
        "  stage 1 waits for the activation of microbatch 1 between parts 0 and 1, before F1",
    ]
    assert str(found.value).startswith(
        "schedule 'own' for 2 stages and 2 microbatches cannot finish: "
    )


def test_all_orders_of_two_stages_are_told_apart_as_the_simulator_does() -> None:
    """Every order of two microbatches on two stages: refused here where nothing would ever run."""
    words = ["F0", "F1", "B0", "B1"]
    every = [" ".join(order) for order in permutations(words)]
    fine = 0
    for first in every:
        for second in every:
            schedule = orders(first, second)
            try:
                simulate(schedule)
            except SpecError:
                with pytest.raises(SpecError):
                    check_schedule(schedule)
            else:
                check_schedule(schedule)
                fine += 1
    assert 0 < fine < len(every) ** 2


def pipeline(which: str) -> Any:
    """A user's own schedule, given to a pipeline."""
    commgrid.initialize(pp=2)
    schedule = {
        "good": one_f_one_b(2, 2),
        "bad": orders("F0 B0 F1 B1", "F0 F1 B0 B1"),
    }[which]
    schedule = dataclasses.replace(schedule, name="own")
    try:
        made = Pipeline(
            torch.nn.Linear(2, 2), schedule, num_microbatches=2, loss=lambda y, _: y.sum()
        )
        made.step(torch.ones(2, 1, 2), torch.ones(2))
    except SpecError as error:
        return str(error)
    finally:
        commgrid.destroy()
    return None


def test_a_pipeline_refuses_a_circle_on_all_stages() -> None:
    for said in run_on_ranks(pipeline, 2, "bad"):
        assert "stage 0 waits for the gradient of microbatch 0" in said
    assert run_on_ranks(pipeline, 2, "good") == [None, None]


def test_the_programs_are_what_a_pipeline_issues() -> None:
    """Of a step, in order: operation and peer of each call, and what is batched."""
    made = programs_of(gpipe(2, 2))
    said = [
        "wait" if isinstance(step, Wait) else [(c.operation, c.peer) for c in calls_of(step)]
        for step in made[1]
    ]
    assert said == [
        [("recv", 0)], "wait", [("recv", 0)], "wait", [("recv", 0)], "wait",
        [("send", 0)], [("send", 0)], "wait",
    ]  # fmt: skip
    assert not any(isinstance(step, Call) for step in made[1])


def traced(folder: str, name: str) -> None:
    """A step of a pipeline, recorded."""
    grid = commgrid.initialize(pp=2, trace=True)
    made = Pipeline(torch.nn.Linear(2, 2), name, num_microbatches=3, loss=lambda y, _: y.sum())
    commgrid.trace.stop()
    commgrid.trace.start()
    made.step(torch.ones(3, 1, 2), torch.ones(3))
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(
                operation, torch.ones(4), group=grid.get_group("pp"), group_peer=1 - grid.rank
            )
            for operation in (dist.isend, dist.irecv)
        ]
    )
    for work in works:
        work.wait()
    commgrid.trace.save(folder)
    commgrid.trace.stop()
    commgrid.destroy()


@pytest.mark.parametrize("name", ["gpipe", "zb-h1"])
def test_programs_are_what_a_pipeline_issues(name: str, tmp_path: Path) -> None:
    """Its trace holds the same batches in the same order, and a program's own batch after them."""
    run_on_ranks(traced, 2, str(tmp_path), name)
    issued, made = verify.programs(tmp_path), programs_of(make_schedule(name, 2, 3))
    for rank in range(2):
        ours, theirs = (
            [
                [(c.operation, c.peer) for c in step.calls]
                for step in steps
                if isinstance(step, Batch)
            ]
            for steps in (made[rank], issued[rank])
        )
        assert theirs == [*ours, [("send", 1 - rank), ("recv", 1 - rank)]]
    for rules in RULES:
        assert check(issued, rules).finishes
