"""How many bytes go from whom to whom in a transfer: numbers alone, which a file keeps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from commgrid.errors import SpecError

_VERSION = 1
"""Of the file; it rises when a key goes or comes to mean something else."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of a transfer's plan.

    Args:
        tensors: how many are moved.
        source_ranks, target_ranks: of both grids, in order.
        pairs: sender and receiver to the bytes between them.
        copied: rank to the bytes that it has already.
        on_one_host: of the bytes sent, those between ranks of one host.
    """

    tensors: int
    source_ranks: tuple[int, ...]
    target_ranks: tuple[int, ...]
    pairs: Mapping[tuple[int, int], int]
    copied: Mapping[int, int]
    on_one_host: int = 0

    @cached_property
    def sent(self) -> dict[int, int]:
        """Rank of the source to the bytes that it sends."""
        found = dict.fromkeys(self.source_ranks, 0)
        for (sender, _), size in self.pairs.items():
            found[sender] += size
        return found

    @cached_property
    def received(self) -> dict[int, int]:
        """Rank of the target to the bytes that it receives."""
        found = dict.fromkeys(self.target_ranks, 0)
        for (_, receiver), size in self.pairs.items():
            found[receiver] += size
        return found

    def as_dict(self) -> dict[str, Any]:
        """What a file has of it, its version aside."""
        return {
            "tensors": self.tensors,
            "source": list(self.source_ranks),
            "target": list(self.target_ranks),
            "pairs": [[*pair, size] for pair, size in self.pairs.items()],
            "copied": [list(one) for one in self.copied.items()],
            "on_one_host": self.on_one_host,
        }

    def save(self, path: Path) -> None:
        """Writes a file that `read_traffic` reads.

        Raises:
            SpecError: it cannot be written.
        """
        try:
            path.write_text(json.dumps({"version": _VERSION, **self.as_dict()}) + "\n")
        except OSError as error:
            raise SpecError(f"{path}: cannot be written: {error.strerror or error}") from error


def read_traffic(path: Path) -> Traffic:
    """What `TransferPlan.save` wrote.

    Raises:
        SpecError: a file that is not there, or is something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        version, traffic = found["version"], _traffic(found)
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise SpecError(
            f"{path}: expected what transfer.plan.save(FILE) writes, "
            f'{{"version": {_VERSION}, "tensors": …, "source": […], …}}: '
            f"{type(error).__name__}: {error}"
        ) from error
    if version != _VERSION:
        raise SpecError(
            f"{path}: has version {version!r}, this commgrid reads {_VERSION}; save the plan again"
        )
    return traffic


def _traffic(found: Any) -> Traffic:
    source, target = (tuple(_counts(found[key])) for key in ("source", "target"))
    pairs = {(s, r): size for s, r, size in map(_counts, found["pairs"])}
    copied = {rank: size for rank, size in map(_counts, found["copied"])}  # noqa: C416
    senders, receivers = {s for s, _ in pairs}, {r for _, r in pairs}
    strange = (senders - {*source}) | ((receivers | {*copied}) - {*target})
    if not source or not target or strange:
        raise ValueError(f"ranks {sorted(strange)} are on neither side" if strange else "no ranks")
    tensors, on_one_host = _counts([found["tensors"], found["on_one_host"]])
    return Traffic(tensors, source, target, pairs, copied, on_one_host)


def _counts(values: Any) -> list[int]:
    if not isinstance(values, list) or any(type(n) is not int or n < 0 for n in values):
        raise ValueError(f"{values!r:.60} is no list of numbers from 0")
    return values
