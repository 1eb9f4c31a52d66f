"""The choices for a job: the sizes of its grid, and how it runs a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from commgrid.errors import SpecError
from commgrid.planning.names import nearest

if TYPE_CHECKING:
    from commgrid.advisor.model import Model

RECOMPUTE = ("none", "selective", "full")
"""The part of a layer's forward to compute again in the backward.

`selective`: attention's scores where they are kept in memory (Korthikanti et al. 2022), else norms
and the MLP's activation function, which cost little; `full`: the whole layer.
"""
SHARD = ("none", "optimizer", "weights")
"""The state to shard over data-parallel ranks: none, the optimizer's (ZeRO-1, Megatron's
distributed optimizer), or also gradients and weights (ZeRO-3, FSDP)."""
HEADROOM = 0.9
"""Share of a device's memory that a choice may fill; fragments and peaks need the rest."""
ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")
"""Orders with dp or with pp next to tp and cp, which load the links differently."""


class Stages(NamedTuple):
    """Layers of the first stage of a pipeline, of the fullest, and of the last."""

    first: int
    most: int
    last: int


@dataclass(frozen=True)
class ParallelConfig:
    """A grid and how a step is run on it.

    Args:
        tp, cp, pp, dp, ep: sizes of the axes.
        etp: tensor parallel size of experts; None: tp.
        order: of the axes; one of `ORDERS`, but for a grid that is given.
        microbatch: sequences that go through a stage at once.
        chunks: of a stage's layers, for the interleaved schedule; 1: plain 1F1B.
        recompute: one of `RECOMPUTE`.
        sequence_parallel: activations between tp's layers are split over tp as well.
        shard: one of `SHARD`.
        copies: of the shards, as of HSDP: dp_replicate of the dp ranks.
        gradient_bytes: of one gradient, as summed over data-parallel ranks.
        overlap: data-parallel communication runs behind forward and backward.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int | None = None
    order: str = ORDERS[0]
    microbatch: int = 1
    chunks: int = 1
    recompute: str = "none"
    sequence_parallel: bool = True
    shard: str = "optimizer"
    copies: int = 1
    gradient_bytes: int = 4
    overlap: bool = True

    def __post_init__(self) -> None:
        for key, known in (("recompute", RECOMPUTE), ("shard", SHARD)):
            given = getattr(self, key)
            if given not in known:
                raise SpecError(
                    f"{key}={given!r}: expected {', '.join(known)}{nearest(str(given), known)}"
                )

    @cached_property
    def world_size(self) -> int:
        """Ranks of the grid."""
        return self.tp * self.cp * self.pp * self.dp

    @cached_property
    def expert_tp(self) -> int:
        """Tensor parallel size of experts."""
        return self.tp if self.etp is None else self.etp

    @cached_property
    def edp(self) -> int:
        """Ranks that hold the same experts."""
        return self.tp * self.cp * self.dp // (self.ep * self.expert_tp)

    @cached_property
    def sharers(self) -> int:
        """Ranks over which dense parameters, or their optimizer's state, are sharded."""
        return self.dp * self.cp // self.copies

    @cached_property
    def expert_sharers(self) -> int:
        """The same for parameters of experts."""
        return max(self.edp // self.copies, 1)

    @cached_property
    def split(self) -> int:
        """Over how many ranks of tp the activations outside its layers are split."""
        return self.tp if self.sequence_parallel else 1

    def microbatches(self, model: Model) -> int:
        """Of one step, through one pipeline."""
        return model.batch // (self.dp * self.microbatch)

    def in_flight(self, model: Model) -> float:
        """Microbatches of a whole stage that the first stage keeps: p of 1F1B, and
        p · (1 + (p - 1) / (p · v)) with v chunks (Korthikanti et al. 2022, section 4.2.3)."""
        most = self.microbatches(model)
        if self.chunks == 1:
            return min(self.pp, most)
        return min(self.pp + (self.pp - 1) / self.chunks, most)

    def stage_layers(self, model: Model) -> Stages:
        """Layers of the first stage, of the fullest, and of the last.

        Where the stages do not divide the layers, the last stage has one less, then the
        first, which have the output layer and the embedding; then the others.

        >>> from commgrid.advisor.models import MODELS
        >>> ParallelConfig(pp=16).stage_layers(MODELS["llama3-405b"])
        Stages(first=7, most=8, last=7)
        """
        most = -(-model.layers // self.pp)
        missing = most * self.pp - model.layers
        last = most - (missing > 0)
        return Stages(last if self.pp == 1 else most - (missing > 1), most, last)

    def refusal(self, model: Model) -> str | None:
        """Why a model cannot run so; None where it can."""
        tp, experts = self.tp, model.experts
        if model.heads % tp:
            return f"tp={tp}: does not divide {model.heads} heads"
        if model.groups % tp and tp % model.groups:
            return f"tp={tp}: neither divides {model.groups} heads of keys and values nor is a \
multiple of them"
        dense = model.shared_ffn if experts else model.width
        if dense % tp:  # a vocabulary is filled up to a multiple, as all do it
            return f"tp={tp}: does not divide {dense} features of the MLP"
        if self.cp > 1 and (model.sequence % (2 * self.cp) or model.attention != "flash"):
            return f"cp={self.cp}: needs attention: flash, and 2 · cp to divide the sequence of \
{model.sequence}"
        if self.sequence_parallel and model.sequence // self.cp % tp:
            return f"tp={tp}: does not divide a rank's {model.sequence // self.cp} tokens"
        if self.pp > model.layers:
            return f"pp={self.pp}: more stages than the {model.layers} layers"
        if model.batch % (self.dp * self.microbatch):
            return f"dp={self.dp}: times {self.microbatch} sequences of a microbatch does not \
divide the batch of {model.batch}"
        if not experts and (self.ep > 1 or self.etp is not None):
            return f"ep={self.ep}: model {model.name!r} has no experts"
        if experts and experts % self.ep:
            return f"ep={self.ep}: does not divide {experts} experts"
        if experts and model.expert_width % self.expert_tp:
            return f"etp={self.expert_tp}: does not divide expert_ffn {model.expert_width}"
        if experts and tp * self.cp * self.dp % (self.ep * self.expert_tp):
            return f"ep={self.ep}: times etp={self.expert_tp} does not divide tp · cp · dp"
        if experts and self.order == ORDERS[1] and tp * self.cp != self.ep * self.expert_tp:
            return (
                f"order={self.order}: experts and the rest have other pp groups, unless tp · cp is \
ep · etp"
            )
        if self.chunks > 1 and (
            self.pp == 1
            or self.microbatches(model) % self.pp
            or -(-model.layers // self.pp) % self.chunks
        ):
            return f"chunks={self.chunks}: needs pp above 1 that divides the microbatches, and \
layers of a stage that it divides"
        return None
