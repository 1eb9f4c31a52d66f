"""Parallel configuration: a grid, and the settings of a step on it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

from commgrid.cost_model.model import Model
from commgrid.errors import SpecError
from commgrid.layout.axis_names import nearest
from commgrid.layout.ranks import whole_number
from commgrid.planning.region import HSDP
from commgrid.planning.spec import GridSpec
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


class Sizes(NamedTuple):
    """Sizes of a grid as a step of a model knows them, 1 where the grid has no such axis.

    Args:
        tp, cp, pp, dp, ep: of the axes; dp of dp_replicate and dp_shard together.
        expert_tp: tensor parallel size of experts.
        edp: ranks that hold the same experts.
        replicas: copies of the shards among the dp ranks, as of HSDP.
        order: of the axes, as one of `ORDERS` if the axes above 1 are in that order.
    """

    tp: int
    cp: int
    pp: int
    dp: int
    ep: int
    expert_tp: int
    edp: int
    replicas: int
    order: str


@lru_cache(maxsize=4096)
def sizes_of(spec: GridSpec) -> Sizes:
    """The sizes of a resolved spec.

    Raises:
        SpecError: it has an axis above 1 that a step's model does not know, or copies of experts
            that HSDP's do not divide.
    """
    dense = spec.layout("dense").shape
    data = [axis for axis in ("dp", *HSDP) if axis in dense]
    for axis, size in dense.items():
        if size > 1 and axis not in ("tp", "cp", "pp", "ep", *data):
            raise SpecError(
                f"axes.{axis}: a step's model knows tp, cp, ep, dp and pp; plan it without one"
            )
    tp, cp, pp = (dense.get(axis, 1) for axis in ("tp", "cp", "pp"))
    dp = math.prod(dense[axis] for axis in data)
    ep, expert_tp = 1, tp
    if "expert" in spec.layouts:
        expert = spec.layout("expert").shape
        (inner,) = expert_axes(spec)["etp"]
        ep, expert_tp = expert.get("ep", 1), expert.get(inner, 1)
    large = [axis for axis in dense if dense[axis] > 1]
    order = next(
        (each for axes in ([*dense], large) for each in ORDERS
         if [axis for axis in each.split("-") if axis in axes] == axes),
        spec.order,
    )  # fmt: skip
    edp, replicas = tp * cp * dp // (ep * expert_tp), dense.get("dp_replicate", 1)
    if edp % replicas:
        raise SpecError(
            f"dp_replicate={replicas}: does not divide the {edp} ranks with the same experts, so "
            "that a step's model does not know how experts are sharded"
        )
    return Sizes(tp, cp, pp, dp, ep, expert_tp, edp, replicas, order)


def expert_axes(spec: GridSpec) -> dict[str, tuple[str, ...]]:
    """The axes of a resolved spec's expert region that are etp, ep and edp, by any names.

    `etp` splits an expert, or `tp` where the region has no etp. Stages have pp's ranks.
    Along all others, such as torchtitan's efsdp and dp_replicate, ranks hold the same experts.
    """
    layout, dense = spec.layouts["expert"], spec.layouts["dense"]
    inner = "etp" if "etp" in layout.shape else "tp"
    stages = {"pp"}
    if "pp" in dense.shape:
        stages |= {axis.name for axis in layout.axes if axis.modes == dense.axis("pp").modes}
    copies = tuple(axis for axis in layout.shape if axis not in ("ep", inner, *stages))
    return {"etp": (inner,), "ep": ("ep",), "edp": copies}


def no_experts(model: Model, given: str) -> str:
    """The refusal of a size of experts for a dense model."""
    return f"{given}: model {model.name!r} has no experts; leave it out"


def _size(name: str) -> Any:
    """An attribute of a config that is one of `Sizes`."""
    return property(attrgetter(f"sizes.{name}"))


@dataclass(frozen=True)
class ParallelConfig:
    """A grid, and how a step is run on it. Its sizes can be read from it as from `Sizes`.

    Args:
        spec: of the grid, resolved.
        microbatch: sequences that go through a stage at once.
        virtual_stages: of a rank, for the interleaved schedule; 1: plain 1F1B.
        recompute: one of `RECOMPUTE`.
        sequence_parallel: activations between tp's layers are split over tp as well.
        zero_stage: one of `ZERO_STAGES`.
        gradient_bytes: of one gradient, as summed over data-parallel ranks.
        overlap: data-parallel communication runs behind forward and backward.
        recompute_layers: of a stage, for which `recompute` holds; None: all.
        tp_overlap: collectives of tp run behind the products beside them, in parts.
        dtype, kernels, dispatch, schedule: of `DTYPES`, `KERNELS`, `DISPATCHES`, `SCHEDULES`.
        imbalance: tokens of the fullest rank's experts, over the mean.

    Raises:
        SpecError: an unknown choice, or a spec that a step's model does not know.

    Example:
        >>> config = ParallelConfig.of(tp=8, pp=4, dp=16, microbatch=2)
        >>> config.world_size, config.shard_size
        (512, 16)
    """

    spec: GridSpec
    microbatch: int = 1
    virtual_stages: int = 1
    recompute: str = "none"
    sequence_parallel: bool = True
    zero_stage: int = 1
    gradient_bytes: int = 4
    overlap: bool = True
    recompute_layers: int | None = None
    tp_overlap: bool = False
    dtype: str = "bf16"
    kernels: str = "fused"
    dispatch: str = "rows"
    schedule: str = "1f1b"
    imbalance: float = 1.0

    sizes: Sizes = field(init=False, repr=False, compare=False)
    """The grid's sizes as a step knows them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", sizes_of(self.spec))
        for key in ("microbatch", "virtual_stages", "gradient_bytes"):
            object.__setattr__(self, key, whole_number(key, getattr(self, key)))
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

    @classmethod
    def of(
        cls,
        *,
        tp: int = 1,
        cp: int = 1,
        pp: int = 1,
        dp: int = 1,
        ep: int = 1,
        etp: int | None = None,
        order: str = ORDERS[0],
        dp_replicate: int = 1,
        **step: Any,
    ) -> ParallelConfig:
        """A config on the grid of these sizes.

        Args:
            tp, cp, pp, dp, ep, etp, order: as `GridSpec.build` takes them.
            dp_replicate: copies of the shards among the dp ranks; 1: no HSDP.
            **step: how a step is run, by the fields of `ParallelConfig`.

        Raises:
            SpecError: the sizes make no grid.
        """
        copies: dict[str, Any] = {} if dp_replicate == 1 else {"dp_replicate": dp_replicate}
        spec = GridSpec.build(tp=tp, cp=cp, pp=pp, dp=dp, ep=ep, etp=etp, order=order, **copies)
        return cls(spec.resolve(tp * cp * pp * dp), **step)

    tp: ClassVar[int] = _size("tp")
    cp: ClassVar[int] = _size("cp")
    pp: ClassVar[int] = _size("pp")
    dp: ClassVar[int] = _size("dp")
    ep: ClassVar[int] = _size("ep")
    expert_tp: ClassVar[int] = _size("expert_tp")
    edp: ClassVar[int] = _size("edp")
    order: ClassVar[str] = _size("order")

    @property
    def world_size(self) -> int:
        """Ranks of the grid."""
        return self.spec.world_size

    @property
    def dp_replicate(self) -> int:
        """Copies of the shards among the dp ranks; 1 where nothing is sharded."""
        return self.sizes.replicas if self.zero_stage else 1

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
        >>> ParallelConfig.of(pp=16).stage_layers(MODELS["llama3-405b"])
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
        if model.batch % (self.dp * self.microbatch):
            times = f"times {self.microbatch} sequences of a microbatch"
            return f"dp={self.dp}: {times} does not divide the batch of {model.batch}"
        if not experts and self.ep > 1:
            return no_experts(model, f"ep={self.ep}")
        if experts and experts % self.ep:
            return f"ep={self.ep}: does not divide {experts} experts"
        if experts and model.expert_width % self.expert_tp:
            return f"etp={self.expert_tp}: does not divide expert_ffn {model.expert_width}"
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
