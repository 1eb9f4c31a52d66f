"""Addresses that ranks publish at the store, until all are connected with each other."""

from __future__ import annotations

from collections.abc import Sequence

from commgrid.rendezvous.op import Drop, Get, Protocol, Put, WaitKey


def publish(at: str, rank: int, address: str) -> Protocol[None]:
    """Publish this rank's address."""
    yield Put(f"{at}/{rank}", address.encode())


def published(at: str, ranks: Sequence[int]) -> Protocol[dict[int, str]]:
    """Return the addresses of ranks that have all published theirs."""
    found = yield Get(tuple(f"{at}/{rank}" for rank in ranks), stay=True)
    return {rank: value.decode() for rank, value in zip(ranks, found, strict=True)}


def awaited(at: str, rank: int, until: float) -> Protocol[str | None]:
    """Return a rank's address, None if it has not published one until then."""
    found: bytes | None = yield WaitKey(f"{at}/{rank}", until)
    return None if found is None else found.decode()


def withdraw(at: str, rank: int) -> Protocol[None]:
    """Delete this rank's address."""
    yield Drop((f"{at}/{rank}",))


def seen(at: str, rank: int) -> Protocol[str | None]:
    """Return a rank's address, None if it has not published one."""
    (found,) = yield Get((f"{at}/{rank}",))
    return None if found is None else found.decode()


def remove(key: str) -> Protocol[None]:
    """Delete an address of torch's."""
    yield Drop((key,))
