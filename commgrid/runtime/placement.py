"""Hosts of the ranks, which they exchange only if the spec depends on hosts.

Every rank says its host, the last one to come reads them all and concludes, and the others read
what it found: a fixed number of store calls for each, however many there are.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from commgrid.cost_model.placement import members_of
from commgrid.errors import SpecError
from commgrid.layout.rank_text import describe_ranks, pack_order, unpack_order
from commgrid.layout.ranks import RankTuple, as_ranks
from commgrid.planning.spec import GridSpec
from commgrid.planning.yaml_keys import BY_HOST, BY_RANK, order_by_host
from commgrid.runtime.startup_agreement import Rendezvous
from commgrid.store.hosts import own_host

_NAMED = 4  # hosts that a message lists
PHASE = "hosts"
"""Phase of a start in which ranks report their hosts, if the spec depends on them."""


def needs_hosts(spec: GridSpec) -> bool:
    """Whether something of a spec depends on where ranks run."""
    return bool(spec.constraints) or spec.place == BY_HOST


def settle(spec: GridSpec, rendezvous: Rendezvous, name: str, rank: int) -> GridSpec:
    """The spec with its ranks placed by host where it asks for that; on all of them at once.

    Args:
        spec: a resolved one.
        rendezvous: of its ranks; its next phase is `PHASE`.
        name: of the grid, for messages.
        rank: this process's.

    Raises:
        SpecError: on every rank, a group leaves the host that it was to stay on.
        GridMismatchError, PeerTimeoutError, PeerFailedError: as the rendezvous raises them.
    """
    found = rendezvous.meet(
        lambda said: conclude(spec, {each: host.decode() for each, host in said.items()}),
        own_host().encode(),
        spec.grid_ranks,
    )
    if found["refused"]:
        raise SpecError(f"grid {name!r}: {found['refused']}")
    if not found["order"]:
        return spec
    ranks = spec.grid_ranks
    placed = _in_order(spec, [ranks[place] for place in unpack_order(found["order"])])
    if rank == placed.grid_ranks[0]:
        logging.getLogger("commgrid").warning("grid %r: %s", name, found["said"])
    return placed


def conclude(spec: GridSpec, hosts: Mapping[int, str]) -> dict[str, str]:
    """Find out for all ranks whether the hosts are refused, and the order by host.

    Args:
        spec: a resolved one.
        hosts: of every rank.

    Returns:
        `refused`: the reason, or empty. `order`: the new order of the ranks' places, or empty for
        no change. `said`: a message about the order.
    """
    found = {"refused": "", "order": "", "said": ""}
    placed = spec
    if spec.place == BY_HOST:
        order = order_by_host(spec.grid_ranks, hosts)
        moved = sum(a != b for a, b in zip(order, spec.grid_ranks, strict=True))
        if moved:
            placed = _in_order(spec, order)
            places = {rank: place for place, rank in enumerate(spec.grid_ranks)}
            found["order"] = pack_order([places[rank] for rank in order])
            found["said"] = (
                f"place='by_host' has ordered the ranks by their {len(set(hosts.values()))} hosts: "
                f"{describe_ranks(RankTuple(order))}; {moved} of {len(order)} have another place"
            )
    found["refused"] = next(
        filter(None, (_refusal(placed, n, hosts) for n in spec.constraints)), ""
    )
    return found


def _in_order(spec: GridSpec, ranks: Sequence[int]) -> GridSpec:
    return replace(spec, ranks=as_ranks(ranks), place=BY_RANK)


def _refusal(spec: GridSpec, name: str, hosts: Mapping[int, str]) -> str:
    """Return the reason to refuse: a group of this name on several hosts, with a fix; or empty."""
    level, ranks = spec.constraints[name], _scattered(spec, name, hosts)
    if not ranks:
        return ""
    held: dict[str, list[int]] = {}
    for rank in ranks:
        held.setdefault(hosts[rank], []).append(rank)
    listed = [f"{host} ({describe_ranks(each)})" for host, each in list(held.items())[:_NAMED]]
    more = f" and {len(held) - _NAMED} more" if len(held) > _NAMED else ""
    said = (
        f"within.{name}={level!r}: {describe_ranks(RankTuple(ranks))}, a group of {name}, run on "
        f"hosts {', '.join(listed)}{more}; "
    )
    if level != "node":
        return said + (
            f"initialize knows hosts, not which {level} they are in: check that with `commgrid "
            f"plan --cluster`, and take {name} out of within here"
        )
    most = max(Counter(hosts.values()).values())
    if len(ranks) > most:
        return said + f"no host has more than {most} of the grid's ranks, and {name} {len(ranks)}"
    ordered = order_by_host(spec.grid_ranks, hosts)
    if not _scattered(_in_order(spec, ordered), name, hosts):
        return said + "place='by_host' would order the ranks by host"
    return said + f"put {name} earlier in order, or take equally many ranks of each host"


def _scattered(spec: GridSpec, name: str, hosts: Mapping[int, str]) -> Sequence[int]:
    """The first group of a name that is on several hosts."""
    definition = spec.definitions[name]
    groups = members_of(definition, spec.layouts[definition.region])
    return next((ranks for ranks in groups if len({hosts[rank] for rank in ranks}) > 1), ())
