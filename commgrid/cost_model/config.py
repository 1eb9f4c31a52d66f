"""How a job is parallelised: the sizes of its grid, and how it runs a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from commgrid.cost_model.model import Model
from commgrid.errors import SpecError
from commgrid.layout.axis_names import nearest
from commgrid.wording import several

RECOMPUTE = ("none", "selective", "full")
"""The part of a layer's forward to compute again in the backward.

`selective`: attention's scores where they are kept in memory (Korthikanti et al. 2022), else norms
and the MLP's activation function, which cost little; `full`: the whole layer.
"""
ZERO_STAGES = (0, 1, 3)
"""The state to shard over data-parallel ranks: 0 none, 1 the optimizer's (Megatron's distributed
optimizer), 3 also gradients and weights (FSDP). Stage 2 is not modelled."""
DTYPES = ("bf16", "fp8", "mxfp8")
"""Formats of the layers' matrix products: 16 bits, or 8 with a scale for each tensor (`fp8`) or for
each 32 numbers (`mxfp8`). Attention, embedding and output layer stay in 16 bits."""
KERNELS = ("eager", "compiled", "fused")
"""Who wrote the kernels around the matrix products: PyTorch's own one after another, torch.compile,
or a library such as TransformerEngine."""
DISPATCHES = ("rows", "deepep")
"""How tokens go to experts: a row for each choice, as `commgrid.expert` sends them, or to a node
once, as DeepEP does it."""
SCHEDULES = ("1f1b", "zb-h1")
"""Order of a pipeline's work: 1F1B, interleaved where there are virtual stages, or ZB-H1 of Qi et
al. 2023 (arXiv 2401.10241), whose weight gradients fill a part of the bubble."""
HEADROOM = 0.9
"""Share of a device's memory that a job may fill; fragments and peaks need the rest."""
ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")
"""Orders with dp or with pp next to tp and cp, which load the links differently."""


