"""What changes between two grids, against a comparison of every rank's own groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from commgrid import GridSpec, SpecError
from commgrid.cli import main
from commgrid.cli.commands.diff import compare
from commgrid.planning.plan import GroupPlan

ORDERS = ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "cp-tp-ep-dp-pp"]
ROWS: list[dict[str, Any] | None] = [
    None,
    {"ends": {"of": "pp", "pick": ["first", "last"]}},
    {"odd": {"ranks": [[0, 1, 2], [4, 5]]}},
    {"odd": {"ranks": [[0, 2, 1], [4, 5]]}},
    {"parts": {"of": "dp_tp", "split": {"a": -1, "b": 2}}},
]
SIZES = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 2, 4]), "pp": st.sampled_from([1, 2]),
        "cp": st.sampled_from([1, 2]), "ep": st.sampled_from([1, 2]),
        "order": st.sampled_from(ORDERS), "groups": st.sampled_from(ROWS),
    }
)  # fmt: skip


@given(SIZES, SIZES)
def test_names_are_the_same_where_every_rank_has_the_same_peers(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    try:
        specs = [GridSpec.build(**sizes).resolve(16) for sizes in (one, other)]
    except SpecError:  # an order in which the regions' pp would differ
        reject()
    found = compare(*specs)
    plans = [[GroupPlan.for_rank(spec, rank) for rank in range(16)] for spec in specs]
    names = [{frozenset(name.split("_")): name for name in ranks[0].created} for ranks in plans]
    assert set(found.gone) == {names[0][words] for words in names[0].keys() - names[1].keys()}
    assert set(found.new) == {names[1][words] for words in names[1].keys() - names[0].keys()}
    changed = {change.name: change for change in found.changed}
    for words in names[0].keys() & names[1].keys():
        name = names[0][words]
        groups = [
            [plan.groups.get(spelled[words], ()) for plan in ranks]
            for ranks, spelled in zip(plans, names, strict=True)
        ]
        moved = [rank for rank in range(16) if groups[0][rank] != groups[1][rank]]
        assert (name in found.same) == (not moved), name
        if moved:
            change = changed[name]
            assert (change.moved, change.rank) == (len(moved), moved[0])
            assert change.before == groups[0][moved[0]]
            assert change.after == groups[1][moved[0]]
    held = [[*ranks[0].communicators] for ranks in plans]
    assert found.communicators == (len(held[0]), len(held[1]))
    assert compare(specs[0], specs[0]).is_empty


def test_in_words(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text("axes: {tp: 2, dp: -1, pp: 2}\ngroups: {dp: {timeout: 60}, mine: tp}\n")
    given = ["diff", str(path), "--world-size", "16", "--set", "axes.tp=4"]
    assert main([*given, "--set", "groups={dp: {timeout: 90}}", "--set", "order=tp-pp-dp"]) == 0
    said = capsys.readouterr().out
    for line in (
        "  tp 2 → 4, dp 4 → 2",
        "  order of dense: tp-dp-pp → tp-pp-dp",
        "  tp        of 2 → 4, on every rank; rank 0: 0-1 → 0-3",
        "  pp        of 2, on every rank; rank 0: 0,8 → 0,4",
        "no longer there (1): mine",
        "  dp: {'timeout': 60.0} → {'timeout': 90.0}",
    ):
        assert line in said.splitlines(), said
    assert main([*given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["axes"] == {"tp": [2, 4], "dp": [4, 2]}
    assert found["changed"][0]["before"] == [0, 1]
    assert main(["diff", "tp", "tp", "--world-size", "8"]) == 0
    assert "the same groups under the same names" in capsys.readouterr().out


def test_grids_of_other_sizes_are_compared_by_name_alone() -> None:
    found = compare(*(GridSpec.build(tp=2).resolve(n) for n in (8, 16)))
    assert found.ranks == (8, 16)
    assert found.axes == {"dp": (4, 8)}
    assert found.same == found.changed == ()
    assert "8 → 16 ranks" in str(found)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["tp"], "there is nothing to compare it with; give AFTER, or --set KEY=VALUE"),
        (["tq", "tp"], "neither a file nor a preset; expected GRID.yaml, or one of ddp"),
        (["tp", "pp"], "--world-size: needed"),
    ],
)
def test_what_is_wrong(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", *given]) == 2
    assert said in capsys.readouterr().err


def test_rules_of_placing_are_compared() -> None:
    """They change which placements are refused, or where ranks go."""
    plain = GridSpec.build(tp=2).resolve(8)
    kept = GridSpec.build(tp=2, within={"tp": "node"}, place="by_host").resolve(8)
    found = compare(plain, kept)
    assert not found.is_empty
    assert found.placing == {"within": (None, "tp=node"), "place": ("by_rank", "by_host")}
    assert "within: – → tp=node" in str(found)
    assert compare(kept, kept).placing == {}


def test_other_ranks_of_the_same_number_are_a_difference() -> None:
    """They were called the same groups, since all of their names are there in both."""
    one, other = (GridSpec.build(tp=2, ranks=ranks).resolve() for ranks in ("0-7", "8-15"))
    found = compare(one, other)
    assert not found.is_empty
    assert not found.same_ranks
    assert "0-7 → 8-15" in str(found)
    assert "same" not in str(found)
