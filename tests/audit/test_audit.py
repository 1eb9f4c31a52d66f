"""`commgrid audit`: arguments, comparisons, and how it ends."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path

import pytest
import torch

import commgrid
from commgrid import GridSpec, SpecError, cli
from commgrid.audit.assemble import GridRanks, join, ratio, relative
from commgrid.audit.auditing import Audit
from commgrid.audit.compare import compare
from commgrid.audit.finding import KINDS, Comparison, Divergence
from commgrid.audit.records import LARGEST, About, thin_shape, thinned
from commgrid.planning.audited import VARIABLE, AuditedGrid, spec_over
from commgrid.testing import Outcome, Ranks, run_on_ranks
from tests.audit.audited import EXAMPLES, TEXT, TRAIN, part, seen_on, with_bug
from tests.audit.test_audit_bugs import TRAIN_GPT, audited
from tests.waiting import until, until_waiting

# -- arguments --------------------------------------------------------------------------


def test_a_grid_is_sizes_and_then_flags() -> None:
    grid = AuditedGrid.parse("tp=2 dp=3 --flag 'two words'")
    assert grid.sizes == {"tp": 2, "dp": 3}
    assert grid.world_size == 6
    assert grid.flags == ("--flag", "two words")
    assert AuditedGrid.parse("tp=2,dp=3").variable == grid.variable == "tp=2,dp=3"
    assert AuditedGrid.parse("dp=4 ep=2 etp=1").world_size == 4
    assert AuditedGrid.parse("dp_shard=2 dp_replicate=2").world_size == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no size"),
        ("tp", "'tp' is no size"),
        ("tp=0", "'tp=0' is no size"),
        ("tp=2 tp=4", "tp is given twice"),
        ("ep=4", "region expert"),
        ("tp=2 'x", "No closing quotation"),
    ],
)
def test_a_grid_that_is_none_is_refused(text: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        AuditedGrid.parse(text)


def sizes_of(variable: str | None, **given: int) -> dict[str, int]:
    if variable is not None:
        os.environ[VARIABLE] = variable
    return commgrid.initialize(**given).shape  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("variable", "given", "wanted"),
    [
        ("tp=2", {"dp": 2}, {"tp": 2, "cp": 1, "dp": 1, "pp": 1}),
        ("dp=2", {"tp": 2}, {"tp": 1, "cp": 1, "dp": 2, "pp": 1}),
        ("dp=2", {"dp_shard": -1, "dp_replicate": 1}, {"dp_shard": 2, "dp_replicate": 1}),
        ("dp=2", {"config": {"axes": {"tp": 2, "dp": -1}}}, {"tp": 1, "dp": 2}),
    ],
)  # fmt: skip
def test_initialize_takes_the_audits_sizes(
    variable: str, given: dict[str, int], wanted: dict[str, int]
) -> None:
    # The ranks set variables of the environment.
    for shape in run_on_ranks(_sized, 2, variable, given, check=False):
        assert {axis: shape[axis] for axis in wanted} == wanted


def _sized(variable: str, given: dict[str, int]) -> dict[str, int]:
    return sizes_of(variable, **given)


def test_a_spec_without_an_axis_of_the_grid_is_refused() -> None:
    spec = GridSpec.from_dict({"axes": {"dp": -1}})
    with pytest.raises(SpecError, match="the audit's grid has rows=2, but the program's config"):
        spec_over({"rows": 2}, spec)


def test_a_script_reads_the_sizes_where_initialize_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert commgrid.audit_sizes(tp=4, dp=-1, etp=None) == {"tp": 4, "dp": -1, "etp": None}
    monkeypatch.setenv(VARIABLE, "tp=2,dp=3")
    assert commgrid.audit_sizes(tp=4, dp=-1, ep=2) == {"tp": 2, "dp": 3, "ep": 1}
    assert commgrid.audit_sizes(etp=None) == {"etp": None}
    assert commgrid.audit_sizes(etp=8) == {"etp": 2}  # it follows tp
    monkeypatch.setenv(VARIABLE, "two")
    with pytest.raises(SpecError, match="COMMGRID_AUDIT='two': 'two' is no size"):
        commgrid.audit_sizes(tp=1)


# -- how tensors are put together ---------------------------------------------------------


def test_boxes_make_a_full_tensor_and_copies_that_differ_are_named() -> None:
    one, two = torch.ones(2, 3), torch.full((2, 3), 2.0)
    joined = join({0: [((0, 0), one)], 1: [((2, 0), two)]}, (4, 3), 1e-9)
    assert torch.equal(joined.full, torch.cat([one, two]).double())
    assert bool(joined.has.all())
    assert joined.apart == {}
    joined = join({0: [((0, 0), one)], 3: [((0, 0), two)]}, (4, 3), 1e-9)
    assert list(joined.apart) == [(0, 3)]
    assert int(joined.has.sum()) == 6


def test_a_large_tensor_keeps_the_same_rows_on_every_grid() -> None:
    whole = torch.arange(2.5 * LARGEST).view(-1, 4)
    shape = tuple(whole.shape)
    cut = len(whole) // 3 + 1
    parts = thinned([((0, 0), whole[:cut])], shape) + thinned([((cut, 0), whole[cut:])], shape)
    one = join({0: thinned([((0, 0), whole)], shape)}, thin_shape(shape), 1e-9)
    two = join({i: [each] for i, each in enumerate(parts)}, thin_shape(shape), 1e-9)
    assert bool(one.has.all())
    assert bool(two.has.all())
    assert torch.equal(one.full, two.full)
    assert one.full.numel() <= LARGEST


def test_a_factor_is_told_from_other_numbers() -> None:
    reference = torch.randn(50, dtype=torch.float64)
    assert ratio(2 * reference, reference, 1e-9) == pytest.approx(2)
    assert ratio(reference.flip(0), reference, 1e-9) is None
    assert relative(reference, reference) == 0.0
    assert relative(reference * float("nan"), reference) == float("inf")


def test_axes_are_those_along_which_ranks_differ() -> None:
    about = [
        About(r, 4, {"dense": {"tp": r % 2, "dp": r // 2}}, {"dense": {"tp": 2, "dp": 2}})
        for r in range(4)
    ]
    ranks = GridRanks(about)
    assert ranks.along(1, ("dp",)) == [1, 3]
    assert ranks.axes_between([(0, 1), (0, 3)]) == ("tp",)
    assert ranks.axes_between([(0, 2)]) == ("dp",)
    assert ranks.subsets() == [(), ("tp",), ("dp",), ("tp", "dp")]


# -- what it finds -----------------------------------------------------------------------


def test_a_norm_that_was_never_summed_is_named(tmp_path: Path) -> None:
    bug = TRAIN_GPT[0]
    assert bug.name == "a norm's gradient is not summed over tp"
    audited(bug, tmp_path)


@pytest.mark.full
def test_a_group_that_was_the_wrong_one_is_named_with_its_line(tmp_path: Path) -> None:
    bug = "Reducer(self.model, shard", 'Reducer(self.model, "dp", shard'
    changes = {"gpt_training/trainer.py": bug}
    script = with_bug("train_gpt.py", changes, tmp_path / "bug")
    flags = f"{TRAIN} {TEXT}".split()
    first = part("dp=1", "dp=2 cp=2", tmp_path, script, flags, steps=1).findings[0]
    (call,) = first.collectives
    assert call[:2] == ("all_reduce", "dp")
    assert call[2].startswith("trainer.py:")
    assert "summed over dp, and not over cp" in first.text


DTENSOR = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module,
)

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).double()
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(2):
    inputs = torch.randn(4, 8, dtype=torch.float64)
    if BUG and dist.get_rank():
        inputs = inputs + 1
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.full("False")
@pytest.mark.parametrize("bug", [False, True])
def test_a_program_on_dtensors_alone(bug: bool, tmp_path: Path) -> None:
    """Nothing of commgrid's is in it: axes are the ranks, and boxes the DTensors' own."""
    script = tmp_path / "program.py"
    script.write_text("import sys\nsys.argv[1:] = []\n" + DTENSOR.replace("BUG", str(bug)))
    one = seen_on("tp=1", tmp_path / "1", script, [])
    two = seen_on("tp=2", tmp_path / "2", script, [])
    found = compare(one, two)
    assert bool(found.findings) == bug
    if bug:
        assert found.findings[0].step == 1
    else:
        assert found.compared["weights"] == 4 * 3
        assert found.compared["gradients"] == 4 * 2


# -- the command -------------------------------------------------------------------------


def command(*argv: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = cli.main(["audit", *argv])
        except SystemExit as end:
            status = int(end.code or 0)
    return status, out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["none.py", "--grids", "dp=1"], "there is no such program"),
        ([__file__, "--grids", "dp"], "is no size"),
        ([__file__], "--grids"),
        ([__file__, "--grids", "dp=1", "--steps", "0"], "--steps 0: expected above 0"),
        ([__file__, "--grids", "dp=1", "--tolerance", "2"], "--tolerance 2.0: expected between"),
        ([__file__, "--grids", "dp=1", "--keep", str(EXAMPLES)], "it is not empty"),
        ([__file__, "--grids", "dp=1", "--keep", __file__], "cannot be made: File exists; give"),
        (["--grids", "dp=1", "none.py"], "none.py: there is no such program"),
        (["--grids", "dp=1"], "SCRIPT is not given; expected commgrid audit train.py"),
        (["--dry", __file__, "--grid", "dp=1", "-o", __file__], "cannot be made: File exists"),
        ([__file__, "--grids", "dp=1", "--layers", "2"], "; the script's own come after --"),
    ],
)
def test_wrong_usage_is_2(argv: list[str], said: str) -> None:
    status, _, err = command(*argv)
    assert status == 2
    assert said in err


PLAIN = """
import sys, time, torch, commgrid
from commgrid.data_parallel import GradientReducer
grid = commgrid.initialize()
if "--fail" in sys.argv and grid.world_size > 1:
    raise ValueError("the third wheel")
