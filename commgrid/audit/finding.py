"""Findings of an audit: where a grid differs from another, or a rank from its copies."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

KINDS = {
    "seed": "another seed: the numbers that the program began with are others",
    "batch": "another batch: what the model was given is other data",
    "not sharded": "a batch that was not shared out: all ranks have the same",
    "seeded alike": "dropout seeded alike: ranks with other data drop the same places",
    "seeded unlike": "dropout seeded unlike: ranks with the same data drop other places",
    "dropout": "dropout: grids draw other numbers by design; audit without it",
    "forward": "the forward computes something else, of inputs that agree",
    "backward": "the backward computes something else, before any reduction",
    "not reduced": "not reduced: each rank has its own part, and their sum is the reference",
    "wrong group": "reduced over the wrong group",
    "reduced twice": "reduced twice: a factor of the group's size",
    "not averaged": "not averaged: every gradient is off by the same factor",
    "scaled": "scaled: off by a factor that is no group's size",
    "copies": "copies that differ",
    "update": "the update is another one, of gradients that agree",
    "missing": "some of it no rank has",
    "loss": "the loss is another one, of outputs that agree",
    "buffer": "a buffer holds other numbers",
    "unknown": "other numbers",
}
"""Likely causes of a difference."""


@dataclass(frozen=True)
class Divergence:
    """One thing that parts.

    Args:
        grid: on which.
        step: at which; 0: as the program began.
        what: weights, buffer, input, module, loss, gradient or dropout.
        name: the parameter's, module's, buffer's or input's.
        kind: one of `KINDS`.
        axes: along which.
        difference: relative.
        words: what it looks like.
        collectives: that may be its cause, as operation, group and place.
    """

    grid: str
    step: int
    what: str
    name: str
    kind: str
    axes: tuple[str, ...]
    difference: float
    words: str
    collectives: tuple[tuple[str, str, str], ...] = ()

    @property
    def text(self) -> str:
        """A few lines."""
        over = f" along {', '.join(self.axes)}" if self.axes else ""
        lines = [
            f"{self.what} {self.name}{over}: {self.words}",
            f"    looks like: {KINDS[self.kind]}",
        ]
        for operation, group, where in self.collectives:
            first, *more = group.split(",")
            others = f" (+{len(more)} names)" if more else ""
            lines.append(f"    {operation} over {first}{others} at {where}")
        if self.what == "gradient" and not self.collectives:
            lines.append("    no collective that was seen has touched its memory")
        return "\n".join(lines)


@dataclass(frozen=True)
class Comparison:
    """One grid compared with the reference.

    Args:
        grid: the text that the user gave.
        steps: number of steps compared.
        compared: number of weights, gradients, losses and buffers that were compared.
        findings: the first place at which it parts, and what parts beside it.
        largest: the largest relative difference that counts as equal.
        notes: what was not compared.
        tolerance: relative.
        complete: whether all weights could be compared by name.
    """

    grid: str
    steps: int
    compared: dict[str, int] = field(default_factory=dict)
    findings: tuple[Divergence, ...] = ()
    largest: float = 0.0
    notes: tuple[str, ...] = ()
    tolerance: float = 0.0
    complete: bool = True

    @property
    def parts(self) -> bool:
        """Whether there is anything."""
        return bool(self.findings)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "parts": self.parts}
