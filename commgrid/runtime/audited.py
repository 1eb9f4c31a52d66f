"""The sizes of the grid that an audit uses instead of the program's own."""

from __future__ import annotations

import os
from typing import Any

from commgrid.observe.audit.grids import VARIABLE, parse_sizes, sizes_over


def audited_grid() -> dict[str, int] | None:
    """The sizes that `COMMGRID_AUDIT` holds; None: no audit runs.

    Raises:
        SpecError: it holds something else.
    """
    text = os.environ.get(VARIABLE, "")
    return parse_sizes(text, f"{VARIABLE}={text!r}") if text else None


def audit_sizes(**given: Any) -> dict[str, Any]:
    """Sizes of a grid, as a program has them from its flags, or as an audit has them while it runs.

    `initialize` asks by itself; a program asks that computes with sizes before, such as how many
    sequences a rank takes.

    Args:
        **given: by axis, as `initialize` takes them.

    Returns:
        What was given, where no audit runs; else the audited grid's: 1 where it does not name an
        axis, None where None was given.

    Raises:
        SpecError: `COMMGRID_AUDIT` is no list of sizes.

    Example:
        >>> audit_sizes(tp=2, dp=-1)
        {'tp': 2, 'dp': -1}
    """
    audited = audited_grid()
    return dict(given) if audited is None else sizes_over(audited, given)
