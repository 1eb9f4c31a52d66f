"""The best grids for a model, each a bar of its step's parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commgrid.planning.step_cost import PARTS
from commgrid.planning.tune_words import NAMES
from commgrid.viz.figure import INK, colour, new_figure
from commgrid.viz.json_lines import filled, read_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BAR = 0.62
_SHADES = dict(zip(PARTS, (5, 7, 0, 2, 4, 3, 1, 8), strict=True))


@dataclass(frozen=True)
class Step:
    """A step on one grid.

    Args:
        grid: its sizes, such as `tp 8 · pp 4 · dp 32`.
        seconds: of the step.
        parts: seconds of each part.
        memory: bytes that a rank needs.
    """

    grid: str
    seconds: float
    parts: Mapping[str, float]
    memory: float


@dataclass(frozen=True)
class Steps:
    """Grids for a model, the best first.

    Args:
        title: model, devices and cluster.
        steps: of the grids.
    """

    title: str
    steps: tuple[Step, ...]


def read_steps(path: Path) -> Steps:
    """What `commgrid plan --auto --json` printed, or `plan --model` of one grid.

    Raises:
        SpecError: a file that is not there, or is something else.
    """
    return read_json(
        path, "what `commgrid plan --auto --model … --cluster … --json` prints", _steps
    )


def _steps(found: Mapping[str, Any]) -> Steps:
    rows = filled(found["best"]) if "best" in found else [found["step"]]
    devices, cluster = int(found["world_size"]), found["cluster"]["name"]
    title = f"{found['model']['name']} on {devices:,} devices of {cluster}"
    return Steps(title, tuple(_step(row) for row in rows))


def _step(row: Mapping[str, Any]) -> Step:
    sizes = [f"{axis} {size}" for axis, size in row["axes"].items() if size > 1]
    parts = {part: float(row["parts_s"][part]) for part in PARTS}
    return Step(" · ".join(sizes) or "1 device", float(row["step_s"]), parts, row["total_gb"] * 1e9)


def as_text(steps: Steps) -> str:
    """A line for each grid: its time, and the parts that are a hundredth of it or more."""
    width = max(len(step.grid) for step in steps.steps)
    lines = [steps.title, ""]
    for step in steps.steps:
        parts = [
            f"{NAMES[part]} {seconds / step.seconds:.0%}"
            for part, seconds in step.parts.items()
            if seconds >= 0.01 * step.seconds
        ]
        lines.append(f"  {step.grid:{width}}  {step.seconds:8.3g} s  {', '.join(parts)}")
    return "\n".join(lines)


def draw_steps(steps: Steps) -> Figure:
    """A bar for each grid, its parts side by side, the time and the memory behind it."""
    rows: Sequence[Step] = steps.steps
    figure = new_figure(8.4, 0.42 * len(rows) + 1.7)
    axes = figure.subplots()
    longest = max(step.seconds for step in rows)
    shown = [part for part in PARTS if any(s.parts[part] > 1e-3 * longest for s in rows)]
    starts = [0.0] * len(rows)
    for part in shown:
        widths = [step.parts[part] for step in rows]
        axes.barh(
            range(len(rows)), widths, _BAR, left=starts, color=colour(_SHADES[part]),
            label=NAMES[part],
        )  # fmt: skip
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for place, step in enumerate(rows):
        said = f"{step.seconds:.3g} s, {step.memory / 1e9:.0f} GB"
        axes.annotate(
            said, (starts[place], place), xytext=(4, 0), textcoords="offset points", va="center",
            color=INK,
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), [step.grid for step in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, longest * 1.22)
    axes.set_xlabel("seconds of a step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(left=False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    axes.set_title(steps.title, loc="left")
    return figure
