"""The options of a grid: keys of its file, arguments of `initialize`, and flags of commands.

Sizes are a table of their own, `region.AXES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

BY_RANK, BY_HOST = "by_rank", "by_host"


class Option(NamedTuple):
    """One of them.

    Args:
        default: where it is not given.
        about: what it says, in a line.
        words: that it may be.
        value: what else it may be, as the pages name it.
        metavar: of its flag; "": it has none.
    """

    default: Any
    about: str
    words: tuple[str, ...] = ()
    value: str = ""
    metavar: str = ""

    @property
    def shown(self) -> str:
        """The default, as pages and `--help` show it."""
        return "none" if self.default is None else str(self.default)


OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        "axes": Option(
            None, "the axes and their sizes; needed", (), "a mapping of axis names to sizes"
        ),
        "order": Option(
            "tp-cp-ep-dp-pp", "the axes, fastest-varying first", (), "axis names joined by -",
            "ORDER",
        ),
        "regions": Option(
            None, "other ways to cut the same ranks into axes", (),
            "a mapping of region names to axes and order",
        ),
        "create": Option(
            "all", "the names that have communicators", ("all",), "a list of group names", "NAMES"
        ),
        "connect": Option(
            "axes", "which of them connect at start; the others do at first use",
            ("axes", "all", "none"), "a list of group names", "NAMES",
        ),
        "share": Option(
            "aliases", "which names with equal ranks are one communicator",
            ("aliases", "region", "all"), "", "WHICH",
        ),
        "groups": Option(
            None, "further names, and options of communicators", (), "a mapping of group names"
        ),
        "ranks": Option(
            None, "the global ranks in the grid's order; none: all", (),
            "0,1,2,4 or 0-3,6 or 0-14/2 (every second); in YAML also a list", "LIST",
        ),
        "within": Option(
            None, "groups that may not leave a node or another level", (),
            "a mapping of group names to levels", "NAME=LEVEL",
        ),
        "place": Option(
            BY_RANK, "how ranks come to their places: by their numbers, or those of one host "
            "together", (BY_RANK, BY_HOST), "", "HOW",
        ),
    }
)  # fmt: skip
"""By key, in the order of a file."""
REGION_OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        "axes": Option(
            None, "its axes and their sizes; needed", (),
            "a mapping of axis names to sizes, or to a dense axis, whose size they then have",
        ),
        "order": Option("as listed", "its axes, fastest-varying first", (), "as `order`"),
    }
)  # fmt: skip
"""Of a region."""
ROW_OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        "of": Option(
            None, "the group it is made of; none: the row sets options of the group of its name",
            (), "the name of a combination of axes, or of another row",
        ),
        "own": Option("false", "a communicator of its own, for any share", ("true", "false")),
        "pick": Option(
            None, "some members; the others are not in it; none: all", (),
            "a list of positions in the group: integers from 0, first, last",
        ),
        "split": Option(
            None, "levels that the group is cut into, slowest first", (),
            "a mapping of part names to sizes, one of which may be -1",
        ),
        "ranks": Option(
            None, "the members of each group of this name, which no axes describe", (),
            "a list of lists of global ranks",
        ),
        "within": Option(None, "a level that no group of the name may leave", (), "as node"),
        "backend": Option(
            "the grid's", "of its communicators", (), "as torch's new_group takes it: nccl, gloo, …"
        ),
        "timeout": Option("the grid's", "of its collectives", (), "seconds, above 0"),
        "nccl": Option("NCCL's own", "options of NCCL", (), "a mapping of them"),
    }
)  # fmt: skip
"""Of a row of `groups`."""
DEFAULT_ORDER: str = OPTIONS["order"].default
DEFAULT_SHARE: str = OPTIONS["share"].default
