"""A pipeline's schedule drawn: stages by time, and beside it what a run measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from commgrid.errors import SpecError
from commgrid.pipeline_schedules.schedule import Computation, Schedule
from commgrid.pipeline_schedules.simulator import Simulation, Span
from commgrid.viz.figure import colour, ink_on, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_KINDS = {
    "F": ("forward", colour(0)),
    "B": ("backward", colour(1)),
    "I": ("gradient of inputs", colour(1)),
    "W": ("gradient of weights", colour(2)),
}
_NUMBERED = 400  # above so many actions bars carry no numbers
_CHUNK_FADES = 0.22  # how much lighter each further chunk of a stage is


def draw_schedule(
    simulation: Simulation, measured: Mapping[Computation, Span] | None = None
) -> Figure:
    """Stages by time: forward, backward and its parts; idle time is shaded.

    Args:
        simulation: of the schedule.
        measured: spans of a run of the same schedule, in seconds, drawn below.

    Raises:
        SpecError: the run has actions that the schedule has not, or too few.
    """
    schedule = simulation.schedule
    rows = 1 if measured is None else 2
    width = min(max(6.4, simulation.makespan / 6), 11.0)
    figure = new_figure(width, rows * (0.9 + 0.34 * schedule.num_stages) + 0.5)
    panels = list(figure.subplots(rows, 1, squeeze=False).flat)
    live = max(simulation.peak_live)
    most = f"{live} live microbatch{'es' if live > 1 else ''} a stage"
    title = f"{schedule.name}: {_bubble(simulation)}, at most {most}"
    _panel(panels[0], schedule, simulation.spans, title, "time, in forwards of a chunk")
    if measured is not None:
        _check(schedule, measured)
        begin = min(start for start, _ in measured.values())
        spans = {a: (start - begin, end - begin) for a, (start, end) in measured.items()}
        run = Simulation(schedule, spans, simulation.peak_live)
        title = f"as it ran: {_bubble(run)}"
        _panel(panels[1], schedule, spans, title, "seconds")
    _legend(figure, schedule)
    return figure


def _bubble(simulation: Simulation) -> str:
    return f"{simulation.bubble_fraction * 100:.3g} % bubble"


def _check(schedule: Schedule, measured: Mapping[Computation, Span]) -> None:
    planned = {action for order in schedule.orders for action in order}
    for wrong, what in ((planned - measured.keys(), "lack"), (measured.keys() - planned, "have")):
        if wrong:
            action = min(wrong, key=str)
            raise SpecError(
                f"the measured spans {what} {action} of stage {action.stage}, unlike {schedule}; "
                "are they of another schedule, or of fewer stages?"
            )


def _panel(
    axes: Axes, schedule: Schedule, spans: Mapping[Computation, Span], title: str, unit: str
) -> None:
    end = max(last for _, last in spans.values())
    numbered = len(spans) <= _NUMBERED
    axes.set_title(title, fontsize=9.5, loc="left")
    axes.set_xlim(0, end)
    axes.set_ylim(schedule.num_stages - 0.5, -0.5)
    axes.set_yticks(range(schedule.num_stages), [f"stage {s}" for s in range(schedule.num_stages)])
    axes.set_xlabel(unit)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    for stage, order in enumerate(schedule.orders):
        idle = axes.barh(stage, end, height=0.78, color="#eceff2", hatch="////", linewidth=0)
        idle[0].set_edgecolor("#c9cfd6")
        for action in order:
            _bar(axes, stage, action, spans[action], numbered)


def _bar(axes: Axes, stage: int, action: Computation, span: Span, numbered: bool) -> None:
    start, end = span
    face = _lighter(_KINDS[action.letter][1], action.chunk * _CHUNK_FADES)
    axes.barh(
        stage, end - start, left=start, height=0.78, color=face, edgecolor="white", linewidth=0.6
    )
    if numbered:
        axes.text(
            (start + end) / 2, stage, str(action.microbatch),
            ha="center", va="center", fontsize=7, color=ink_on(face), clip_on=True,
        )  # fmt: skip


def _lighter(face: str, share: float) -> str:
    parts = (int(face[i : i + 2], 16) for i in (1, 3, 5))
    share = min(share, 0.75)
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def _legend(figure: Figure, schedule: Schedule) -> None:
    from matplotlib.patches import Patch

    letters = dict.fromkeys(action.letter for order in schedule.orders for action in order)
    handles = [Patch(color=_KINDS[letter][1], label=_KINDS[letter][0]) for letter in letters]
    handles.append(Patch(facecolor="#eceff2", hatch="////", edgecolor="#c9cfd6", label="bubble"))
    if schedule.num_chunks > 1:
        handles.append(Patch(color="none", label="lighter: further chunks"))
    figure.legend(
        handles=handles, ncols=len(handles), loc="outside lower center", frameon=False, fontsize=8
    )
