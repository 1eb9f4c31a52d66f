"""The cost of recorded calls on a cluster, compared with the model's own for the same grid."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from commgrid import cli
from commgrid.call_records import files as trace_files
from commgrid.call_records.call import Call, Group
from commgrid.call_records.price import pricer
from commgrid.call_records.table import summed
from commgrid.call_records.trace import Trace
from commgrid.cost_model.cluster import CLUSTERS
from commgrid.cost_model.collective import collective_time
from commgrid.cost_model.config import ParallelConfig
from commgrid.cost_model.model import Model
from commgrid.cost_model.step import step_cost, traffic
from commgrid.testing import run_on_ranks
from tests.audit.audited import EXAMPLES, TEXT
from tests.call_records.test_files import saved

LAYERS, HIDDEN, SEQUENCE, BATCH, MICROBATCHES = 3, 64, 32, 8, 2
STATED = CLUSTERS["h100"]
H100 = replace(STATED, levels=tuple(replace(level, measured=True) for level in STATED.levels))


TP = Group("tp", tuple(range(0, 32, 2)))


def call(operation: str, size: int, peer: int | None = None) -> Call:
    return Call(TP, operation, peer, bytes=size)


def test_sizes_are_those_of_nccl_tests() -> None:
    """A rank hands in its part of an all-gather, and all of a reduce-scatter."""
    spread = H100.spread(TP.ranks)
    assert spread == (4, 4)
    trace, price = Trace(2, (), 0, {}), pricer(H100)
    for operation, like, factor in (
        ("all_reduce", "all_reduce", 1), ("all_gather", "all_gather", 16),
        ("reduce_scatter", "reduce_scatter", 1), ("all_to_all", "all_to_all", 1),
        ("broadcast", "broadcast", 1), ("reduce", "broadcast", 1), ("gather", "send_recv", 15),
        ("scatter", "send_recv", 15),
    ):  # fmt: skip
        seconds = collective_time(like, factor * 10**7, spread, H100)
        assert price(trace, call(operation, 10**7)) == pytest.approx(seconds, rel=1e-12)
    barrier = collective_time("all_reduce", 4, spread, H100)
    assert price(trace, call("barrier", 0)) == pytest.approx(barrier, rel=1e-12)
    for peer, crossed in ((4, (2, 1)), (8, (1, 2))):  # ranks 4 and 8: within a node, and beyond
        for operation in ("send", "recv"):
            seconds = collective_time("send_recv", 10**7, crossed, H100)
            assert price(trace, call(operation, 10**7, peer)) == pytest.approx(seconds, rel=1e-12)
    assert math.isnan(price(trace, call("recv", 8)))  # from anybody
    assert math.isnan(price(trace, call("something else", 8)))
    assert math.isnan(price(trace, replace(call("all_reduce", 8), group=Group("tp", ()))))


def test_a_dry_step_costs_what_the_model_says(tmp_path: Path) -> None:
    """train_gpt in bf16 on tp 2, dp 2 and pp 2, whose calls the model does not know.

    Of tp the model has four all-reduces a layer and microbatch; the program has one more of the
    embedding on the first stage, and one more backward of the output layer on the last.
    """
    flags = (
        f"--layers {2 * LAYERS} --hidden {HIDDEN} --heads 4 --seq-len {SEQUENCE} --dtype bf16 "
        f"--batch-size {BATCH} --microbatches {MICROBATCHES} --data {TEXT}"
    )
    argv = [
        "audit", "--dry", str(EXAMPLES / "train_gpt.py"), "--grid", "tp=2 dp=2 pp=2", "--ranks",
        "0", "-o", str(tmp_path), "--", *flags.split(),
    ]  # fmt: skip
    assert run_on_ranks(cli.main, 1, argv, backend=None, timeout=200) == [0]
    (trace,) = trace_files.read(tmp_path)
    model = Model(
        "gpt", layers=2 * LAYERS, hidden=HIDDEN, heads=4, vocabulary=256, sequence=SEQUENCE,
        batch=BATCH, biases=True,
    )  # fmt: skip
    micro = BATCH // 2 // MICROBATCHES
    choice = ParallelConfig(tp=2, dp=2, pp=2, microbatch=micro, sequence_parallel=False)
    model_says = step_cost(model, choice, H100)
    whole = micro * SEQUENCE * HIDDEN * 2
    mine = [each for each in trace.calls if each.group.first == "tp" and each.bytes == whole]
    assert {each.operation for each in mine} == {"all_reduce"}
    assert len(mine) == MICROBATCHES * (4 * LAYERS + 1)
    sums = summed([replace(trace, calls=tuple(mine))], pricer(H100))
    seconds = sum(each.seconds for each in sums)
    of_layers = seconds * 4 * LAYERS / (4 * LAYERS + 1)
    assert of_layers == pytest.approx(model_says.parts["tp"], rel=1e-9)
    assert sum(each.share for each in sums) == pytest.approx(1.0)
    sent = next(each.sent for each in traffic(model_says) if each.name == "tp")
    handed = sum(each.bytes for each in mine) * 4 * LAYERS / (4 * LAYERS + 1)
    assert handed == sent  # a ring of two sends 2 (n - 1) / n of it


def test_the_command_says_what_it_cannot_reckon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = ["tp", 0, "recv", [2], "float32", 8, None, "a.py:1 f", 0, 100, 200, 0]
    for rank in range(2):
        saved(tmp_path, rank, row if rank else None)
    assert cli.main(["trace", str(tmp_path), "--cluster", "h100"]) == 0
    said = capsys.readouterr().out
    assert "seconds as the cost model has them on h100, each call by itself" in said
    assert said.rstrip().endswith("no cost model for: recv")
    assert cli.main(["trace", str(tmp_path), "--cluster", "h101"]) == 2
    assert cli.main(["trace", str(tmp_path), "--cluster", "h100", "-o", "a.html"]) == 2
    assert "--cluster h100: would change nothing; it is about the table" in capsys.readouterr().err
