"""The page, in a browser: what it lights up is what the plan says."""

import json
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from commgrid import GridSpec, SpecError
from commgrid.cli import main
from commgrid.pipeline import make_schedule, simulate
from commgrid.planning.plan import GroupPlan
from commgrid.viz.page import draw_page
from commgrid.viz.view import GridView

BROWSER = next((found for name in ("chromium", "chromium-browser", "google-chrome")
                if (found := shutil.which(name))), None)  # fmt: skip
in_a_browser = pytest.mark.skipif(BROWSER is None, reason="there is no chromium on this machine")

DRIVER = """
<script>
"use strict";
const wrong = [];
addEventListener("error", event => wrong.push(String(event.message)));
addEventListener("securitypolicyviolation", event => wrong.push("blocked " + event.blockedURI));
console.error = console.warn = (...said) => wrong.push(said.join(" "));
const cell = rank => cells[place.get(rank)];
const litRanks = () => cells.filter(c => c.matches(".mate, .own")).map(c => Number(c.textContent));
const hover = rank => cell(rank).dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
const press = (element, key) =>
  element.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
const choose = (id, value) => { $(id).value = value; $(id).dispatchEvent(new Event("change")); };
const type = text => { $("rank").value = text; $("rank").dispatchEvent(new Event("input")); };
const told = () => $("told").textContent;
// Without a window a page is sometimes loaded before it has the focus, which delays this event.
const focus = HTMLElement.prototype.focus;
HTMLElement.prototype.focus = function () {
  focus.call(this);
  if (!document.hasFocus()) this.dispatchEvent(new FocusEvent("focusin", { bubbles: true }));
};
function report(found) {
  found.wrong = wrong;
  found.requests = performance.getEntriesByType("resource").map(entry => entry.name);
  const home = document.createElement("pre");
  home.id = "report";
  home.textContent = JSON.stringify(found);
  document.body.append(home);
}
addEventListener("load", () => {
  try { report((() => { %s })()); } catch (error) { wrong.push(String(error)); report({}); }
});
</script>
"""


