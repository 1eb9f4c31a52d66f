"""Keys of a grid's YAML file, which are its options: arguments of `initialize`, and flags.

Sizes are a table of their own, `region.AXES`. Below the tables stand the checks of a file's
mappings: their keys, their numbers, and the options that say where groups and ranks lie.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from commgrid.errors import SpecError
from commgrid.layout.axis_names import nearest

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


def refuse_unknown(
    where: str,
    given: Iterable[object],
    known: Collection[str],
    hints: Mapping[str, str] | None = None,
) -> None:
    """Refuse keys that there are not, with the nearest one.

    Args:
        where: what they stand under with a dot, such as `device.`; "": nothing.
        given: the keys.
        known: every key that there is.
        hints: for some keys, how the error ends.

    Raises:
        SpecError: naming the key.
    """
    for key in given:
        if key not in known:
            hint = (hints or {}).get(str(key)) or nearest(str(key), known)
            raise SpecError(f"{where}{key}: unknown key, expected some of {', '.join(known)}{hint}")


def check_keys(
    where: str, given: object, keys: Sequence[str], optional: Collection[str] = ()
) -> None:
    """Refuse a mapping with unknown keys, or without needed ones.

    Args:
        where: the mapping's own key with a dot, such as `device.`; "": the whole file.
        given: as the file has it.
        keys: all of them.
        optional: those that may be absent.

    Raises:
        SpecError: naming the key.
    """
    if not isinstance(given, Mapping):
        raise SpecError(f"{where.rstrip('.') or 'config'}={given!r}: expected a mapping")
    refuse_unknown(where, given, keys)
    needed = [key for key in keys if key not in optional]
    for key in needed:
        if key not in given:
            raise SpecError(f"{where}{key}: missing; expected {', '.join(needed)}")


def named(where: str, given: Mapping[str, Any]) -> str:
    """The name of a mapping.

    Raises:
        SpecError: it is none.
    """
    if not isinstance(given["name"], str | int):
        raise SpecError(f"{where}name={given['name']!r}: expected a name")
    return str(given["name"])


_LEAST, _MOST = 1e-15, 1e15
"""Of numbers, whose products with units stay finite."""


def above_zero(where: str, given: Mapping[Any, Any], key: Any) -> float:
    """A number of a mapping.

    Raises:
        SpecError: it is none, or not above 0.
    """
    value = given[key]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and _LEAST <= value <= _MOST):
        fix = f" ({_LEAST:g} to {_MOST:g})" if is_number and value > 0 else ""
        if isinstance(value, str) and re.fullmatch(r"[\d.]+(e\d+)?", value):  # YAML 1.1's text
            fix = "; without quotes, and as 1000 or 1.0e+3, not 1e3"
        raise SpecError(f"{where}{key}={value!r}: expected a number above 0{fix}")
    return float(value)


def flag(where: str, given: Mapping[str, Any], key: str) -> bool:
    """Whether a mapping says true; False if it has no such key.

    Raises:
        SpecError: neither true nor false.
    """
    value = given.get(key, False)
    if type(value) is not bool:
        raise SpecError(f"{where}{key}={value!r}: expected true or false")
    return value


def parse_within(within: object) -> tuple[tuple[str, str], ...]:
    """Pairs of a group's name and the level that it must not leave, as `within` gives them.

    Raises:
        SpecError: no mapping of names to names.

    >>> parse_within({"tp": "node", "dp_cp": "rack"})
    (('tp', 'node'), ('dp_cp', 'rack'))
    """
    if within is None:
        return ()
    if not isinstance(within, Mapping):
        raise SpecError(
            f"within={within!r}: expected a mapping of groups to levels, such as {{tp: node}}"
        )
    return tuple(
        (str(name), check_level(f"within.{name}", level)) for name, level in within.items()
    )


def check_level(key: str, level: object) -> str:
    """The name of a level, which a cluster gives meaning.

    Raises:
        SpecError: it is no name.
    """
    if not isinstance(level, str) or not level.isidentifier():
        raise SpecError(f"{key}={level!r}: expected the name of a level, such as node")
    return level


def check_place(place: object, ranks: range | Sequence[int] | None) -> None:
    """That `place` is one of its choices, and does not contradict the order of `ranks`.

    Raises:
        SpecError: it is none, or ranks are listed in an order that it would change.
    """
    words = OPTIONS["place"].words
    if place not in words:
        raise SpecError(
            f"place={place!r}: expected {' or '.join(words)}{nearest(str(place), words)}"
        )
    rises = isinstance(ranks, range) or ranks is None or list(ranks) == sorted(ranks)
    if place == BY_HOST and not rises:
        raise SpecError(
            "place='by_host' beside ranks that do not rise: both say the order of the grid's "
            "ranks; sort ranks, or leave place out"
        )


def order_by_host(ranks: Iterable[int], hosts: Mapping[int, object]) -> list[int]:
    """Ranks host after host: hosts as they first appear, the ranks of each as they were.

    >>> order_by_host([0, 1, 2, 3], {0: "b", 1: "a", 2: "b", 3: "a"})
    [0, 2, 1, 3]
    """
    found: dict[object, list[int]] = {}
    for rank in ranks:
        found.setdefault(hosts[rank], []).append(rank)
    return [rank for held in found.values() for rank in held]
