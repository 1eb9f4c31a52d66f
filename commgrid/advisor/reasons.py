"""Where a printed number comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Why:
    """One number: its name, its value as shown, its formula, and the source."""

    name: str
    value: str
    formula: str
    source: str

    def to_dict(self) -> dict[str, str]:
        return {"name": self.name, "value": self.value, "formula": self.formula,
                "source": self.source}  # fmt: skip


def as_lines(found: Sequence[Why]) -> list[str]:
    """Where each number is from, as lines."""
    lines = ["", "Where these numbers are from:"]
    for each in found:
        lines.append(f"  {each.name:18} {each.value:>11}  {each.formula}")
        if each.source:
            lines.append(f"  {'':18} {'':>11}  from: {each.source}")
    return lines
