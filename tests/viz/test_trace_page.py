"""The page of traces, in a browser: what it tells is what was recorded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commgrid import SpecError
from commgrid.call_records.call import Call, Group
from commgrid.call_records.trace import Trace
from commgrid.cli import main
from commgrid.cli.commands import trace as command
from commgrid.viz import page as trace_page
from commgrid.viz.page import draw_trace_page
from tests.records import save
from tests.viz.test_page import browse, in_a_browser

TP, PP = Group("tp,cp", (0, 1), "1"), Group("pp", (0, 1), "2")


def saved(rank: int, *calls: tuple[Any, ...]) -> Trace:
    """A trace; calls are group, operation, peer, and began, issued, ended in milliseconds."""
    made: list[Call] = []
    for group, operation, peer, *times in calls:
        turn = sum(each.group == group and each.operation == operation for each in made)
        began, issued, ended = (None if t is None else 1.7e9 + t / 1e3 for t in times)
        assert began is not None
        made.append(
            Call(group, operation, peer, (4,), "float32", 16, where=f"r{rank}.py:{len(made)}",
                 turn=turn, began=began, issued=issued, ended=ended)
        )  # fmt: skip
    entered = sum(each.group == TP for each in made)
    return Trace(
        rank, tuple(made), groups=(TP, PP), entered={TP: entered, PP: 0}, at=1.7e9 + 20,
        steps=((3, 1.7e9),), host="a",
    )  # fmt: skip


def page_of(traces: list[Trace]) -> str:
    return draw_trace_page(command.as_dict_of(traces))


@pytest.fixture
def traces() -> list[Trace]:
    """Rank 0 waits 6 ms for rank 1, which waits 2 ms for its message and leaves out a call."""
    return [
        saved(0, (TP, "all_reduce", None, 0, 0.1, 7), (PP, "send", 1, 10, 10.1, 11),
              (TP, "all_reduce", None, 12, 12.1, None)),
        saved(1, (TP, "all_reduce", None, 6, 6.1, 7), (PP, "recv", 0, 8, 8.1, 11)),
    ]  # fmt: skip


@in_a_browser
def test_it_tells_who_waits_for_whom(traces: list[Trace], tmp_path: Path) -> None:
    script = """
      const said = () => $("told").innerText;
      const walk = ["ArrowRight", "ArrowDown", "ArrowRight", "ArrowUp", "ArrowDown", "ArrowDown"]
        .map(key => { press($("lines"), key); return said(); });
      pick(calls[0]); const first = said();
      return { walk, first, title: $("title").textContent,
        labels: [...$("labels").children].map(each => each.textContent),
        pairs: [...$("pairs").rows].map(row => [...row.cells].map(cell => cell.textContent)),
        matrix: [...$("matrix").rows].map(row => [...row.cells].map(cell => cell.textContent)),
        steps: [...$("steps").rows].map(row => [...row.cells].map(cell => cell.textContent)),
        causes: [...$("causes").children].map(each => each.textContent),
        hidden: $("diagnosis").hidden };
    """
    found = browse(page_of(traces), tmp_path, script)
    assert found["title"] == "2 ranks, 5 calls"
    assert found["labels"] == ["", "rank 0  tp +1", "pp", "rank 1  tp +1", "pp"]
    assert "rank 0: tp +1 all_reduce 0, [4] float32, 16 bytes, at r0.py:0" in found["first"]
    assert "took 7.00 ms, of which it waited 6.00 ms for rank 1, which came last" in found["first"]
    assert "rank 0: pp send 0 to rank 1" in found["walk"][1]
    assert found["pairs"][1:] == [
        ["rank 0", "rank 1", "19.9940", "2", "tp +1 all_reduce 1, r0.py:2"],
        ["rank 1", "rank 0", "0.0020", "1", "pp recv 0, r1.py:1"],
    ]
    assert found["matrix"] == [["", "0", "1"], ["0", "", "20"], ["1", "0.0020", ""]]
    assert found["steps"] == [["", "0", "1"], ["3", "0.0060", "0.0020"]]
    assert (found["causes"], found["hidden"]) == ([], True)


@in_a_browser
def test_a_call_that_others_never_issue_says_so(traces: list[Trace], tmp_path: Path) -> None:
    script = """
      pick(calls.find(call => call.rank === 0 && call.turn === 1 && !call.message));
      return { told: $("told").innerText };
    """
    told = browse(page_of(traces), tmp_path, script)["told"]
    assert "has not ended" in told
    assert "rank 1 has not issued it" in told


@in_a_browser
def test_it_picks_ranks_and_groups_and_opens_others(traces: list[Trace], tmp_path: Path) -> None:
    script = """
      const shown = () => rows.map(row => row.rank + " " + row.group);
      const set = (id, value) => {
        $(id).value = value;
        $(id).dispatchEvent(new Event(id === "group" ? "change" : "input"));
        return shown();
      };
      const one = set("ranks", "1"), none = set("ranks", "5-9"), all = set("ranks", "");
      const group = set("group", "pp");
      const narrow = scale(); set("zoom", "3");
      const wide = scale() / narrow;
      const raw = data.found.traces.map(trace => ({ ...trace, calls: trace.calls.slice(0, 1) }));
      load({ traces: raw });
      diagnose({ causes: [{ text: "rank 1 <b>left</b>" }], consequences: [], waiting: { 0: [1] } });
      return { one, none, all, group, wide, title: $("title").textContent,
        causes: [...$("causes").children].map(each => each.textContent) };
    """
    found = browse(page_of(traces), tmp_path, script)
    assert (found["one"], found["none"]) == (["1 tp,cp", "1 pp"], [])
    assert found["all"] == ["0 tp,cp", "0 pp", "1 tp,cp", "1 pp"]
    assert (found["group"], found["wide"]) == (["0 pp", "1 pp"], 8)
    assert found["title"] == "2 ranks, 2 calls"
    assert found["causes"] == ["rank 1 <b>left</b>", "rank 0 waits for rank 1"]


def test_the_command_writes_it_with_what_is_wrong(
    traces: list[Trace],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    traces[0] = replace(
        traces[0], calls=(*traces[0].calls[:-1], replace(traces[0].calls[-1], waiting=True))
    )
    save(tmp_path, *traces)
    out = tmp_path / "trace.html"
    assert main(["trace", str(tmp_path), "-o", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    page = out.read_text()
    data = json.loads(page.partition("const data = ")[2].partition(";\n")[0])
    assert [trace["rank"] for trace in data["found"]["traces"]] == [0, 1]
    assert "all_reduce" in data["diagnosis"]["causes"][0]["text"]
    assert "http" not in page.replace("http-equiv", "")


def test_too_many_calls_for_a_page(traces: list[Trace], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_page, "MOST_CALLS", 4)
    with pytest.raises(SpecError, match="a page shows at most 4 calls, these are 5"):
        page_of(traces)
