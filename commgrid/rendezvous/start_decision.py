"""Why a start failed: the decision that ranks share, and the exception that each raises for it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from commgrid.errors import CommGridError, GridMismatchError, PeerFailedError, PeerTimeoutError
from commgrid.layout.rank_text import describe_ranks, pack, unpack
from commgrid.layout.ranks import RankTuple
from commgrid.rendezvous.round import Decision

_LONGEST_MESSAGE = 4000
_KINDS: dict[str, type[CommGridError]] = {
    "absent": PeerTimeoutError, "mismatch": GridMismatchError, "failed": PeerFailedError,
    "lost": PeerFailedError,
}  # fmt: skip


def error_of(decision: Mapping[str, Any], about: str, rank: int) -> CommGridError:
    """Return the exception that a rank raises for a decision.

    Args:
        about: the subject of the message, such as `grid 'default'`.
        rank: this process's; an absent rank gets the message for late ranks.
    """
    message = decision["message"]
    if rank in unpack(decision.get("absent", "")):
        message = decision.get("late", message)
    return _KINDS[decision["kind"]](f"{about}: {message}")


def mismatch(holders: Iterable[tuple[str, Sequence[int]]]) -> Decision:
    """Decide that ranks hold different documents; see `describe_mismatch`."""
    held = list(holders)
    present = sum(len(ranks) for _, ranks in held)
    return {"kind": "mismatch", "message": _short(describe_mismatch(held)), "present": present}


def absent(
    missing: Sequence[int],
    here: Sequence[int],
    did_not: str,
    limit: str,
    advice: str,
    also: str = "",
) -> Decision:
    """Decide that ranks are absent.

    Args:
        missing: the absent ranks.
        here: the others.
        did_not: what the absent ranks did not do: `arrive`.
        limit: the limit that is over: `startup_timeout`.
        advice: what every rank is to call.
        also: what is known of the absent ranks.
    """
    who, others = describe_ranks(missing), describe_ranks(here)
    did = f" ({others} did)" if here else ""
    return {
        "kind": "absent",
        "absent": pack(missing),
        "present": len(here),
        "message": _short(
            f"{who} did not {did_not} within {limit}{did}; {also}is every process running, and "
            f"does each call {advice}?"
        ),
        "late": _short(f"{who} came too late; {others} had given up waiting"),
    }


def no_decision(who: str, here: Sequence[int], limit: str) -> Decision:
    """Decide that all ranks arrived, but the deciding rank wrote no decision in time."""
    return {
        "kind": "absent", "absent": "", "present": len(here),
        "message": f"{describe_ranks(here)} have all come, and {who}, who says so to the "
        f"others, has not answered until {limit} was over; has its process ended?",
    }  # fmt: skip


def failed(rank: int, error: BaseException, present: int) -> Decision:
    """Decide that a rank has failed.

    Args:
        rank: the failed one.
        error: its error.
        present: number of ranks that read this.
    """
    message = f"rank {rank} failed: {type(error).__name__}: {error}"
    return {"kind": "failed", "rank": rank, "message": _short(message), "present": present}


def held_up(about: str, rank: int, limit: str) -> PeerTimeoutError:
    """Return the error of a rank that itself was late, and cannot tell about the others."""
    return PeerTimeoutError(
        f"{about}: {limit} was over before rank {rank} came to meet the others: its own start took "
        "the time (importing modules, starting CUDA, a stopped process), no peer did; find out "
        f"what did on this rank, or raise {limit}"
    )


def ranks_entry(ranks: Sequence[int]) -> list[int] | dict[str, str]:
    """Return ranks as a document holds them: short for any number, and different for other orders.

    >>> ranks_entry(range(4)), ranks_entry((0, 1, 2, 4))
    ([0, 4, 1], {'set': '0-2,4', 'order': 'rising'})
    """
    if isinstance(ranks, range):
        return [ranks.start, ranks.stop, ranks.step]
    order = "rising" if list(ranks) == sorted(ranks) else str(RankTuple(ranks))
    return {"set": pack(ranks), "order": order}


def ranks_of(document: str) -> Sequence[int]:
    """Return the ranks that a document names, rising."""
    entry = json.loads(document)["ranks"]
    return range(*entry) if isinstance(entry, list) else sorted(unpack(entry["set"]))


def describe_mismatch(holders: Iterable[tuple[str, Sequence[int]]]) -> str:
    """Say which keys of documents differ and which ranks hold which value, the few ranks first.

    Args:
        holders: documents and the ranks that hold them; "" stands for several other documents.
    """
    listed = list(holders)
    flat = [(_flatten(json.loads(text)), ranks) for text, ranks in listed if text]
    uncounted = [rank for text, ranks in listed if not text for rank in ranks]
    keys = dict.fromkeys(key for document, _ in flat for key in document)
    parts = []
    for key in keys:
        values: dict[str, list[int]] = {}
        for document, ranks in flat:
            values.setdefault(repr(document.get(key, "not given")), []).extend(ranks)
        if len(values) > 1:
            fewest_first = sorted(values.items(), key=lambda item: (len(item[1]), item[1]))
            told = " and ".join(f"{value} on {describe_ranks(r)}" for value, r in fewest_first)
            parts.append(f"{key} is {told}")
    if uncounted:
        parts.append(f"{describe_ranks(uncounted)} differ in further ways")
    # If nothing differs but the order, that is the order in which groups are created.
    text = "; ".join(parts) or "the rows of groups come in different orders"
    return f"ranks disagree: {text}; give every rank the same"


def _flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat.update(_flatten(item, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = item
    return flat


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]} …"
