"""What `print` shows of a grid, a spec, a plan and a simulation: short at any size."""

from html.parser import HTMLParser

import torch.distributed as dist

import commgrid
from commgrid import GridSpec, GroupPlan, HyperCommGrid
from commgrid.pipeline_schedules.schedule import make_schedule
from commgrid.pipeline_schedules.simulator import simulate
from commgrid.testing import run_on_ranks

ROWS = {"odd": {"ranks": [[i, i + 1] for i in range(0, 4096, 2)]}}


class Cells(HTMLParser):
    """The rows of all tables, and tags that stay open."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def printed() -> tuple[str, str, str, str]:
    grid = commgrid.initialize(tp=2, pp=2)
    text, html = str(grid), grid._repr_html_()
    commgrid.destroy()
    destroyed = str(grid)
    grid = commgrid.initialize(tp=2, pp=2)
    dist.destroy_process_group()  # by hand, under the grid
    return text, html, destroyed, str(grid)


def test_a_grid_is_a_short_table() -> None:
    text, html, destroyed, pulled = run_on_ranks(printed, 4, backend=None, launcher="torchrun")[3]
    assert text.splitlines() == [
        "HyperCommGrid('default', tp=2 cp=1 dp=1 pp=2, rank 3)",
        "  axis    tp  cp  dp  pp",
        "  size     2   1   1   2",
        "  rank 3   1   0   0   1",
        "  4 ranks; this one holds 13 communicators for 15 names, 2 connected, over gloo",
    ]
    read = Cells(html)
    assert read.open == []
    assert read.rows[:3] == [
        ["axis", "tp", "cp", "dp", "pp"],
        ["size", "2", "1", "1", "2"],
        ["rank 3", "1", "0", "0", "1"],
    ]
    assert ["pp", "1 [3]"] in read.rows
    assert ["tp", "2 [3]"] in read.rows
    assert destroyed.splitlines()[0].endswith("rank 3, destroyed)")
    assert destroyed.splitlines()[-1] == "  4 ranks; destroyed, holds no communicator"
    assert pulled.endswith("its communicators are gone, torch.distributed was shut down under it")


def large(world: int) -> tuple[str, str, str]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=777, world_size=world)
    grid = HyperCommGrid(GridSpec.build(tp=8, pp=4, ep=8, etp=1), name="<big>")
    return repr(grid), str(grid), grid._repr_html_()


def test_a_large_grid_is_as_short() -> None:
    line, text, html = run_on_ranks(large, 1, 16384, backend=None)[0]
    assert "\n" not in line
    lines = text.splitlines()
    assert lines[0] == line
    assert [row.split() for row in lines[1:7]] == [
        ["dense", "axis", "tp", "cp", "dp", "pp"], ["size", "8", "1", "512", "4"],
        ["rank", "777", "1", "0", "97", "0"],
        ["expert", "axis", "etp", "ep", "edp", "pp"], ["size", "1", "8", "512", "4"],
        ["rank", "777", "0", "1", "97", "0"],
    ]  # fmt: skip
    assert lines[7].startswith("  16,384 ranks; this one holds ")
    assert len(lines) == 8
    assert max(map(len, lines)) <= 100
    assert len(html) < 5000
    assert "&lt;big&gt;" in html
    assert "<big>" not in html


def test_specs_and_plans_are_short() -> None:
    spec = GridSpec.build(tp=2, ep=4, etp=1, groups=ROWS, ranks=[*range(1, 4097)])
    assert str(spec).splitlines()[0] == "grid of 4,096 ranks: 1-4096"
    spec = GridSpec.build(tp=2, ep=4, etp=1, groups=ROWS).resolve(4096)
    assert str(spec).splitlines() == [
        "grid of 4,096 ranks",
        "  dense   tp 2 · cp 1 · dp 2048 · pp 1   (fastest first)",
        "  expert  etp 1 · ep 4 · edp 1024 · pp 1   (fastest first)",
        "  create=all, connect=axes, share=aliases",
        "  groups: odd",
    ]
    plan = GroupPlan.for_rank(spec, 5)
    head, held = str(plan).splitlines()
    assert head == "rank 5 of 4,096: tp 1, cp 0, dp 2, pp 0, etp 0, ep 1, edp 1"
    connecting = sum(c.connect for c in plan.communicators)
    assert held == (
        f"  {len(plan.communicators)} communicators for {len(plan.groups)} names, {connecting} of "
        "which connect at start"
    )


def test_a_simulation_is_short() -> None:
    for stages, microbatches in ((4, 8), (32, 64)):
        made = simulate(make_schedule("zb-h1", num_stages=stages, num_microbatches=microbatches))
        lines = str(made).splitlines()
        assert lines[0] == str(made.schedule)
        assert f"bubble {made.bubble_fraction:.1%} of ideal time" in lines[1]
        assert f"at most {max(made.peak_live)} live microbatches" in lines[2]
        assert "draw()" in lines[3]
        assert len(lines) == 4
        assert max(map(len, lines)) <= 100
        assert len(repr(made)) < 200
        assert "\n" not in repr(made)
