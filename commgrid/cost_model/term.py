"""Term: one thing that a rank does in a step, with its time and what it sends."""

from __future__ import annotations

from dataclasses import dataclass

from commgrid.cost_model.collective import bus_factor
from commgrid.cost_model.placement import Spread

PARTS = ("compute", "bubble", "tp", "cp", "ep", "pp", "dp", "optimizer")
"""The parts of a step's time; `why` names each and its source."""


@dataclass(frozen=True)
class Term:
    """One thing that a rank does: of a layer and microbatch, or in a step of the slowest stage.

    Args:
        part: one of `PARTS`.
        what: in words; empty in the terms of a layer, which `step` names.
        times: how often.
        forward, backward: seconds of one without the hidden part; forward also holds what is not
            split between them.
        group: that communicates, by name; "": none does.
        collective, bytes: of one, as `collective_time` takes them.
        ranks: of the group.
        spread: of the group over the cluster's levels.
        sends: how many of them a rank takes part in.
        placed: the group's name in the placement; "": the same.
    """

    part: str
    what: str
    times: float
    forward: float
    backward: float = 0.0
    group: str = ""
    collective: str = ""
    bytes: float = 0.0
    ranks: int = 1
    spread: Spread = ()
    sends: float = 0.0
    placed: str = ""

    @property
    def each(self) -> float:
        """Seconds of one."""
        return self.forward + self.backward

    @property
    def seconds(self) -> float:
        """Of all of them."""
        return self.times * self.each

    @property
    def sent(self) -> float:
        """Bytes that a rank sends."""
        if not self.group:
            return 0.0
        return self.sends * self.bytes * bus_factor(self.collective, self.ranks)
