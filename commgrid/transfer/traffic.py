"""Bytes between each two ranks of a transfer, as a file keeps them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from commgrid.errors import SpecError

VERSION = 1
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
        """Its entries in a file, but for the version."""
        return {
            "tensors": self.tensors,
            "source": list(self.source_ranks),
            "target": list(self.target_ranks),
            "pairs": [[*pair, size] for pair, size in self.pairs.items()],
            "copied": [list(one) for one in self.copied.items()],
            "on_one_host": self.on_one_host,
        }

    def save(self, path: Path) -> None:
        """Writes a file for `commgrid show --transfer`.

        Raises:
            SpecError: it cannot be written.
        """
        try:
            path.write_text(json.dumps({"version": VERSION, **self.as_dict()}) + "\n")
        except OSError as error:
            raise SpecError(f"{path}: cannot be written: {error.strerror or error}") from error
