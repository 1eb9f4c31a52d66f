"""Parts of a group of every size, made before training by rows of the groups table.

    cp = 6    cp    0 1 2 3 4 5       cp_3  0 1 2 | 3 4 5
              cp_2  0 1 | 2 3 | 4 5   cp_1  0 | 1 | 2 | 3 | 4 | 5

A size that does not divide the group leaves its last ranks out: with 4 of 6, ranks 4 and 5 work on
something else meanwhile.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from commgrid.errors import SpecError


@dataclass(frozen=True)
class Part:
    """One group that documents can be given to.

    Args:
        name: of the group, as a grid knows it.
        members: its ranks as positions in the group that was parted, ascending.
    """

    name: str
    members: tuple[int, ...]

    def __str__(self) -> str:
        first, last = self.members[0], self.members[-1]
        return f"{self.name}[{first}]" if first == last else f"{self.name}[{first}-{last}]"


@dataclass(frozen=True)
class LengthGroups:
    """A group, and the parts of it that a batch's documents can be given to.

    Args:
        size: how many ranks the group has.
        sizes: how many ranks parts may have; empty: every divisor of `size`. The whole group is
            always one of them.
        of: the group's name: `cp`, or one of more axes such as `dp_cp`.

    Raises:
        SpecError: a size that is below 1 or above the group's.

    Example:
        >>> LengthGroups(8).sizes
        (1, 2, 4, 8)
        >>> [str(part) for part in LengthGroups(6).parts(3)]
        ['cp_3[0-2]', 'cp_3[3-5]']
        >>> LengthGroups(4, of="dp_cp").rows()["dp_cp_2"]
        {'of': 'dp_cp', 'split': {'_': 2, 'dp_cp_2': 2}}
    """

    size: int
    sizes: tuple[int, ...] = ()
    of: str = "cp"

    def __init__(self, size: int, sizes: Sequence[int] = (), of: str = "cp") -> None:
        size = operator.index(size)
        if size < 1:
            raise SpecError(f"size={size}: expected the number of ranks of {of!r}, 1 or more")
        wanted = {operator.index(part) for part in sizes}
        for part in sorted(wanted):
            if not 1 <= part <= size:
                raise SpecError(
                    f"sizes has {part}: expected 1 to {size}, as many as {of!r} has ranks"
                )
        if not wanted:
            wanted = {part for part in range(1, size + 1) if size % part == 0}
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "sizes", tuple(sorted(wanted | {size})))
        object.__setattr__(self, "of", of)

    def parts(self, size: int) -> tuple[Part, ...]:
        """The groups of one size, side by side; no two have a rank in common.

        Raises:
            SpecError: a size that is not one of `sizes`.
        """
        if size not in self.sizes:
            raise SpecError(f"{self.of!r} has no parts of {size} ranks, only of {self.sizes}")
        if size == self.size:
            return (Part(self.of, tuple(range(size))),)
        name, count = f"{self.of}_{size}", self.size // size
        divides = self.size % size == 0
        return tuple(
            Part(name if divides else f"{name}_{i}", tuple(range(i * size, (i + 1) * size)))
            for i in range(count)
        )

    def rows(self, **options: Any) -> dict[str, dict[str, Any]]:
        """Rows of the groups table that make every part when the grid is made.

        Parts of a size that divides the group share a name, as every group does whose ranks it
        parts; the others have a name each.

        Args:
            options: for every row, such as `timeout=600`.

        Example:
            >>> for name, row in LengthGroups(6, sizes=[2, 4]).rows().items():
            ...     print(f"{name}: {row}")
            cp_2: {'of': 'cp', 'split': {'_': 3, 'cp_2': 2}}
            cp_4_0: {'of': 'cp', 'pick': [0, 1, 2, 3]}
        """
        made: dict[str, dict[str, Any]] = {}
        for size in self.sizes[:-1]:
            for part in self.parts(size):
                if self.size % size == 0:
                    row: dict[str, Any] = {"split": {"_": self.size // size, part.name: size}}
                else:
                    row = {"pick": list(part.members)}
                made[part.name] = {"of": self.of, **row, **options}
        return made
