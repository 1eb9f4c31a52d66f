"""Audited grids: as they are typed, what a program asks for on one, and the sizes it then gets."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from commgrid.errors import SpecError
from commgrid.planning.region import OF_EXPERTS, SIZED
from commgrid.planning.spec import GridSpec

VARIABLE = "COMMGRID_AUDIT"
"""The environment's, which holds a grid's sizes while an audit runs."""


@dataclass(frozen=True)
class AuditedGrid:
    """One grid of an audit.

    Args:
        text: as typed.
        sizes: of the axes that it names; all others are 1.
        flags: further flags of the program on this grid.
        world_size: ranks.
    """

    text: str
    sizes: Mapping[str, int]
    flags: tuple[str, ...]
    world_size: int

    @property
    def variable(self) -> str:
        """What `COMMGRID_AUDIT` is set to."""
        return ",".join(f"{axis}={size}" for axis, size in self.sizes.items())

    @classmethod
    def parse(cls, text: str, world_size: int | None = None) -> AuditedGrid:
        """A grid from sizes, and after them the program's own flags.

        Args:
            text: such as `tp=2 pp=2`, `tp=2,pp=2` or `tp=2 --sequence-parallel`.
            world_size: how many ranks it has; dp is then what the others leave, unless it is given.

        Raises:
            SpecError: what is wrong with it.

        Example:
            >>> grid = AuditedGrid.parse("tp=2 dp=2 --sequence-parallel")
            >>> grid.world_size, grid.flags, grid.variable
            (4, ('--sequence-parallel',), 'tp=2,dp=2')
            >>> AuditedGrid.parse("tp=4 pp=2", 64).sizes
            {'tp': 4, 'pp': 2, 'dp': 8}
        """
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise SpecError(f"grid {text!r}: {error}") from error
        first_flag = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
        sizes = parse_sizes(",".join(words[:first_flag]), f"grid {text!r}")
        known = math.prod(n for axis, n in sizes.items() if axis not in OF_EXPERTS)
        if world_size is not None and not sizes.keys() & {"dp", "dp_shard"}:
            sizes["dp"] = max(world_size // known, 1)
            known *= sizes["dp"]
        if world_size not in (None, known):
            raise SpecError(f"grid {text!r}: its sizes make {known} ranks, not {world_size}")
        world_size = known
        standard: dict[str, Any] = {k: v for k, v in sizes.items() if k in SIZED}
        if len(standard) == len(sizes):  # an axis of the program's own is its program's to know
            try:
                GridSpec.build(**standard).resolve(world_size)
            except SpecError as error:
                raise SpecError(f"grid {text!r}: {error}") from error
        return cls(text, sizes, tuple(words[first_flag:]), world_size)


def parse_sizes(text: str, what: str) -> dict[str, int]:
    """Sizes from `tp=2,pp=2`.

    Args:
        text: with commas.
        what: messages begin with.

    Raises:
        SpecError: it is something else.
    """
    found: dict[str, int] = {}
    for word in text.split(","):
        axis, _, size = word.strip().partition("=")
        if not axis.isidentifier() or not size.isdecimal() or int(size) < 1:
            raise SpecError(
                f"{what}: {word.strip()!r} is no size; expected such as 'tp=2 dp=2', the program's "
                "own flags after them"
            )
        if axis in found:
            raise SpecError(f"{what}: {axis} is given twice; name it once")
        found[axis] = int(size)
    return found


def spec_over(audited: Mapping[str, int], spec: GridSpec) -> GridSpec:
    """A spec with an audit's sizes in its own place.

    Args:
        audited: of the axes that the audit's grid names.
        spec: of the program.

    Raises:
        SpecError: the grid has axes that the spec has not.
    """
    made = spec.to_dict()
    dense, regions = made["axes"], made.get("regions", {})
    known = {*dense, *(axis for region in regions.values() for axis in region["axes"])}
    for axis in audited:
        if axis not in known and audited[axis] != 1:
            raise SpecError(
                f"{VARIABLE}: the audit's grid has {axis}={audited[axis]}, but the program's "
                f"config has the axes {', '.join(dense)}; audit grids of these"
            )
    if all(size == audited.get(axis, 1) for axis, size in dense.items()):
        return spec  # the program has asked for them itself
    made["axes"] = {axis: audited.get(axis, 1) for axis in dense}
    for region in regions.values():
        region["axes"] = {
            axis: size if axis in dense else -1 if axis == "edp" else audited.get(axis, 1)
            for axis, size in region["axes"].items()
        }
        if "etp" in region["axes"] and "etp" not in audited:
            region["axes"]["etp"] = 1
    return GridSpec.from_dict(made)


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
    if audited is None:
        return given
    found: dict[str, Any] = {}
    for axis, size in given.items():
        found[axis] = audited.get(axis, None if size is None else 1)
        if axis == "etp" and axis not in audited and size not in (None, 1):
            found[axis] = audited.get("tp", 1)  # which it follows
    return found
