"""Names that may mean other parameters on other ranks or grids, which are not compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from commgrid.audit.records import About

_ADVICE = "make both parts of one nn.Module, with the names of the whole model"


def ambiguous(reference: Sequence[About], other: Sequence[About]) -> dict[str, str]:
    """Names that are not one parameter's, and the reason of each.

    Args:
        reference, other: every rank's description of itself.

    Example:
        >>> one = About(parameters={"weight": ([3, 4], "dense")}, twice=[""])
        >>> list(ambiguous([one], [one]))
        ['weight']
    """
    found: dict[str, str] = {}
    twice = {name for each in (*reference, *other) for name in each.twice}
    for name, shapes in _shapes((*reference, *other)).items():
        if name.rpartition(".")[0] in twice:
            found[name] = f"{name} is not compared: two modules have one; {_ADVICE}"
        elif len(shapes) > 1:
            said = " and ".join(str(list(shape)) for shape in sorted(shapes))
            found[name] = f"{name} is not compared: it has the shapes {said} among ranks; {_ADVICE}"
    return found


def lacking(reference: Sequence[About], other: Sequence[About]) -> list[str]:
    """Names that no rank of one of two grids has, unless that grid's notes say why."""
    one, two = _shapes(reference), _shapes(other)
    noted = {note.partition(" ")[0] for each in (*reference, *other) for note in each.notes}
    return sorted((one.keys() ^ two.keys()) - noted)


def _shapes(about: Iterable[About]) -> dict[str, set[tuple[int, ...]]]:
    found: dict[str, set[tuple[int, ...]]] = {}
    for each in about:
        for name, (shape, *_) in each.parameters.items():
            found.setdefault(name, set()).add(tuple(shape))
    return found