def browse(page: str, folder: Path, script: str) -> Any:
    """The result of a script run in the loaded page."""
    path = folder / "page.html"
    path.write_text(page.replace("</body>", DRIVER % script + "</body>"), encoding="utf-8")
    done = subprocess.run(
        [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
         f"--user-data-dir={folder / 'profile'}", path.as_uri()],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    _, begin, rest = done.stdout.partition('<pre id="report">')
    assert begin, f"the page said nothing:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    text = rest.partition("</pre>")[0]
    for entity, sign in (("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&")):
        text = text.replace(entity, sign)
    found = json.loads(text)
    assert found["wrong"] == []
    assert found["requests"] == []
    return found


@pytest.mark.full
@in_a_browser
def test_a_hover_lights_up_the_ranks_of_the_plan(tmp_path: Path) -> None:
    spec = GridSpec.build(tp=2, cp=2, pp=2, ep=4, etp=1).resolve(64)
    chance = random.Random(5)
    asked = [(name, chance.randrange(64)) for name in spec.definitions]
    region = {name: definition.region for name, definition in spec.definitions.items()}
    script = f"""
      const asked = {json.dumps(asked)}, region = {json.dumps(region)};
      return {{ lit: asked.map(([name, rank]) => {{
        choose("region", region[name]); choose("name", name); hover(rank); return litRanks();
      }}), words: told() }};
    """
    found = browse(draw_page(GridView(spec)), tmp_path, script)
    for (name, rank), lit in zip(asked, found["lit"], strict=True):
        assert lit == sorted(GroupPlan.for_rank(spec, rank).groups[name]), (name, rank)
    last, rank = asked[-1]
    assert f"rank {rank} on node {rank // 8}: " in found["words"]
    for axis, index in GroupPlan.for_rank(spec, rank).coordinate.items():
        assert f"{axis} {index}" in found["words"]
    assert f"{last} ({len(found['lit'][-1])} ranks" in found["words"]


@pytest.mark.full
@in_a_browser
def test_search_and_the_keyboard_alone_do_all_of_it(tmp_path: Path) -> None:
    script = """
      const steps = [];
      const note = () => steps.push([litRanks(), Number(document.activeElement.textContent)]);
      type("5"); note();
      type(""); note();
      type("99"); const unknown = told();
      cells[0].focus(); note();
      press(cells[0], "ArrowRight"); note();
      press(document.activeElement, "ArrowDown"); note();
      press(document.activeElement, "Enter");
      const pressed = document.activeElement.getAttribute("aria-pressed");
      press(document.activeElement, "End"); note();
      press(document.activeElement, "Home"); note();
      $("nodes").dispatchEvent(new PointerEvent("pointerleave")); const back = litRanks();
      press(document.activeElement, "Escape"); note();
      return { steps, unknown, pressed, back,
        reachable: [...document.querySelectorAll("[tabindex='0'], select, input, button")]
          .filter(each => !each.closest("[hidden]")).length,
        live: $("told").getAttribute("aria-live"), label: cells[3].getAttribute("aria-label") };
    """
    found = browse(draw_page(GridView(GridSpec.build(tp=2).resolve(16))), tmp_path, script)
    (typed, _), (none, _), *moved = found["steps"]
    assert (typed, none) == ([4, 5], [])
    assert found["unknown"] == "there is no rank 99 in this grid"
    assert moved[:5] == [
        [[0, 1], 0], [[0, 1], 1], [[8, 9], 9], [[14, 15], 15], [[0, 1], 0],
    ]  # fmt: skip
    assert found["back"] == [8, 9]  # which Enter kept
    assert moved[5][0] == []
    assert found["pressed"] == "true"
    assert found["reachable"] == 4  # two lists, the field, and one of the ranks
    assert (found["live"], found["label"]) == ("polite", "rank 3")


@pytest.mark.full
@in_a_browser
def test_a_schedule_plays(tmp_path: Path) -> None:
    simulation = simulate(make_schedule("zb-h1", num_stages=4, num_microbatches=8))
    script = """
      const later = () => document.querySelectorAll(".later").length;
      const slider = document.querySelector("input[type=range]");
      const all = document.querySelectorAll(".bar").length, whole = later();
      slider.value = 1; slider.dispatchEvent(new Event("input")); const early = later();
      const button = document.querySelector(".play button");
      button.click(); const playing = button.textContent; button.click();
      return { all, whole, early, playing, stopped: button.textContent };
    """
    page = draw_page(GridView(GridSpec.build(pp=4).resolve(8)), (simulation,))
    found = browse(page, tmp_path, script)
    late = sum(start >= 1 for start, _ in simulation.spans.values())
    assert (found["all"], found["whole"], found["early"]) == (len(simulation.spans), 0, late)
    assert (found["playing"], found["stopped"]) == ("Pause", "Play")


@pytest.mark.full
@in_a_browser
def test_names_with_html_in_them_are_text(tmp_path: Path) -> None:
    """Names are identifiers, so nothing but a page made by hand could hold one."""
    evil = "</script><img src=x onerror=wrong.push('ran')>"
    page = draw_page(GridView(GridSpec.build(tp=2).resolve(4)))
    data = json.loads(page.partition("let data = ")[2].partition(";\n")[0])
    data["names"][evil] = data["names"]["tp"]
    data["title"] = evil
    text = json.dumps(data).replace("<", "\\u003c")
    made = page.replace(page.partition("let data = ")[2].partition(";\n")[0], text)
    script = 'return { title: $("title").textContent, images: document.images.length };'
    found = browse(made, tmp_path, script)
    assert (found["title"], found["images"]) == (evil, 0)


@pytest.mark.full
@in_a_browser
def test_four_thousand_ranks_answer_a_hover(tmp_path: Path) -> None:
    """Every rank of the largest group is lit; how long it takes is reported, not judged."""
    spec = GridSpec.build(tp=8, pp=4).resolve(4096)
    script = """
      choose("name", "pp_dp_cp_tp");
      const times = [];
      for (const rank of [5, 4000, 17]) {
        const begin = performance.now();
        hover(rank); document.body.getBoundingClientRect();
        times.push(performance.now() - begin);
      }
      return { lit: litRanks().length, times };
    """
    found = browse(draw_page(GridView(spec)), tmp_path, script)
    assert found["lit"] == 4096
    print(f"a hover at 4,096 ranks: {max(found['times']):.1f} ms at most")


def test_a_page_is_one_file_that_asks_nobody(capsys: pytest.CaptureFixture[str],
                                             tmp_path: Path) -> None:  # fmt: skip
    path = tmp_path / "grid.html"
    assert main(["show", "--tp", "2", "--world-size", "16", "-o", str(path)]) == 0
    assert capsys.readouterr().out == f"wrote {path}\n"
    page = path.read_text()
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    assert "/*DATA*/" not in page


def test_too_many_ranks_for_a_page() -> None:
    with pytest.raises(SpecError, match="at most 32,768 ranks, the grid has 65,536"):
        draw_page(GridView(GridSpec.build(tp=8).resolve(65_536)))
