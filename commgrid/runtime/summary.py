"""The short table of a grid's axes that it prints in a terminal or a notebook."""

from __future__ import annotations

from html import escape

from commgrid.planning.region import Region
from commgrid.runtime.live_groups import LiveGroups
from commgrid.wording import around, several

_GROUPS = 12  # that a notebook's table shows


def as_text(grid: LiveGroups) -> str:
    """The grid in a few lines: sizes and this rank's coordinate by region, and what it holds."""
    lines = [repr(grid)]
    for region in grid.spec.regions:
        table = _columns(grid, region)
        heads = (region.name, "", "") if len(grid.spec.regions) > 1 else ("", "", "")
        indent = max(len(other.name) for other in grid.spec.regions) + 2 if heads[0] else 0
        widths = [max(map(len, column)) for column in table]
        for head, cells in zip(heads, zip(*table, strict=True), strict=True):
            first, *rest = cells
            row = [f"{first:{widths[0]}}"]
            row += [f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True)]
            lines.append(f"  {head:{indent}}{'  '.join(row)}")
    return "\n".join([*lines, f"  {_held(grid)}"])


def as_html(grid: LiveGroups) -> str:
    """The same as HTML, with the ranks of this rank's groups."""
    parts = [f"<p><code>{escape(repr(grid))}</code></p>"]
    for region in grid.spec.regions:
        rows = [
            "<tr>" + "".join(f"<th scope='row'>{escape(c)}</th>" for c in cells[:1])
            + "".join(f"<td>{escape(c)}</td>" for c in cells[1:]) + "</tr>"
            for cells in zip(*_columns(grid, region), strict=True)
        ]  # fmt: skip
        parts.append(f"<table><caption>{escape(region.name)}</caption>{''.join(rows)}</table>")
    larger = [c for c in grid.communicators if len(c.planned.members) > 1]
    rows = [
        f"<tr><td>{escape(', '.join(c.names))}</td>"
        f"<td>{escape(around(c.planned.members, grid.rank))}</td></tr>"
        for c in larger[:_GROUPS]
    ]
    if len(larger) > _GROUPS:
        rows.append(f"<tr><td>… and {len(larger) - _GROUPS} more</td><td></td></tr>")
    if rows:
        head = "<tr><th scope='col'>group</th><th scope='col'>ranks, this one in []</th></tr>"
        parts.append(f"<table>{head}{''.join(rows)}</table>")
    return f"<div>{''.join(parts)}<p>{escape(_held(grid))}</p></div>"


def _columns(grid: LiveGroups, region: Region) -> list[tuple[str, str, str]]:
    """Return the table's columns: axis, its size, and this rank's index."""
    heads = [("axis", "size", f"rank {grid.rank}")]
    return heads + [
        (axis, f"{size:,}", f"{grid.coordinate[axis]:,}") for axis, size in region.numbers
    ]


def _held(grid: LiveGroups) -> str:
    """Return the number of this rank's communicators, and their states, in words."""
    ranks = several(grid.world_size, "rank")
    if grid.is_destroyed:
        return f"{ranks}; destroyed, holds no communicator"
    held = grid.communicators
    names = sum(len(each.names) for each in held)
    try:
        connected = sum(each.connected for each in held)
        over = " and ".join(sorted({each.backend for each in held}))
    except (KeyError, RuntimeError):  # what torch says of groups it no longer has
        return f"{ranks}; its communicators are gone, torch.distributed was shut down under it"
    resting = sum(each.suspended for each in held)
    suspended = f", {resting} suspended" if resting else ""
    adopted = ", adopted" if any(each.adopted for each in held) else ""
    return (
        f"{ranks}; this one holds {several(len(held), 'communicator')} for "
        f"{several(names, 'name')}, {connected} connected{suspended}{adopted}, over {over}"
    )
