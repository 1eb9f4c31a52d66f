"""A cluster fitted to measured collectives: what it gives back, and what it says of others."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from commgrid.bench import Measured
from commgrid.cost_model.cluster import Cluster, Device, Level, find_cluster
from commgrid.cost_model.collective import collective_time
from commgrid.cost_model.collective_form import Fit, one_level_time
from commgrid.errors import SpecError
from tests.benchmarks.fit_cluster import draw_costs, fit, too_fast

LEVELS = (Level("node", 8), Level("cluster", None))
TWO = Cluster("two", Device("any", 1e12, 1e9, 1e9), LEVELS, "a test")
SIZES = tuple(1 << k for k in range(10, 27, 2))


def row(
    collective: str, size: int, spread: tuple[int, int], seconds: float, group: str = "tp"
) -> Measured:
    return Measured(
        group, (group,), collective, size, size // 4, math.prod(spread), 1, spread, seconds,
        seconds, seconds,
    )  # fmt: skip


def truth(
    collective: str, form: str, place: int, latency: float, bandwidth: float, ns: tuple[int, ...]
) -> list[Measured]:
    """Rows that a form makes, of groups on one level."""
    return [
        row(collective, size, (n, 1) if place == 0 else (1, n),
            one_level_time(collective, form, size, n, latency, bandwidth))
        for n in ns
        for size in SIZES
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("collective", "form"),
    [("all_reduce", "ring"), ("all_reduce", "tree"), ("all_gather", "ring"),
     ("all_to_all", "pairwise"), ("send_recv", "direct")],
)  # fmt: skip
def test_it_finds_the_form_and_its_numbers_again(collective: str, form: str) -> None:
    ns = (2,) if collective == "send_recv" else (2, 8)
    rows = truth(collective, form, 0, 5e-5, 2e9, ns)
    found = fit(rows, TWO).fits[0]
    assert (found.collective, found.level, found.algorithm) == (collective, "node", form)
    assert found.latency == pytest.approx(5e-5)
    assert found.bandwidth == pytest.approx(2e9)
    if collective != "send_recv":  # and a group that was not measured
        told = collective_time(collective, 3e5, (4, 1), fit(rows, TWO))
        assert told == pytest.approx(one_level_time(collective, form, 3e5, 4, 5e-5, 2e9))


def test_levels_are_fitted_apart_and_put_together() -> None:
    rows = [
        *truth("all_reduce", "ring", 0, 1e-5, 1e10, (8,)),
        *truth("reduce_scatter", "ring", 0, 2e-5, 2e10, (8,)),
        *truth("all_gather", "ring", 0, 3e-5, 3e10, (8,)),
        *truth("all_reduce", "ring", 1, 4e-4, 1e9, (2, 4)),
        row("all_reduce", 1 << 20, (8, 4), 1e6),  # across both: no level's own
    ]
    fitted = fit(rows, TWO)
    assert {(one.collective, one.level) for one in fitted.fits} == {
        ("all_reduce", "node"), ("reduce_scatter", "node"), ("all_gather", "node"),
        ("all_reduce", "cluster"),
    }  # fmt: skip
    assert [level.bandwidth for level in fitted.levels] == [pytest.approx(1e10), pytest.approx(1e9)]
    told = collective_time("all_reduce", 1e7, (8, 4), fitted)
    assert told == pytest.approx(
        one_level_time("reduce_scatter", "ring", 1e7, 8, 2e-5, 2e10)
        + one_level_time("all_reduce", "ring", 1e7 / 8, 4, 4e-4, 1e9)
        + one_level_time("all_gather", "ring", 1e7, 8, 3e-5, 3e10)
    )


def test_what_no_form_says_is_shared_out_among_the_sizes() -> None:
    """1.2 times as slow from 1 MB on: no size is further off than that."""

    def seconds(size: int) -> float:
        form = one_level_time("all_gather", "ring", size, 4, 1e-4, 1e9)
        return form * (1.2 if size > 1 << 20 else 1)

    rows = [row("all_gather", size, (4, 1), seconds(size)) for size in SIZES]
    fitted = fit(rows, TWO)
    off = [collective_time("all_gather", r.size, r.spread, fitted) / r.seconds for r in rows]
    assert 1 / 1.2 < min(off) < 1 < max(off) < 1.2


@pytest.mark.parametrize("sizes", [[1 << 20], [1 << 12, 1 << 24]])
def test_one_size_or_two_are_given_back(sizes: list[int]) -> None:
    """As no form of positive latency and bandwidth would give them back by least squares."""
    rows = [row("all_reduce", size, (8, 1), 3.455e-4 * (size / (1 << 20) + 1)) for size in sizes]
    fitted = fit(rows, TWO)
    for each in rows:
        told = collective_time("all_reduce", each.size, each.spread, fitted)
        assert told == pytest.approx(each.seconds, rel=1e-9)


def test_a_fitted_cluster_is_a_file_that_find_cluster_reads(tmp_path: Path) -> None:
    rows = truth("all_reduce", "ring", 0, 5e-5, 2e9, (2, 8)) + truth(
        "all_reduce", "ring", 1, 5e-4, 1e9, (2,)
    )
    fitted = fit([replace(one, seconds=one.seconds * 1.1) for one in rows], TWO)
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(fitted.to_dict()))
    again = find_cluster(str(path))
    assert again.to_dict() == fitted.to_dict()
    assert len(again.fits) == 2
    for size in (1e3, 1e5, 1e8):
        assert collective_time("all_reduce", size, (4, 1), again) == pytest.approx(
            collective_time("all_reduce", size, (4, 1), fitted), rel=1e-4
        )


GOOD = {
    "collective": "all_reduce", "level": "node", "algorithm": "ring", "latency_us": 1.0,
    "gb_per_s": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"latency_us": 0}, r"fits\[0\].latency_us=0: expected a number above 0"),
        ({"rest": [1]}, r"fits\[0\].rest=\[1\]: expected ranks: \{bytes: factor\}"),
        ({"rest": {2: {1024: -1.0}}}, r"fits\[0\].rest.2.1024=-1.0: expected a number above 0"),
        ({"collective": "all_sum"}, "collective 'all_sum': expected one of all_reduce, all_gather"),
        ({"algorithm": "star"}, r"fits\[0\].algorithm='star': all_reduce has ring, tree"),
        ({"level": "rack"}, "level 'rack': cluster 'one' has node"),
        ({"speed": 1}, r"speed: unknown key, expected some of collective, level"),
    ],
)
def test_what_a_file_can_have_wrong_is_named(change: dict[str, object], words: str) -> None:
    config = {**replace(TWO, name="one", levels=(Level("node", 8, 1e9, 1e-6),)).to_dict()}
    assert Cluster.from_dict({**config, "fits": [GOOD]}).fits == (Fit.from_dict("", GOOD),)
    earlier = {**GOOD, "rest": {2: {1024: 1.0}}}  # of files until 0.2
    assert Cluster.from_dict({**config, "fits": [earlier]}).fits == (Fit.from_dict("", GOOD),)
    with pytest.raises(SpecError, match=words):
        Cluster.from_dict({**config, "fits": [{**GOOD, **change}]})
    with pytest.raises(SpecError, match="fits=3: expected a list"):
        Cluster.from_dict({**config, "fits": 3})


def test_nothing_on_one_level_is_nothing_to_fit() -> None:
    with pytest.raises(SpecError, match="no measured group is within one level"):
        fit([row("all_reduce", 1024, (8, 2), 1e-3)], TWO)


def test_the_picture_has_what_was_measured_and_the_models_line() -> None:
    pytest.importorskip("matplotlib")
    from commgrid.viz.figure import drawing

    rows = truth("all_reduce", "ring", 0, 5e-5, 2e9, (2, 8))
    others = [row("all_reduce", 3 << 14, (4, 1), 1e-3, "dp")]
    fitted = fit(rows, TWO)
    with drawing():
        panel = draw_costs(rows, others, fitted).axes[0]
    assert panel.get_title(loc="left") == "all_reduce"
    dots = [
        line for line in panel.get_lines() if line.get_marker() == "o" and len(line.get_xdata())
    ]
    full = [one for one in dots if one.get_markerfacecolor() == one.get_color()]
    assert [list(one.get_xdata()) for one in full] == [list(SIZES)] * 2
    assert [list(one.get_ydata()) for one in dots if one not in full] == [[1.0]]
    lines = [line for line in panel.get_lines() if line.get_marker() == "None"]
    assert [line.get_label() for line in lines] == ["2 ranks", "4 ranks", "8 ranks"]
    size, time = lines[2].get_xdata()[-1], lines[2].get_ydata()[-1]
    assert time == pytest.approx(collective_time("all_reduce", size, (8, 1), fitted) * 1e3)


def test_a_bandwidth_that_small_sizes_do_not_tell_is_said_not_to_be_trusted() -> None:
    """Of 64 KB and 256 KB on a small machine a cluster file had 116 GB/s; 0.15 were measured."""
    rows = [row("all_reduce", size, (2, 1), 2e-3) for size in (65536, 262144)]
    (told,) = too_fast(rows, fit(rows, TWO))
    assert told.startswith("all_reduce on node: the fit's ")
    assert "at most 0.131 were measured" in told
    enough = truth("all_reduce", "ring", 0, 5e-5, 2e9, (2, 8))
    assert too_fast(enough, fit(enough, TWO)) == []
