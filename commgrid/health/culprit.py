"""Naming the ranks that did not come to a failed collective."""

from __future__ import annotations

from collections.abc import Iterable

from commgrid.layout.rank_text import describe_ranks, unpack
from commgrid.rendezvous.failure_round import Failure
from commgrid.store.driver import StoreDriver
from commgrid.torch_compat import world as torch_world


def missing_ranks(at: str, ranks: Iterable[int]) -> set[int]:
    """Return the ranks that do not report after a collective has failed.

    Every rank that came to the collective calls it; see `commgrid.rendezvous.failure_round`.

    Args:
        at: key of the call at the store, another one for each.
        ranks: who takes part.

    Returns:
        Empty if all report, or if the store is lost.
    """
    every = tuple(sorted(ranks))
    driver = StoreDriver(torch_world.world_store(), len(every))
    try:
        found = Failure(at, torch_world.world_rank(), every)
        driver.run(found.report(b""))
        absent = unpack(driver.run(found.find_out(lambda absent, words: {"text": ""}))["absent"])
        return absent - {torch_world.world_rank()}  # it may have come after the decision
    except RuntimeError:  # the store has gone with the rank that served it
        return set()
    finally:
        driver.close()


def who_is_missing(at: str, ranks: Iterable[int], what: str) -> str:
    """Describe the ranks that did not come to a collective that failed on all others.

    Args:
        at, ranks: see `missing_ranks`.
        what: what it is, for the message.
    """
    every = set(ranks)
    missing = missing_ranks(at, every)
    if not missing:
        return f"a rank is gone or did not answer in {what}"
    others = "others have" if len(every) - len(missing) > 1 else "this rank has"
    return f"{describe_ranks(missing)} did not come to {what}, to which {others} come"
