"""A transfer's plan drawn: source ranks by target ranks, shaded by the bytes between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commgrid.errors import SpecError
from commgrid.layout.rank_text import listed_ranks
from commgrid.resharding.traffic import VERSION, Traffic, as_table, bytes_of
from commgrid.viz.figure import ALERT, FAINT, INK, PAPER, ink_on, new_figure
from commgrid.viz.json_file import read_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Block = tuple[int, ...]
"""Ranks that one row or column stands for."""

MOST = 64  # rows, and columns
_TOLD = 12  # up to so many rows and columns the cells have their bytes in them
_LABELS = 16  # up to so many rows or columns each has its own
_SHADE = "#0072B2"


def draw_transfer(traffic: Traffic) -> Figure:
    """Draw the bytes from each sender to each receiver, and at the margins the sums of each.

    A ring is on a cell where ranks have what they need already, and copy it. Of more than 64 ranks
    a row or a column stands for several.
    """
    rows, columns = blocks_of(traffic.source_ranks), blocks_of(traffic.target_ranks)
    cell = max(0.12, min(0.62, 6.4 / max(len(rows), len(columns))))
    size = 2.9 + cell * len(columns), 2.4 + cell * len(rows)
    figure = new_figure(max(size[0], 6.4), size[1])
    (top, corner), (middle, right) = figure.subplots(
        2, 2, sharex="col", sharey="row",
        width_ratios=[max(cell * len(columns), 2.0), 1.4],
        height_ratios=[1.0, max(cell * len(rows), 1.0)],
    )  # fmt: skip
    corner.set_axis_off()
    _matrix(middle, traffic, rows, columns)
    _margin(top, right, traffic, rows, columns)
    corner.legend(*top.get_legend_handles_labels(), loc="lower left", fontsize=7, frameon=False)
    figure.suptitle(_wrapped(as_table(traffic).splitlines()[0]), fontsize=9.5, x=0.01, ha="left")
    return figure


def blocks_of(ranks: Sequence[int], most: int = MOST) -> list[Block]:
    """Ranks in blocks of neighbours, all but the last of one size.

    >>> blocks_of([0, 1, 2, 5, 6], most=2), blocks_of([3, 4])
    ([(0, 1, 2), (5, 6)], [(3,), (4,)])
    """
    size = -(-len(ranks) // most)
    return [tuple(ranks[at : at + size]) for at in range(0, len(ranks), size)]


def bytes_between(
    traffic: Traffic, rows: Sequence[Block], columns: Sequence[Block]
) -> list[list[int]]:
    """For each row and column the bytes that its senders send to its receivers."""
    row_of, column_of = _places(rows), _places(columns)
    found = [[0] * len(columns) for _ in rows]
    for (sender, receiver), size in traffic.pairs.items():
        found[row_of[sender]][column_of[receiver]] += size
    return found


def _places(blocks: Sequence[Block]) -> dict[int, int]:
    return {rank: place for place, block in enumerate(blocks) for rank in block}


def _sums(sizes: Mapping[int, int], blocks: Sequence[Block]) -> list[int]:
    return [sum(sizes.get(rank, 0) for rank in block) for block in blocks]


def _matrix(axes: Axes, traffic: Traffic, rows: Sequence[Block], columns: Sequence[Block]) -> None:
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    shades = LinearSegmentedColormap.from_list("bytes", [PAPER, _SHADE])
    sizes = bytes_between(traffic, rows, columns)
    most = max(map(max, sizes)) or 1
    edge = 0.4 if max(len(rows), len(columns)) <= MOST // 2 else 0.0
    axes.pcolormesh(sizes, cmap=shades, vmin=0, vmax=most, edgecolors=FAINT, linewidth=edge)
    if max(len(rows), len(columns)) <= _TOLD:
        for y, row in enumerate(sizes):
            for x, size in enumerate(row):
                ink = ink_on(to_hex(shades(size / most)))
                if size:
                    axes.text(
                        x + 0.5, y + 0.5, bytes_of(size), color=ink, fontsize=6.5,
                        ha="center", va="center",
                    )  # fmt: skip
    row_of, column_of = _places(rows), _places(columns)
    places = {
        (column_of[rank] + 0.5, row_of[rank] + 0.5) for rank, size in traffic.copied.items() if size
    }
    if places:
        area = max(8.0, min(200.0, 12000.0 / max(len(rows), len(columns)) ** 2))
        across, down = ([at[i] for at in sorted(places)] for i in (0, 1))
        axes.scatter(
            across,
            down,
            s=area,
            facecolors="none",
            edgecolors=ALERT,
            linewidths=0.9,
        )
    axes.set_ylim(len(rows), 0)
    axes.set_xlim(0, len(columns))
    _label(axes, rows, columns)


def _label(axes: Axes, rows: Sequence[Block], columns: Sequence[Block]) -> None:
    for blocks, axis in ((rows, axes.yaxis), (columns, axes.xaxis)):
        step = -(-len(blocks) // _LABELS)
        shown = range(0, len(blocks), step)
        names = [listed_ranks(blocks[i]) for i in shown]
        axis.set_ticks([i + 0.5 for i in shown], names)
    if any(len(block) > 1 for block in columns):
        axes.tick_params(axis="x", labelrotation=90)
    axes.set_ylabel("from rank")
    axes.set_xlabel("to rank")
    _bare(axes)


def _margin(
    top: Axes, right: Axes, traffic: Traffic, rows: Sequence[Block], columns: Sequence[Block]
) -> None:
    """Draw the sums: sent by rows, received by columns, and copied there."""
    sent, received = _sums(traffic.sent, rows), _sums(traffic.received, columns)
    copied = _sums(traffic.copied, columns)
    right.barh([y + 0.5 for y in range(len(rows))], sent, 0.8, color=INK)
    at = [x + 0.5 for x in range(len(columns))]
    top.bar(at, received, 0.8, color=INK, label="received")
    top.bar(at, copied, 0.8, bottom=received, color=FAINT, label="copied (ring)")
    right.set_xlabel(f"sent, most {bytes_of(max(sent))}")
    most = max(map(sum, zip(received, copied, strict=True)))
    top.set_ylabel(f"most\n{bytes_of(most)}", rotation=0, ha="right", va="center")
    right.set_xticks([])
    top.set_yticks([])
    for axes in (top, right):
        axes.tick_params(labelbottom=False, labelleft=False)
        _bare(axes)


def _wrapped(text: str) -> str:
    """The totals on a line of their own."""
    return text.replace(": ", ":\n", 1)


def _bare(axes: Axes) -> None:
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


# -- what it is read from ------------------------------------------------------------------


def read_traffic(path: Path) -> Traffic:
    """What `TransferPlan.save` wrote.

    Raises:
        SpecError: a file that is not there, or is something else.
    """
    expected = (
        f'what transfer.plan.save(FILE) writes, {{"version": {VERSION}, "tensors": …, '
        '"source": […], …}'
    )
    version, traffic = read_json(path, expected, lambda found: (found["version"], _traffic(found)))
    if version != VERSION:
        raise SpecError(
            f"{path}: has version {version!r}, this commgrid reads {VERSION}; save the plan again"
        )
    return traffic


def _traffic(found: Any) -> Traffic:
    source, target = (tuple(_counts(found[key])) for key in ("source", "target"))
    pairs = {(s, r): size for s, r, size in map(_counts, found["pairs"])}
    copied = {rank: size for rank, size in map(_counts, found["copied"])}  # noqa: C416
    senders, receivers = {s for s, _ in pairs}, {r for _, r in pairs}
    strange = (senders - {*source}) | ((receivers | {*copied}) - {*target})
    if not source or not target or strange:
        raise ValueError(f"ranks {sorted(strange)} are on neither side" if strange else "no ranks")
    tensors, on_one_host = _counts([found["tensors"], found["on_one_host"]])
    return Traffic(tensors, source, target, pairs, copied, on_one_host)


def _counts(values: Any) -> list[int]:
    if not isinstance(values, list) or any(type(n) is not int or n < 0 for n in values):
        raise ValueError(f"{values!r:.60} is no list of numbers from 0")
    return values
