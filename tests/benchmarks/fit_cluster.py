"""Fits a cluster file to what `commgrid bench --json` printed, and draws times beside the fit.

    torchrun --standalone --nproc-per-node 8 -m commgrid bench --tp 2 --json > bench.json
    python tests/benchmarks/fit_cluster.py bench.json -o cluster.yaml -o costs.svg

`commgrid plan --cluster cluster.yaml` then plans with it. Run it from the repository; it needs
torch.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[2]))

from commgrid.bench import Measured
from commgrid.cli.flags import file_of
from commgrid.cost_model.cluster import Cluster
from commgrid.cost_model.collective import collective_time
from commgrid.cost_model.collective_form import KINDS, Fit, one_level_time
from commgrid.errors import CommGridError, SpecError
from commgrid.viz.figure import INK, PAPER, SUFFIXES, colour, drawing, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def fit(rows: Iterable[Measured], cluster: Cluster) -> Cluster:
    """The cluster with a fit for each collective on each level that was measured.

    A level's fits come from groups that lie on that level alone; the time over several follows from
    them. Each is a form of `commgrid.cost_model.collective_form`, with the latency and bandwidth
    that make the sum of squared relative errors smallest. A level's own latency and bandwidth
    become those of its all-reduce, or of the first collective that was measured.

    Args:
        rows: of groups that communicated at once, as in training.
        cluster: with the levels that the rows' spreads are of.

    Raises:
        SpecError: no row is of a group on one level alone, or one has no size or time.
    """
    sets: dict[tuple[int, str], list[Measured]] = {}
    for row in rows:
        if not (0 < row.size < math.inf and 0 < row.seconds < math.inf):
            raise SpecError(
                f"{row.collective} of {row.group}: {row.size} bytes in {row.seconds} s; expected "
                "both above 0"
            )
        crossed = [place for place, n in enumerate(row.spread) if n > 1]
        if len(crossed) == 1:
            sets.setdefault((crossed[0], row.collective), []).append(row)
    if not sets:
        raise SpecError(
            "nothing to fit: no measured group is within one level; measure more of "
            "the grid's groups, such as its axes"
        )
    fits: list[Fit] = []
    levels = list(cluster.levels)
    for place, level in enumerate(cluster.levels):
        found = [
            _fit_one(collective, level.name, measured)
            for (at, collective), measured in sets.items()
            if at == place
        ]
        fits += found
        if found:
            chosen = next((one for one in found if one.collective == "all_reduce"), found[0])
            levels[place] = replace(
                level, latency=chosen.latency, bandwidth=chosen.bandwidth, measured=True
            )
    return replace(cluster, levels=tuple(levels), fits=tuple(fits))


def too_fast(rows: Iterable[Measured], fitted: Cluster) -> list[str]:
    """Describe fits whose bandwidth the measured sizes leave open.

    If all sizes take about the same time, latency explains it, and the fitted bandwidth can be
    anything: what is planned for larger messages is then far too fast.

    Args:
        rows: that `fit` was given.
        fitted: what it made of them.
    """
    rows, told = list(rows), []
    for one in fitted.fits:
        place = fitted.find_level(one.level)
        best = max(
            row.bus_bandwidth
            for row in rows
            if row.collective == one.collective
            and [at for at, n in enumerate(row.spread) if n > 1] == [place]
        )
        if one.bandwidth > _TOO_FAST * best:
            told.append(
                f"{one.collective} on {one.level}: the fit's {one.bandwidth / 1e9:.3g} GB/s are "
                f"not to be trusted, since at most {best / 1e9:.3g} were measured and time hardly "
                "grew with size; measure larger ones with --sizes"
            )
    return told


_TOO_FAST = 10
"""How many times the best that was measured a fit's bandwidth may be."""


