"""Loss curves of several runs on one plot, from the files that `--metrics` writes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from commgrid.errors import SpecError
from commgrid.viz.figure import colour, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Curve:
    """A run's loss by step.

    Args:
        name: what the legend calls it.
        steps: rising.
        losses: one a step.
    """

    name: str
    steps: tuple[int, ...]
    losses: tuple[float, ...]


def read_curves(paths: Sequence[Path]) -> list[Curve]:
    """The losses of metrics files, by the shortest ends of their paths that tell them apart.

    Raises:
        SpecError: a file that is not there, has no losses, or is given twice.
    """
    names = [path.stem for path in paths]
    parents = [path.resolve().parent.parts for path in paths]
    for depth in range(1, max(map(len, parents), default=0) + 1):
        if len(set(names)) == len(names):
            break
        names = [
            "/".join((*parts[-depth:], path.stem))
            for parts, path in zip(parents, paths, strict=True)
        ]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise SpecError(f"--metrics: {twice} is given twice; give each run once")
    return [replace(read_curve(path), name=name) for path, name in zip(paths, names, strict=True)]


def read_curve(path: Path) -> Curve:
    """The losses of a metrics file: JSON lines with `step` and `loss`.

    Raises:
        SpecError: a file that is not there, or has none.
    """
    rows = []
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                row = json.loads(line)
                rows.append((int(row["step"]), float(row["loss"])))
            except (ValueError, KeyError, TypeError) as error:
                raise SpecError(
                    f"{path}, line {number}: expected as train_gpt --metrics writes it "
                    f'{{"step": 1, "loss": 5.5, …}}, got {line[:60]!r}'
                ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read: {error}") from error
    if not rows:
        raise SpecError(f"{path}: has no steps; is the run over its first one?")
    steps, losses = zip(*rows, strict=True)
    return Curve(path.stem, steps, losses)


def difference(one: Curve, other: Curve) -> float | None:
    """The largest relative difference of two runs' losses on the steps that both have.

    Infinite where a loss is not finite; None without a step in common.

    >>> difference(Curve("a", (1, 2), (4.0, 2.0)), Curve("b", (2, 3), (2.5, 1.0)))
    0.2
    """
    both = dict(zip(one.steps, one.losses, strict=True))
    found = [
        abs(both[step] - loss) / max(abs(both[step]), abs(loss), 1e-300)
        if math.isfinite(both[step]) and math.isfinite(loss)
        else math.inf
        for step, loss in zip(other.steps, other.losses, strict=True)
        if step in both
    ]
    return max(found, default=None)


def draw_curves(curves: Sequence[Curve]) -> Figure:
    """One plot; the legend says how far each curve is from the first."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(8.0, 4.4)
    axes = figure.subplots()
    for number, curve in enumerate(curves):
        label = curve.name
        if number:
            far = difference(curves[0], curve)
            same = "no step in common" if far is None else f"within {far:.1e} of {curves[0].name}"
            same = "not finite everywhere" if far == math.inf else same
            label += f" ({same})"
        axes.plot(
            curve.steps, curve.losses, _STYLES[number % len(_STYLES)], label=label,
            color=colour(5 - number), linewidth=2.0,
        )  # fmt: skip
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("loss, mean over tokens")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure
