"""Notes of waiting ranks: a rank that has waited for a while publishes where, at `waits/<rank>`."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from commgrid.layout.rank_text import describe_ranks, pack, unpack
from commgrid.rendezvous.op import Drop, Get, Protocol, Put

_ASKED = 64  # absent ranks that are looked up, at most


def publish(me: int, place: dict[str, str], host: tuple[str, Sequence[int]]) -> Protocol[None]:
    """Publish where this rank waits, and its host with the ranks that were started there."""
    note = {**place, "host": host[0], "ranks": pack(host[1])}
    yield Put(f"waits/{me}", json.dumps(note).encode())


def withdraw(me: int) -> Protocol[None]:
    """Delete this rank's note."""
    yield Drop((f"waits/{me}",))


def elsewhere(missing: Sequence[int], base: str) -> Protocol[list[tuple[int, dict[str, Any]]]]:
    """Return the notes of absent ranks that do not wait at `base`."""
    places = []
    for rank in missing[:_ASKED]:
        found = (yield Get((f"waits/{rank}",)))[0]  # one key: a note may go at any time
        if found is not None and (place := json.loads(found))["at"] != base:
            places.append((rank, place))
    return places


def hosts_of(missing: Sequence[int], here: Sequence[int]) -> Protocol[str]:
    """Name the hosts of absent ranks, as their neighbours among those here have published."""
    hosts: dict[str, frozenset[int]] = {}
    for rank in missing[:_ASKED]:
        at = bisect_left(here, rank)
        for other in here[max(at - 1, 0) : at + 1]:  # a host's ranks follow one another
            if any(rank in ranks for ranks in hosts.values()):
                break
            text = (yield Get((f"waits/{other}",)))[0]
            if text is None:
                continue
            place = json.loads(text)
            if not place["ranks"]:  # the launcher does not tell who is on which host
                return ""
            hosts[place["host"]] = frozenset(unpack(place["ranks"]))
    found = {
        host: [rank for rank in missing[:_ASKED] if rank in ranks]
        for host, ranks in hosts.items()
        if not ranks >= {*missing, *here}  # then all are there, which says nothing
    }
    described = (
        f"{describe_ranks(ranks)} {'are' if len(ranks) > 1 else 'is'} on host {host}"
        for host, ranks in found.items()
        if ranks
    )
    return "".join(f"{text}; " for text in described)