def _fit_one(collective: str, level: str, rows: Sequence[Measured]) -> Fit:
    """The form of the smallest error."""
    found: list[tuple[float, Fit]] = []
    for algorithm in KINDS[collective].forms:
        # A form is a sum of its latencies and its bytes, so that two calls tell its two parts.
        hops = [one_level_time(collective, algorithm, r.size, r.ranks, 1.0, math.inf) for r in rows]
        moved = [one_level_time(collective, algorithm, r.size, r.ranks, 0.0, 1.0) for r in rows]
        latency, per_byte = _two_numbers(
            [h / r.seconds for h, r in zip(hops, rows, strict=True)],
            [m / r.seconds for m, r in zip(moved, rows, strict=True)],
        )
        error = sum(
            ((h * latency + m * per_byte) / r.seconds - 1) ** 2
            for h, m, r in zip(hops, moved, rows, strict=True)
        )
        found.append((error, Fit(collective, level, algorithm, latency, 1 / per_byte)))
    return min(found, key=lambda each: round(each[0], 6))[1]  # the first of equals


def _two_numbers(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """x and y above 0 with the least squares of a·x + b·y − 1."""
    aa, bb = sum(x * x for x in a), sum(y * y for y in b)
    ab = sum(x * y for x, y in zip(a, b, strict=True))
    alone = sum(a) / aa, sum(b) / bb
    determinant = aa * bb - ab * ab
    if determinant > 1e-9 * aa * bb:
        x = (sum(a) * bb - sum(b) * ab) / determinant
        y = (sum(b) * aa - sum(a) * ab) / determinant
        if x > 0 and y > 0:
            return x, y
    # One of them explains all; a thousandth of the other keeps it above 0.
    errors = [sum((v * alone[n] - 1) ** 2 for v in values) for n, values in enumerate((a, b))]
    share = (1.0, 1e-3) if errors[0] < errors[1] else (1e-3, 1.0)
    x, y = share[0] * alone[0], share[1] * alone[1]
    both = [v * x + w * y for v, w in zip(a, b, strict=True)]
    scale = sum(both) / sum(each * each for each in both)
    return x * scale, y * scale


# -- the picture -------------------------------------------------------------------------

_SHADES = (5, 10, 2, 1, 4)
_STEPS = 64  # of a line


def draw_costs(fitted: Sequence[Measured], others: Sequence[Measured], cluster: Cluster) -> Figure:
    """A panel for each collective: time by size, a line and a colour for each number of ranks.

    Args:
        fitted: what the cluster's fits are of, as full dots.
        others: rows that were not fitted to, as rings (`cost_model.py` has some).
        cluster: whose cost model draws the lines.
    """
    collectives = list(dict.fromkeys(row.collective for row in (*fitted, *others)))
    down = -(-len(collectives) // 2)
    across = min(2, len(collectives))
    figure = new_figure(4.8 * across, 3.4 * down)
    panels = figure.subplots(down, across, squeeze=False).flatten()
    spreads = sorted({row.spread for row in (*fitted, *others)})
    for axes, collective in zip(panels, collectives, strict=False):
        axes.set_title(collective, loc="left")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for place, spread in enumerate(spreads):
            shade = colour(_SHADES[place % len(_SHADES)])
            _draw_one(axes, collective, spread, fitted, others, cluster, shade)
        axes.set_xlabel("bytes, as nccl-tests counts them")
        axes.set_ylabel("ms")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[len(collectives) :]:
        axes.set_axis_off()
    panels[0].legend(frameon=False)
    _legend(figure, bool(others))
    return figure


def _legend(figure: Figure, has_others: bool) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=INK, linewidth=1.2, label="fitted")]
    for face, label in ((INK, "measured"), (PAPER, "measured, not fitted to"))[: 1 + has_others]:
        dot = Line2D([], [], linestyle="", marker="o", color=INK, markersize=4.5, label=label)
        dot.set_markerfacecolor(face)
        handles.append(dot)
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def _draw_one(
    axes: Axes,
    collective: str,
    spread: tuple[int, ...],
    fitted: Sequence[Measured],
    others: Sequence[Measured],
    cluster: Cluster,
    shade: str,
) -> None:
    """One line, and what was measured of it."""
    sizes: list[int] = []
    for rows, inside in ((fitted, shade), (others, PAPER)):
        mine = [row for row in rows if (row.collective, row.spread) == (collective, spread)]
        sizes += [row.size for row in mine]
        axes.plot(
            [row.size for row in mine], [row.seconds * 1e3 for row in mine], "o",
            color=shade, markerfacecolor=inside, markersize=4.5,
        )  # fmt: skip
    if not sizes:
        return
    least, most = min(sizes), max(sizes)
    line = [least * (most / least) ** (step / _STEPS) for step in range(_STEPS + 1)]
    times = [collective_time(collective, size, spread, cluster) * 1e3 for size in line]
    shape = "×".join(str(n) for n in spread if n > 1)
    axes.plot(line, times, color=shade, linewidth=1.2, label=f"{shape} ranks")


