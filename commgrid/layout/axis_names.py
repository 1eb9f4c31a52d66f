"""How groups are spelled: axis names joined by `_`, in any order, always meaning one thing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

from commgrid.errors import SpecError

Words = Mapping[str, tuple[str, ...]]
"""Words of group names, each with its axes: an axis, or `dp` for its parts."""


def canonical(axes: Iterable[str], order: tuple[str, ...]) -> str:
    """The name that lists `axes` slowest-varying first.

    >>> canonical({"cp", "dp"}, order=("tp", "cp", "dp", "pp"))
    'dp_cp'
    """
    return "_".join(sorted(axes, key=order.index, reverse=True))


def sizes_text(sizes: Mapping[str, int]) -> str:
    """Sizes above 1 in words; empty if there are none.

    >>> sizes_text({"tp": 8, "cp": 1, "dp": 4})
    'tp 8 · dp 4'
    """
    return " · ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)


def parse(name: str, words: Words) -> frozenset[str] | None:
    """The axes a name spells, or None if it spells none.

    >>> sorted(parse("cp_dp_shard", {a: (a,) for a in ("cp", "dp_shard", "dp_replicate")}))
    ['cp', 'dp_shard']
    """
    return next(iter(_readings(tuple(name.split("_")), words, frozenset())), None)


def _readings(
    tokens: tuple[str, ...], words: Words, used: frozenset[str]
) -> Iterator[frozenset[str]]:
    if not tokens:
        yield used
    for word, axes in words.items():
        spelled = tuple(word.split("_"))
        if tokens[: len(spelled)] == spelled and used.isdisjoint(axes):
            yield from _readings(tokens[len(spelled) :], words, used | set(axes))


@lru_cache(maxsize=256)
def ambiguity(
    words: tuple[tuple[str, tuple[str, ...]], ...],
) -> tuple[str, frozenset[str], frozenset[str]] | None:
    """A name that spells two different sets of axes, if there is one.

    Grows two spellings side by side, always the shorter one, until they meet; only
    words that contain an underscore can ever make them meet.

    >>> ambiguity((("a", ("a",)), ("b", ("b",)), ("a_b", ("a_b",))))[0]
    'a_b'
    """
    spelled = {word: tuple(word.split("_")) for word, _ in words}
    State = tuple[tuple[str, ...], tuple[str, ...], frozenset[str], frozenset[str]]
    start: State = ((), (), frozenset(), frozenset())
    stack = [start]
    while stack:
        shorter, longer, used, other = stack.pop()
        if shorter and shorter == longer:
            if used != other:
                return "_".join(shorter), used, other
            continue
        for word, axes in words:
            grown = shorter + spelled[word]
            common = min(len(grown), len(longer))
            if grown[:common] != longer[:common] or not used.isdisjoint(axes):
                continue
            now = used | set(axes)
            first, second = sorted([(grown, now), (longer, other)], key=lambda side: len(side[0]))
            stack.append((first[0], second[0], first[1], second[1]))
    return None


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the known word most like this one, else nothing."""
    import difflib  # slow to load, and only errors need it

    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def check_word(what: str, word: str, known: Iterable[str]) -> None:
    """Refuse a word that is none of those known.

    Args:
        what: the word's argument, such as `schedule=`.

    Raises:
        SpecError: names them, and the one most like it.
    """
    if word not in known:
        words = ", ".join(known)
        raise SpecError(f"{what}{word!r}: expected one of {words}{nearest(str(word), known)}")