_CHOICES = {
    "recompute": RECOMPUTE, "dtype": DTYPES, "kernels": KERNELS, "dispatch": DISPATCHES,
    "schedule": SCHEDULES,
}  # fmt: skip


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
        virtual_stages: of a rank, for the interleaved schedule; 1: plain 1F1B.
        recompute: one of `RECOMPUTE`.
        sequence_parallel: activations between tp's layers are split over tp as well.
        zero_stage: one of `ZERO_STAGES`.
        dp_replicate: copies of the shards among the dp ranks, as of HSDP.
        gradient_bytes: of one gradient, as summed over data-parallel ranks.
        overlap: data-parallel communication runs behind forward and backward.
        recompute_layers: of a stage, for which `recompute` holds; None: all.
        tp_overlap: collectives of tp run behind the products beside them, in parts.
        dtype, kernels, dispatch, schedule: of `DTYPES`, `KERNELS`, `DISPATCHES`, `SCHEDULES`.
        imbalance: tokens of the fullest rank's experts, over the mean.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int | None = None
    order: str = ORDERS[0]
    microbatch: int = 1
    virtual_stages: int = 1
    recompute: str = "none"
    sequence_parallel: bool = True
    zero_stage: int = 1
    dp_replicate: int = 1
    gradient_bytes: int = 4
    overlap: bool = True
    recompute_layers: int | None = None
    tp_overlap: bool = False
    dtype: str = "bf16"
    kernels: str = "fused"
    dispatch: str = "rows"
    schedule: str = "1f1b"
    imbalance: float = 1.0

    def __post_init__(self) -> None:
        for key, known in _CHOICES.items():
            if getattr(self, key) not in known:
                raise SpecError(
                    f"{key}={getattr(self, key)!r}: expected {', '.join(known)}"
                    f"{nearest(str(getattr(self, key)), known)}"
                )
        if not self.imbalance >= 1:
            raise SpecError(f"imbalance={self.imbalance!r}: expected a number from 1 on")
        if self.zero_stage not in ZERO_STAGES:
            raise SpecError(
                f"zero_stage={self.zero_stage!r}: expected 0, 1 (optimizer state) or 3 (weights "
                "and gradients as well)"
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
    def shard_size(self) -> int:
        """Ranks over which dense parameters, or their optimizer's state, are sharded."""
        return self.dp * self.cp // self.dp_replicate

    @cached_property
    def expert_shard_size(self) -> int:
        """The same for parameters of experts."""
        return max(self.edp // self.dp_replicate, 1)

    def recomputed(self, layers: int) -> float:
        """Share of a stage's layers for which `recompute` holds."""
        return 1.0 if self.recompute_layers is None else min(self.recompute_layers / layers, 1.0)

    @cached_property
    def sp(self) -> int:
        """Ranks over which sequence parallelism splits the activations outside tp's layers."""
        return self.tp if self.sequence_parallel else 1

    def microbatches(self, model: Model) -> int:
        """Of one step, through one pipeline."""
        return model.batch // (self.dp * self.microbatch)

    def in_flight(self, model: Model) -> float:
        """Microbatches of a whole stage that the first stage keeps: p of 1F1B, and with v virtual
        stages p · (1 + (p - 1) / (p · v)) (Korthikanti et al. 2022, section 4.2.3)."""
        most = self.microbatches(model)
        if self.virtual_stages == 1:
            return min(self.pp, most)
        return min(self.pp + (self.pp - 1) / self.virtual_stages, most)

    def stage_layers(self, model: Model) -> Stages:
        """Layers of the first stage, of the fullest, and of the last.

        Where the stages do not divide the layers, the last stage has one less, then the
        first, which have the output layer and the embedding; then the others.

        >>> from commgrid.cost_model.model import MODELS
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
        if model.num_kv_heads % tp and tp % model.num_kv_heads:
            heads = f"{model.num_kv_heads} heads of keys and values"
            return f"tp={tp}: neither divides {heads} nor is a multiple of them"
        dense = model.shared_ffn if experts else model.width
        if dense % tp:  # a vocabulary is filled up to a multiple, as all do it
            return f"tp={tp}: does not divide {dense} features of the MLP"
        if self.cp > 1 and (model.sequence % (2 * self.cp) or model.attention != "flash"):
            needs = f"attention: flash, and 2 · cp to divide the sequence of {model.sequence}"
            return f"cp={self.cp}: needs {needs}"
        if self.sequence_parallel and model.sequence // self.cp % tp:
            return f"tp={tp}: does not divide a rank's {model.sequence // self.cp} tokens"
        if self.pp > model.layers:
            return f"pp={self.pp}: more stages than the {several(model.layers, 'layer')}"
        if self.dp % self.dp_replicate:
            return f"dp_replicate={self.dp_replicate}: does not divide dp={self.dp}"
        if model.batch % (self.dp * self.microbatch):
            times = f"times {self.microbatch} sequences of a microbatch"
            return f"dp={self.dp}: {times} does not divide the batch of {model.batch}"
        if not experts and (self.ep > 1 or self.etp is not None):
            what = f"ep={self.ep}" if self.ep > 1 else f"etp={self.etp}"
            return f"{what}: model {model.name!r} has no experts"
        if experts and experts % self.ep:
            return f"ep={self.ep}: does not divide {experts} experts"
        if experts and model.expert_width % self.expert_tp:
            return f"etp={self.expert_tp}: does not divide expert_ffn {model.expert_width}"
        if experts and tp * self.cp * self.dp % (self.ep * self.expert_tp):
            return f"ep={self.ep}: times etp={self.expert_tp} does not divide tp · cp · dp"
        if experts and self.edp % self.dp_replicate:
            return f"dp_replicate={self.dp_replicate}: does not divide edp={self.edp}"
        if experts and self.order == ORDERS[1] and tp * self.cp != self.ep * self.expert_tp:
            unless = "experts and the rest have other pp groups, unless tp · cp is ep · etp"
            return f"order={self.order}: {unless}"
        if self.virtual_stages > 1 and (
            self.pp == 1
            or self.microbatches(model) % self.pp
            or -(-model.layers // self.pp) % self.virtual_stages
        ):
            needs = (
                "pp above 1 that divides the microbatches, and layers of a stage that it divides"
            )
            return f"virtual_stages={self.virtual_stages}: needs {needs}"
        return None
