"""Schedules on paper: every size, their closed forms, and pictures of small ones."""

import dataclasses
import textwrap
from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commgrid import SpecError
from commgrid.pipeline import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Exchange,
    Forward,
    Recv,
    Schedule,
    Send,
    Simulation,
    Times,
    forward_only,
    make_schedule,
    programs,
    simulate,
)
from commgrid.pipeline_schedules.messages import Program
from commgrid.pipeline_schedules.schedule import SCHEDULES, Computation, StageMessage
from tests.sizes import full

STAGES, CHUNKS, MICROBATCHES = (
    (range(1, 9), range(1, 5), range(1, 33)) if full() else (range(1, 6), range(1, 4), range(1, 11))
)
# Backward twice as long as forward, as for matmuls; halves and odd ratios besides.
TIMES = [Times(), Times(1.0, 1.25, 0.75), Times(0.5, 0.5, 0.25)]


def sizes(name: str) -> Iterator[tuple[int, int, int]]:
    """Stages, microbatches and chunks that a schedule takes."""
    for stages, microbatches in product(STAGES, MICROBATCHES):
        for chunks in CHUNKS if name in ("gpipe", "interleaved") else [1]:
            if name == "interleaved" and microbatches % stages:
                continue
            if name == "gpipe" and chunks > 1 and microbatches not in (1, 2, 3, 5, 8, 13, 21, 32):
                continue  # chunks are an extra of this one, and some numbers tell as much as all
            yield stages, microbatches, chunks


