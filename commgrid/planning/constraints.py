"""Where groups and ranks must lie: `within` and `place` of a spec, as they are written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from commgrid.errors import SpecError
from commgrid.layout.axis_names import nearest
from commgrid.planning.options import BY_HOST, OPTIONS


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