# -- the command --------------------------------------------------------------------------


def read(text: str) -> tuple[list[Measured], Cluster]:
    """The rows that `commgrid bench --json` printed, and the cluster that they are of.

    Raises:
        SpecError: it is of `--alone`: a cluster is fitted to groups that communicate at once.
    """
    try:
        found: dict[str, Any] = json.loads(text)
        alone = found["alone"]
    except (ValueError, LookupError, TypeError):
        raise SpecError("expected what `commgrid bench --json` prints") from None
    if alone:
        raise SpecError("measured with --alone; a cluster is fitted to groups that communicate at "
                        "once, as in training: leave --alone out")  # fmt: skip
    rows = [
        Measured(
            row["group"], tuple(row["names"]), row["collective"], row["size"], row["count"],
            row["ranks"], row["groups"], tuple(row["spread"]), row["time_us"] / 1e6,
            row["least_us"] / 1e6, row["most_us"] / 1e6,
        )
        for row in found["rows"]
    ]  # fmt: skip
    levels = found["cluster"]["levels"]  # those of a cluster that bench found have no numbers yet
    known = [{**each, "gb_per_s": each["gb_per_s"] or 1, "latency_us": each["latency_us"] or 1}
             for each in levels]  # fmt: skip
    cluster = Cluster.from_dict({**found["cluster"], "levels": known})
    return rows, replace(
        cluster,
        levels=tuple(
            level if each["gb_per_s"] else replace(level, bandwidth=None, latency=None)
            for level, each in zip(cluster.levels, levels, strict=True)
        ),
    )


def write(path: Path, cluster: Cluster, rows: Sequence[Measured]) -> None:
    """The cluster, or a picture of it beside the rows, by the file's suffix."""
    if path.suffix in SUFFIXES:
        with drawing():
            save(draw_costs(rows, (), cluster), path)
        return
    for level in cluster.levels:
        if level.bandwidth is None:
            raise SpecError(f"no measured group is within level {level.name!r} alone; measure one, "
                            "or give numbers with bench's --cluster")  # fmt: skip
    text = yaml.safe_dump(cluster.to_dict(), sort_keys=False, default_flow_style=None, width=100)
    path.write_text(text, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="what commgrid bench --json printed")
    parser.add_argument(
        "-o", "--output", type=file_of(".yaml", ".yml", *SUFFIXES), action="append", required=True,
        metavar="FILE", help=".yaml, .svg, .png or .pdf; may be repeated",
    )  # fmt: skip
    args = parser.parse_args(argv)
    try:
        rows, cluster = read(args.file.read_text(encoding="utf-8"))
        fitted = fit(rows, cluster)
        for path in args.output:
            write(path, fitted, rows)
    except (CommGridError, OSError) as error:
        print(f"{args.file}: {error}", file=sys.stderr)
        return 2
    for line in too_fast(rows, fitted):
        print(line, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