@cache
def made(name: str, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    return make_schedule(name, stages, microbatches, chunks)


def idle(found: Simulation) -> float:
    """Makespan beyond what each stage computes, all of them equally much."""
    work = found.busy[0]
    assert all(busy == pytest.approx(work) for busy in found.busy)
    assert found.bubble_fraction == pytest.approx((found.makespan - work) / work)
    return found.makespan - work


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_dependency_is_met_and_every_send_matched(name: str) -> None:
    for size in sizes(name):
        schedule = made(name, *size)
        spans = simulate(schedule).spans
        dependencies_hold(schedule, spans)
        stages = programs(schedule)
        messages_match(schedule, stages)
        assert stuck(stages) == []


def stuck(stages: tuple[Program, ...]) -> list[int]:
    """Stages that never finish if each waits in every exchange until it is complete."""
    left = [[step for step in program if isinstance(step, Exchange)] for program in stages]
    while any(left):
        now = {stage: exchanges[0] for stage, exchanges in enumerate(left) if exchanges}
        met, before = set(now), set()
        while met != before:
            before = met
            sent = {send.message for stage in met for send in now[stage].sends}
            received = {recv.message for stage in met for recv in now[stage].recvs}
            met = {
                stage for stage in met
                if received.issuperset(send.message for send in now[stage].sends)
                and sent.issuperset(recv.message for recv in now[stage].recvs)
            }  # fmt: skip
        if not met:
            return sorted(now)
        for stage in met:
            del left[stage][0]
    return []


def dependencies_hold(schedule: Schedule, spans: object) -> None:
    """By brute force over all actions, not through the simulator's own rules."""
    assert isinstance(spans, dict)
    last = schedule.num_parts - 1
    forward, gradient = {}, {}
    for action, (start, end) in spans.items():
        key = schedule.part(action), action.microbatch
        if isinstance(action, Forward):
            forward[key] = start, end
        elif isinstance(action, Backward | BackwardInput):
            gradient[key] = start, end
    assert len(forward) == schedule.num_parts * schedule.num_microbatches == len(gradient)
    for (part, microbatch), (start, _) in forward.items():
        if part > 0:
            assert forward[part - 1, microbatch][1] <= start
    for (part, microbatch), (start, end) in gradient.items():
        assert forward[part, microbatch][1] <= start
        if part < last:
            assert gradient[part + 1, microbatch][1] <= start
        weight = BackwardWeight(part % schedule.num_stages, part // schedule.num_stages, microbatch)
        if weight in spans:
            assert spans[weight][0] >= end


def messages_match(schedule: Schedule, stages: tuple[tuple[object, ...], ...]) -> None:
    sent: dict[StageMessage, Send] = {}
    received: dict[StageMessage, Recv] = {}
    for stage, program in enumerate(stages):
        done: set[Computation] = set()
        there: set[StageMessage] = set()
        for step in program:
            if isinstance(step, Exchange):
                for send in step.sends:
                    here = (stage, send.chunk, send.microbatch)
                    results = (
                        {Forward(*here)} if send.message.kind == "activation"
                        else {Backward(*here), BackwardInput(*here)}
                    )  # fmt: skip
                    assert done & results, f"{send} before what it sends was computed"
                    assert send.message not in sent
                    sent[send.message] = send
                for recv in step.recvs:
                    received[recv.message] = recv
                    there.add(recv.message)
                continue
            assert isinstance(step, Computation)
            part = schedule.part(step)
            if isinstance(step, Forward) and part > 0 and schedule.num_stages > 1:
                assert StageMessage("activation", part - 1, step.microbatch) in there
            if isinstance(step, Backward | BackwardInput) and part < schedule.num_parts - 1:
                wanted = StageMessage("gradient", part, step.microbatch)
                assert wanted in there or schedule.num_stages == 1
            done.add(step)
    assert sent.keys() == received.keys()
    for message, send in sent.items():
        assert (send.stage, send.peer) == (received[message].peer, received[message].stage)
    crossings = (schedule.num_parts - 1) * schedule.num_microbatches * 2
    assert len(sent) == (crossings if schedule.num_stages > 1 else 0)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_the_bubble_is_the_closed_form(name: str, times: Times) -> None:
    per_chunk = times.forward + times.backward_input + times.backward_weight
    for stages, microbatches, chunks in sizes(name):
        if name == "gpipe" and chunks > 1 and microbatches < stages:
            continue  # a microbatch comes round to a stage that has long run out of others
        found = simulate(made(name, stages, microbatches, chunks), times)
        assert idle(found) == pytest.approx((stages - 1) * per_chunk)
        assert found.bubble_fraction == pytest.approx((stages - 1) / (chunks * microbatches))


@pytest.mark.parametrize("times", TIMES)
def test_zero_bubble_is_below_1f1b_with_the_same_memory(times: Times) -> None:
    for stages, microbatches, _ in sizes("zb-h1"):
        ours = simulate(made("zb-h1", stages, microbatches), times)
        plain = simulate(made("1f1b", stages, microbatches), times)
        waits = (stages - 1) * (times.forward + times.backward_input)
        filled = min(microbatches - 1, stages - 1) * times.backward_weight
        assert idle(ours) == pytest.approx(waits - filled)
        assert max(ours.peak_live) == max(plain.peak_live)
        if stages > 1:
            assert ours.bubble_fraction < plain.bubble_fraction


def test_what_is_live() -> None:
    for stages, microbatches, _ in sizes("1f1b"):
        found = simulate(made("1f1b", stages, microbatches))
        expected = tuple(min(microbatches, stages - stage) for stage in range(stages))
        assert found.peak_live == expected
    for stages, microbatches, chunks in sizes("gpipe"):
        found = simulate(made("gpipe", stages, microbatches, chunks))
        assert found.peak_live == (microbatches * chunks,) * stages
    for stages, microbatches, chunks in sizes("interleaved"):
        found = simulate(made("interleaved", stages, microbatches, chunks))
        for stage, peak in enumerate(found.peak_live):
            warmup = 2 * (stages - 1 - stage) + (chunks - 1) * stages
            assert peak == min(warmup + 1, microbatches * chunks)


def test_forward_only_takes_any_number_of_microbatches() -> None:
    for stages in STAGES:
        for chunks in CHUNKS:
            for microbatches in MICROBATCHES:
                schedule = forward_only(stages, microbatches, chunks)
                found = simulate(schedule)
                assert stuck(programs(schedule)) == []
                if microbatches % stages == 0:
                    assert found.makespan == microbatches * chunks + stages - 1


def test_transfers_and_uneven_chunks_take_their_time() -> None:
    schedule = make_schedule("1f1b", 2, 1)
    # F, send 0.5, F, B of 2, send 0.5, B of 2
    assert simulate(schedule, Times(transfer=0.5)).makespan == 1 + 0.5 + 1 + 2 + 0.5 + 2
    slow = Times(forward={(0, 0): 1.0, (1, 0): 4.0}, backward_weight=0.0)
    assert simulate(schedule, slow).makespan == 1 + 4 + 1 + 1
    assert simulate(make_schedule("gpipe", 2, 3), slow).busy == (6.0, 15.0)


@pytest.mark.parametrize(
    ("name", "size", "drawn"),
    [
        (
            "gpipe", (3, 3, 1),
            """
            stage 0  F0 F1 F2 .  .  .  .  .  .  B0=== B1=== B2===
            stage 1  .  F0 F1 F2 .  .  .  B0=== B1=== B2=== .  .
            stage 2  .  .  F0 F1 F2 B0=== B1=== B2=== .  .  .  .
            """,
        ),
        (
            "1f1b", (3, 4, 1),
            """
            stage 0  F0 F1 F2 .  .  .  .  B0=== F3 B1=== .  B2=== .  B3===
            stage 1  .  F0 F1 .  .  B0=== F2 B1=== F3 B2=== .  B3=== .  .
            stage 2  .  .  F0 B0=== F1 B1=== F2 B2=== F3 B3=== .  .  .  .
            """,
        ),
        (
            "interleaved", (2, 2, 2),
            """
            stage 0  F0  F1  F0b F1b .   .   B0b==== .   B1b==== B0===== B1=====
            stage 1  .   F0  F1  F0b B0b==== F1b B1b==== B0===== B1===== .   .
            """,
        ),
        (
            "zb-h1", (3, 4, 1),
            """
            stage 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
            stage 1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
            stage 2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
            """,
        ),
    ],
)  # fmt: skip
def test_staircases(name: str, size: tuple[int, int, int], drawn: str) -> None:
    found = simulate(make_schedule(name, *size)).draw()
    assert found == textwrap.dedent(drawn).strip(), found


# -- schedules of one's own, and wrong ones ----------------------------------------------


@given(st.data())
def test_any_order_that_can_run_gets_exchanges_that_end(data: st.DataObject) -> None:
    """Random orders: each stage's actions are drawn one at a time from the possible ones."""
    stages, chunks = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 2))
    microbatches = data.draw(st.integers(1, 4))
    parts = stages * chunks
    done: set[tuple[str, int, int]] = set()
    orders: list[list[Computation]] = [[] for _ in range(stages)]
    while len(done) < 2 * parts * microbatches:
        possible = [
            (kind, part, microbatch)
            for kind in "FB" for part in range(parts) for microbatch in range(microbatches)
            if (kind, part, microbatch) not in done and (
                (part == 0 or ("F", part - 1, microbatch) in done) if kind == "F" else
                ("F", part, microbatch) in done
                and (part == parts - 1 or ("B", part + 1, microbatch) in done)
            )
        ]  # fmt: skip
        kind, part, microbatch = data.draw(st.sampled_from(possible))
        done.add((kind, part, microbatch))
        action = (Forward if kind == "F" else Backward)(part % stages, part // stages, microbatch)
        orders[part % stages].append(action)
    schedule = Schedule("own", stages, microbatches, chunks, tuple(map(tuple, orders)))
    stages_programs = programs(schedule)
    messages_match(schedule, stages_programs)
    assert stuck(stages_programs) == []


def test_orders_that_wait_in_a_circle_are_refused() -> None:
    backward_first = Schedule(
        "wrong", 2, 2, 1,
        (
            (Forward(0, 0, 0), Backward(0, 0, 0), Forward(0, 0, 1), Backward(0, 0, 1)),
            (Forward(1, 0, 1), Backward(1, 0, 1), Forward(1, 0, 0), Backward(1, 0, 0)),
        ),
    )  # fmt: skip
    with pytest.raises(SpecError, match="waits for ever: stage 0 before B0, stage 1 before F1"):
        simulate(backward_first)


def test_programs_that_wait_in_a_circle_are_found() -> None:
    first, second = programs(make_schedule("1f1b", 2, 2))
    crossed = [step for step in first if isinstance(step, Exchange)]
    swapped = {crossed[0]: crossed[1], crossed[1]: crossed[0]}
    wrong = tuple(swapped.get(step, step) if isinstance(step, Exchange) else step for step in first)
    assert stuck((wrong, second)) == [0, 1]
    less = tuple(step for step in first if step != crossed[0])
    assert stuck((less, second)) == [0, 1]


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        ("1f1p", (2, 2, 1), "schedule='1f1p': expected one of gpipe, .*did you mean '1f1b'"),
        ("1f1b", (0, 2, 1), "num_stages=0: expected an integer of 1 or more"),
        ("gpipe", (2, 0, 1), "num_microbatches=0: expected"),
        ("gpipe", (2, 2, 0), "num_chunks=0: expected"),
        ("1f1b", (2, 2, 2), "num_chunks=2: schedule '1f1b' has one chunk .*'interleaved'"),
        ("zb-h1", (2, 2, 2), "num_chunks=2: schedule 'zb-h1' has one chunk"),
        ("interleaved", (4, 6, 2), "num_microbatches=6: .*expected a multiple of pp=4, such as 8"),
    ],
)
def test_sizes_that_do_not_fit(name: str, size: tuple[int, int, int], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        make_schedule(name, *size)


def test_orders_with_missing_and_foreign_actions() -> None:
    good = make_schedule("1f1b", 2, 2)
    orders = good.orders
    for wrong, said in [
        ((orders[0][:-1], orders[1]), r"stage 0 has microbatch 1 of chunk 0 \[1, 0, 0, 0\] times"),
        ((orders[0] * 2, orders[1]), r"stage 0 has microbatch 0 of chunk 0 \[2, 2, 0, 0\] times"),
        ((orders[1], orders[0]), "stage 0 is given F0 of stage 1"),
        ((orders[0],), "1 orders of computations; expected one per stage"),
        (((*orders[0], Forward(0, 1, 0)), orders[1]), "stage 0 has F0 of chunk 1, which is out"),
    ]:
        with pytest.raises(SpecError, match=said):
            dataclasses.replace(good, orders=wrong)
