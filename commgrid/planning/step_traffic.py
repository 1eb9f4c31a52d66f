"""Bytes that a training step sends, by group name, and over the links that leave a unit.

Each rank's bytes are those of rings: an all-reduce of s bytes over n ranks sends 2 s (n - 1) / n,
the two halves of one s (n - 1) / n each (Patarasuk & Yuan 2009), an all-to-all the same of what a
rank hands in. Of each group one rank in a unit sends on to the next unit, so that the link that
leaves a unit carries as much as one rank sends, of every group that shares it.
"""

from __future__ import annotations

from dataclasses import dataclass

from commgrid.planning.layer_cost import LINEAR_BYTES
from commgrid.planning.spreads import Spread, groups
from commgrid.planning.step_cost import StepCost
from commgrid.planning.step_memory import parameters_of_rank


@dataclass(frozen=True)
class Traffic:
    """What a step sends on the groups of one name.

    Args:
        name: of the groups.
        sent: bytes that a rank sends, of a stage with most layers.
        level: the place of the highest level that they cross, 0 within a node.
        link: bytes over the link that leaves a unit of the level below, of all groups that share
            it; 0 within a node.
    """

    name: str
    sent: float
    level: int
    link: float


def traffic(cost: StepCost) -> tuple[Traffic, ...]:
    """What a step sends, by group name, the most first; names that send nothing are left out."""
    spreads = groups(cost.choice, cost.cluster)
    found = []
    for name, sent in _sent(cost).items():
        spread = spreads.get(name, spreads["tp"])
        if sent > 0:
            level = cost.cluster.highest(spread)
            found.append(Traffic(name, sent, level, sent * _sharing(cost, spread, level)))
    return tuple(sorted(found, key=lambda each: -each.sent))


def _sharing(cost: StepCost, spread: Spread, level: int) -> float:
    """How many groups of a name share the link of one unit below a level."""
    if level == 0:
        return 0.0
    inside = 1
    for count in spread[:level]:
        inside *= count
    return min(cost.cluster.unit_size(level - 1), cost.choice.world_size) / inside


def _sent(cost: StepCost) -> dict[str, float]:
    """Bytes of a rank, by name."""
    model, choice = cost.model, cost.choice
    count, layers = choice.microbatches(model), choice.stage_layers(model).most
    tokens = choice.microbatch * model.sequence / choice.cp
    whole = tokens * model.hidden * LINEAR_BYTES
    # Forward and backward; forward once more where all is computed again.
    times = count * layers * (3 if choice.recompute == "full" else 2)
    around = 2 if not model.experts or model.shared_ffn else 1
    found = {"tp": times * around * 2 * _part(choice.tp) * whole}
    if model.experts:
        routed = whole / choice.split * model.top_k
        wide = choice.expert_tp
        found["etp"] = times * 2 * _part(wide) * routed * wide
        found["ep"] = times * 2 * _part(choice.ep) * routed
    keys = 2 * tokens * model.head * max(model.groups / choice.tp, 1) * LINEAR_BYTES
    # Keys and values go round, backward with their gradients.
    rounds = 3 if choice.recompute != "full" else 4
    found["cp"] = count * layers * rounds * (choice.cp - 1) * keys
    if choice.pp > 1:
        found["pp"] = count * choice.chunks * 2 * whole / choice.tp
    ends = 1 if choice.pp > 1 else 2 - model.tied
    experts, rest = parameters_of_rank(model, choice, layers, ends)
    found["dp_cp"] = _of_parameters(cost, rest, choice.dp * choice.cp)
    if model.experts:
        found["edp"] = _of_parameters(cost, experts, choice.edp)
    return found


def _part(ranks: int) -> float:
    return (ranks - 1) / ranks


def _of_parameters(cost: StepCost, parameters: float, ranks: int) -> float:
    """Gradients summed and weights gathered, over the ranks that have copies."""
    choice, part = cost.choice, _part(ranks)
    gradients = parameters * choice.gradient_bytes * part
    if choice.shard == "none":
        return 2 * gradients
    weights = parameters * LINEAR_BYTES * part
    if choice.shard == "weights":  # for every forward and every backward
        return choice.microbatches(cost.model) * (gradients + 2 * weights)
    return gradients + weights
