"""Documents that the ranks of an agreement show each other, at the store.

The first one shown in a place is the reference. A rank with another one leaves it under a number,
and marks itself among the holders of that number, so that a comparison reads a few keys at any
number of ranks.

    BASE/doc/0      the reference      BASE/doc/<n>, BASE/holders/<n>   another document
"""

from __future__ import annotations

from collections.abc import Sequence

from commgrid.rendezvous.arrival_bitmap import arrive, arrived, counters
from commgrid.rendezvous.op import Cas, Drop, Get, Protocol
from commgrid.rendezvous.round import drop

MOST_PHASES = 4
"""Phases of one agreement, comparing included, at most."""
MOST_DOCUMENTS = 8
"""Distinct documents beside the reference; further ones are counted together."""

Holders = list[tuple[str, list[int]]]
"""Documents and the ranks that hold each; "" for all documents that are counted together."""


def show(base: str, me: int, text: str) -> Protocol[tuple[str, int]]:
    """Leave a rank's document; return the reference, and the number of this rank's."""
    mine, reference = text.encode(), ""
    for kind in range(MOST_DOCUMENTS + 1):
        stands = yield Cas(f"{base}/doc/{kind}", b"", mine)
        reference = reference or stands.decode()
        if stands == mine:
            break
    else:
        kind = MOST_DOCUMENTS + 1
    if kind:
        yield from arrive(f"{base}/holders/{kind}", me, ())
    return reference, kind


def shown(base: str) -> Protocol[list[str]]:
    """Return all documents that ranks have shown, the reference first."""
    found = yield Get(tuple(f"{base}/doc/{kind}" for kind in range(MOST_DOCUMENTS + 1)))
    return [text.decode() for text in found if text is not None]


def holders_of(base: str, documents: Sequence[str], here: Sequence[int]) -> Protocol[Holders]:
    """Return each document with its holders among the ranks that are here."""
    found: Holders = []
    for kind, text in enumerate([*documents, ""] if len(documents) > 1 else ()):
        if kind:
            kind = kind if text else MOST_DOCUMENTS + 1
            holding = yield from arrived(f"{base}/holders/{kind}", here)
            found += [(text, holding)] if holding else []
    others = {rank for _, ranks in found for rank in ranks}
    rest = [rank for rank in here if rank not in others]
    return [(documents[0], rest), *found] if rest else found


def merged(holders: Holders) -> Holders:
    """Return each document once, with all ranks that hold it."""
    once: dict[str, list[int]] = {}
    for text, ranks in holders:
        once.setdefault(text, []).extend(ranks)
    return list(once.items())


def drop_agreement(
    base: str, ranks: Sequence[int], everything: bool = True, decisions: bool = True
) -> Protocol[None]:
    """Delete the keys of an agreement.

    Args:
        everything: also counters, as after a failure.
        decisions: False: a late rank still finds them.
    """
    kinds, marked = range(MOST_DOCUMENTS + 2), ranks if everything else ()
    yield Drop((
        *(f"{base}/doc/{kind}" for kind in kinds),
        *(key for kind in kinds if marked for key in counters(f"{base}/holders/{kind}", marked)),
        f"{base}/complete", f"{base}/gone", *counters(f"{base}/left", ranks),
    ))  # fmt: skip
    for place in (*(f"{base}/phase {phase}" for phase in range(MOST_PHASES)), f"{base}/lost"):
        yield from drop(place, marked, decisions)
        if everything:
            yield Drop(tuple(counters(f"{place}/gave up", ranks)))
