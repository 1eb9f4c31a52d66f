"""Grids compared in words: what limits one, and why another is worse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from commgrid.advisor.config import RECOMPUTE
from commgrid.advisor.step import PARTS, StepCost

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "compute": "kernels",
        "bubble": "bubble",
        "tp": "tp's collectives",
        "cp": "cp's ring",
        "ep": "experts' all-to-all",
        "pp": "sends between stages",
        "dp": "gradients and weights of dp",
        "optimizer": "optimizer",
    }
)
"""Names of the parts of a step."""

_Reason = Callable[[StepCost, StepCost], str]


def limits(cost: StepCost) -> str:
    """Parts of a step beside arithmetic, the largest first."""
    shares = {part: cost.parts[part] / cost.seconds for part in PARTS if part != "compute"}
    largest = sorted(shares.items(), key=lambda item: -item[1])[:2]
    told = [f"{NAMES[part]} {share:.0%}" for part, share in largest if share >= 0.01]
    return ", ".join(told) or "arithmetic alone"


def why_worse(cost: StepCost, best: StepCost) -> str:
    """Why a grid takes longer than the best one: the part that grew most, and what is behind it."""
    more = cost.seconds / best.seconds - 1
    grown = {part: (cost.parts[part] - best.parts[part]) / best.seconds for part in PARTS}
    part = max(grown, key=lambda each: grown[each])
    reason = _REASONS[part](cost, best)
    return f"+{more:.1%}: {NAMES[part]} +{grown[part]:.1%}{reason}"


def _of_compute(cost: StepCost, best: StepCost) -> str:
    places = [RECOMPUTE.index(each.choice.recompute) for each in (cost, best)]
    if places[0] > places[1]:
        return f" (recompute {cost.choice.recompute}, to fit)"
    if cost.choice.tp > best.choice.tp:
        return f" (smaller matrices with tp {cost.choice.tp})"
    if cost.choice.microbatch < best.choice.microbatch:
        return f" (smaller matrices with microbatches of {cost.choice.microbatch})"
    if cost.choice.pp > best.choice.pp:
        return f" (fuller stages with pp {cost.choice.pp})"
    return ""


def _of_bubble(cost: StepCost, best: StepCost) -> str:
    choice, count = cost.choice, cost.choice.microbatches(cost.model)
    return f" ({choice.pp} stages of {choice.chunks} for {count} microbatches)"


def _crossing(group: str, *axes: str) -> _Reason:
    def reason(cost: StepCost, best: StepCost) -> str:
        spread = cost.placement.spreads.get(group)
        if spread is None:
            return ""
        levels, place = cost.cluster.levels, cost.cluster.highest(spread)
        sizes = {axis: getattr(cost.choice, axis) for axis in axes}
        large = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
        group_of = " · ".join(large) or f"{axes[0]} 1"
        if place == 0:
            return f" ({group_of})"
        return (
            f" ({group_of} leaves the {levels[place - 1].name}: "
            f"{levels[place].bandwidth / 1e9:.0f} GB/s)"
        )

    return reason


_REASONS: Mapping[str, _Reason] = {
    "compute": _of_compute,
    "bubble": _of_bubble,
    "tp": _crossing("tp", "tp"),
    "cp": _crossing("cp", "cp"),
    "ep": _crossing("ep", "ep"),
    "pp": _crossing("pp", "pp"),
    "dp": _crossing("dp_cp", "dp", "cp"),
    "optimizer": lambda cost, best: f" (shared by dp {cost.choice.dp})",
}
