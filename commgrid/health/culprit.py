"""Naming the ranks that did not come to a failed collective."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from commgrid.layout.rank_text import describe_ranks, pack, unpack
from commgrid.rendezvous.failure_round import Failure
from commgrid.store.driver import StoreDriver
from commgrid.torch_compat import world as torch_world


def missing_ranks(at: str, ranks: Iterable[int], awaited: Iterable[int] | None = None) -> set[int]:
    """Return the ranks that do not report after a collective has failed.

    Every rank whose part in it has failed calls it; see `commgrid.rendezvous.failure_round`. Where
    ranks send only to some of the others, a rank without a part in the failure reports nothing.

    Args:
        at: key of the call at the store, another one for each.
        ranks: who takes part.
        awaited: the ranks that this one waits for; None: all.

    Returns:
        Empty if all report, or if the store is lost.
    """
    every = tuple(sorted(ranks))
    driver = StoreDriver(torch_world.world_store(), len(every))

    def blame(absent: Sequence[int], words: Mapping[int, bytes]) -> dict[str, str]:
        here = (words.get(rank, b"").decode() for rank in every if rank not in absent)
        waited_for = {rank for said in here for rank in unpack(said)}
        return {"text": "", "absent": pack(waited_for.intersection(absent))}

    try:
        found = Failure(at, torch_world.world_rank(), every)
        driver.run(found.report(pack(every if awaited is None else awaited).encode()))
        absent = unpack(driver.run(found.find_out(blame))["absent"])
        return absent - {torch_world.world_rank()}  # it may have come after the decision
    except RuntimeError:  # the store has gone with the rank that served it
        return set()
    finally:
        driver.close()


def who_is_missing(
    at: str, ranks: Iterable[int], what: str, awaited: Iterable[int] | None = None
) -> str:
    """Describe the ranks that did not come to a collective that failed on all others.

    Args:
        at, ranks, awaited: see `missing_ranks`.
        what: what it is, for the message.
    """
    every = set(ranks)
    missing = missing_ranks(at, every, awaited)
    if not missing:
        return f"a rank is gone or did not answer in {what}"
    others = "others have" if len(every) - len(missing) > 1 else "this rank has"
    return f"{describe_ranks(missing)} did not come to {what}, to which {others} come"