if "--hang" in sys.argv:
    print("a last line", flush=True)
    open(f"{__file__}.{grid.rank}", "w").close()
    time.sleep(1000)  # until it is killed
torch.manual_seed(0)
model = torch.nn.Linear(3, 1).double()
reducer = GradientReducer(model) if "--reduce" in sys.argv else None
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(100, 4, 3, dtype=torch.float64)
for step in range(100):  # more than are looked at
    mine = data[step].chunk(grid.size("dp"))[grid.get_local_rank("dp")]
    model(mine).square().mean().backward()
    if reducer:
        reducer.finish()
    optimizer.step()
    optimizer.zero_grad()
raise SystemExit("it was not ended")
"""


@pytest.mark.full
def test_the_command_ends_programs_and_says_what_parts(tmp_path: Path) -> None:
    script, kept = tmp_path / "plain.py", tmp_path / "kept"
    script.write_text(PLAIN)
    grids = ["--grids", "dp=1", "dp=2 --reduce", "dp=2", "--steps", "2", "--keep", str(kept)]
    status, out, err = command(str(script), *grids, "--json", "--", "--some-flag")
    assert (status, err.count("\n")) == (1, 3), err
    found = json.loads(out)
    assert [each["parts"] for each in found["grids"]] == [False, False, True]
    assert [each["steps"] for each in found["grids"]] == [2, 2, 1]
    first = found["grids"][2]["findings"][0]
    assert (first["what"], first["axes"], first["kind"]) == ("gradient", ["dp"], "not reduced")
    assert (kept / "grid_1" / "output_00001.txt").is_file()


@pytest.mark.full
def test_a_program_that_fails_is_2_with_its_last_lines(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    status, _, err = command(str(script), "--grids", "dp=2", "--", "--fail")
    assert status == 2
    assert "grid 'dp=2': plain.py failed with exit code 1" in err
    assert "ValueError: the third wheel" in err.splitlines()[-1]


@pytest.mark.full
def test_a_program_that_hangs_is_killed_with_all_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is over when both ranks hang."""
    script = tmp_path / f"hangs_{os.getpid()}.py"
    script.write_text(PLAIN)
    marks = [Path(f"{script}.{rank}") for rank in (0, 1)]
    waits = Ranks.wait
    pids: list[int] = []

    def wait(ranks: Ranks) -> dict[int, Outcome]:
        until(lambda: all(mark.exists() for mark in marks), "both ranks hang")
        pids.extend(map(ranks.pid, range(2)))
        until_waiting(pids)  # they have left their marks right before
        ranks.timeout = 0.0
        return waits(ranks)

    monkeypatch.setattr(Ranks, "wait", wait)
    argv = [str(script), "--grids", "dp=2", "--timeout", "1000", "--", "--hang"]
    status, _, err = command(*argv)
    assert status == 2
    assert "was killed; give it fewer or smaller steps, or a longer --timeout" in err
    assert "a last line" in err
    assert f'{script.name}", line 10 in <module>' in err  # where it hangs
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_variables_of_torchrun_and_how_a_rank_ended_are_told(tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    for how, said in (
        ("code", "ends.py failed with exit code 3 on rank 1; it printed\n    rank 1 of 2"),
        ("text", "ends.py failed with exit code 1 on rank 1; it printed\n    rank 1 of 2"),
        ("signal", "ends.py failed with signal SIGKILL on rank 1; it printed\n    rank 1 of 2"),
    ):
        status, _, err = command(str(script), "--grids", "dp=2", "--", how)
        assert status == 2
        assert said in err
        assert "rank 0 of 2" not in err


ENDS = """
import os, signal, sys, time
import torch.distributed as dist
rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
assert (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]) == (str(rank), str(size))
assert os.environ["MASTER_ADDR"] and int(os.environ["MASTER_PORT"])
dist.init_process_group("gloo")
print(f"rank {rank} of {size}", flush=True)
if rank == 0:
    time.sleep(1000)  # until it is killed, since rank 1 has ended
elif sys.argv[1] == "code":
    sys.exit(3)
elif sys.argv[1] == "text":
    sys.exit("a reason")
else:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_text_names_what_is_alike_once() -> None:
    same = [
        Divergence("tp=2", 1, "gradient", name, "not reduced", ("tp",), 0.5, "two of them")
        for name in "abcdef"
    ]
    found = Comparison("tp=2", 1, {"weights": 3}, tuple(same), 0.0, ("a note",), 1e-9)
    text = Audit("train.py", "float32", (Comparison("dp=1", 1), found)).text
    assert text.count("two of them") == 1
    assert "and 5 more: b, c, d, …" in text
    assert "note: a note" in text
    assert "fp64 would show more" in text
    assert set(KINDS) >= {each.kind for each in same}


def test_what_left_nothing_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("import sys\nprint(sys.argv)\n")
    with pytest.raises(commgrid.CommGridError, match="no rank has left anything"):
        seen_on("dp=1", tmp_path / "1", script, [])
