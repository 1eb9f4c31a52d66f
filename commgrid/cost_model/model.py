"""A transformer as numbers: what it is made of, its parameters, and its arithmetic for one token.

The counts follow Narayanan et al. 2021 (arXiv 2104.04473, section 5.1) for GPT, and the same sums
over the matrices of a layer for gated, grouped-query and expert models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from commgrid.errors import SpecError
from commgrid.layout.axis_names import nearest
from commgrid.layout.ranks import whole_number
from commgrid.planning.yaml import Table, from_file
from commgrid.planning.yaml_keys import check_keys, named

ATTENTION = ("flash", "plain")
"""How attention is computed: in one kernel that keeps no scores, or with scores in memory."""


@dataclass(frozen=True)
class Model:
    """A transformer and the batch it is trained on.

    Args:
        name: what it is called.
        layers, hidden, heads: numbers of layers, of features, and of attention heads.
        vocabulary: tokens that the embedding and the output layer know.
        sequence: tokens of one sequence.
        batch: sequences of one optimizer step, over all ranks.
        ffn: features inside the MLP; None: 4 · hidden.
        kv_heads: heads of keys and values; None: `heads`.
        head_size: features of a head; None: hidden / heads.
        gated: the MLP has three matrices (SwiGLU), not two.
        biases: linear layers and norms have biases, as in GPT; positions are learned then.
        dropout: after attention and the MLP, and in attention.
        tied: embedding and output layer share their weights.
        attention: `flash` or `plain`.
        experts: of each layer; 0: a dense MLP.
        top_k: experts that a token goes through.
        expert_ffn: features inside an expert; None: `ffn`.
        shared_ffn: features of an expert that all tokens go through; 0: there is none.
        dense_layers: how many of a model's first layers have a dense MLP of `ffn` and no experts.
        window: tokens that a sliding window sees; 0: all before it.
        windowed: layers with the window; None: all, where there is one.
        q_lora_rank, kv_lora_rank, qk_rope_head_dim, v_head_dim: of multi-head latent attention, as
            DeepSeek's config.json calls them; `head_size` is its qk_nope_head_dim. None: other
            attention.
        mtp_layers: of multi-token prediction, each with the output layer once more.
        source: where the numbers are from.

    Example:
        >>> gpt = Model("gpt", layers=96, hidden=12288, heads=96, vocabulary=51200,
        ...             sequence=2048, batch=64, biases=True, tied=True)
        >>> print(f"{gpt.parameters / 1e9:.1f}")
        174.6
    """

    name: str
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    batch: int
    ffn: int | None = None
    kv_heads: int | None = None
    head_size: int | None = None
    gated: bool = False
    biases: bool = False
    dropout: bool = False
    tied: bool = False
    attention: str = "flash"
    experts: int = 0
    top_k: int = 0
    expert_ffn: int | None = None
    shared_ffn: int = 0
    dense_layers: int = 0
    window: int = 0
    windowed: int | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    mtp_layers: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        one_on = ("layers", "hidden", "heads", "vocabulary", "sequence", "batch")
        zero_on = ("experts", "top_k", "shared_ffn", "dense_layers", "window", "mtp_layers")
        optional = ("ffn", "kv_heads", "head_size", "expert_ffn", *_LATENT, "windowed")
        for key in (*one_on, *zero_on, *optional):
            given, least = getattr(self, key), 0 if key in (*zero_on, "windowed") else 1
            if given is not None or key not in optional:  # NumPy's numbers would overflow later
                object.__setattr__(self, key, whole_number(key, given, least, _MOST))
        for key in ("gated", "biases", "dropout", "tied"):
            if type(getattr(self, key)) is not bool:
                raise SpecError(f"{key}={getattr(self, key)!r}: expected true or false")
        if self.attention not in ATTENTION:
            raise SpecError(
                f"attention={self.attention!r}: expected {' or '.join(ATTENTION)}"
                f"{nearest(str(self.attention), ATTENTION)}"
            )
        if self.head_size is None and self.hidden % self.heads:
            raise SpecError(
                f"heads={self.heads}: does not divide hidden={self.hidden}; give head_size"
            )
        if self.heads % self.num_kv_heads:
            raise SpecError(
                f"kv_heads={self.num_kv_heads}: does not divide heads={self.heads}; "
                "expected a divisor of it"
            )
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise SpecError(
                f"top_k={self.top_k}: expected a whole number from 1 to experts={self.experts}"
            )
        of_experts = self.top_k or self.expert_ffn or self.shared_ffn or self.dense_layers
        if not self.experts and of_experts:
            raise SpecError("top_k, expert_ffn, shared_ffn and dense_layers are of models with "
                            "experts; give experts as well")  # fmt: skip
        if self.dense_layers > self.layers or (self.windowed or 0) > self.layers:
            raise SpecError(
                f"dense_layers={self.dense_layers}, windowed={self.windowed}: expected at most "
                f"the {self.layers} layers"
            )
        given = [key for key in _LATENT if getattr(self, key) is not None]
        if given and len(given) < len(_LATENT):
            raise SpecError(
                f"{', '.join(given)}: multi-head latent attention has {', '.join(_LATENT)}; give "
                "all of them"
            )

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Model:
        """A model from the mapping that YAML holds: the arguments above.

        Raises:
            SpecError: a key is missing or unknown, or a value does not fit.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        optional = [
            key for key, field in fields.items() if field.default is not dataclasses.MISSING
        ]
        check_keys("", config, [*fields], optional)
        given = {**config, "name": named("", config), "source": str(config.get("source") or "")}
        return cls(**given)

    @classmethod
    def from_yaml(cls, path: str | Path) -> Model:
        """A model from a YAML file.

        Raises:
            SpecError: the file is not there, not YAML, or describes no model.
        """
        return from_file(path, cls.from_dict, "layers: 32")

    def to_dict(self) -> dict[str, Any]:
        """The mapping that `from_dict` reads, without defaults."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.default is dataclasses.MISSING or getattr(self, field.name) != field.default
        }

    @cached_property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @cached_property
    def head(self) -> int:
        """Features of one head."""
        return self.hidden // self.heads if self.head_size is None else self.head_size

    @cached_property
    def width(self) -> int:
        """Features inside the MLP."""
        return 4 * self.hidden if self.ffn is None else self.ffn

    @cached_property
    def expert_width(self) -> int:
        """Features inside an expert."""
        return self.width if self.expert_ffn is None else self.expert_ffn

    @property
    def tokens(self) -> int:
        """Of one optimizer step."""
        return self.batch * self.sequence

    @cached_property
    def attention_shapes(self) -> tuple[tuple[int, int, bool], ...]:
        """The matrices of attention: (inputs, outputs), and whether tp cuts them.

        Query, key and value in one and the output; of latent attention (DeepSeek-AI 2024, arXiv
        2405.04434, section 2.1) what goes down to the ranks, which every rank has, and up again.
        """
        hidden, head = self.hidden, self.head
        if self.q_lora_rank is None or self.kv_lora_rank is None:
            keys = 2 * self.num_kv_heads
            return (hidden, head * (self.heads + keys), True), (head * self.heads, hidden, True)
        rope, value = self.qk_rope_head_dim or 0, self.value_head
        return (
            (hidden, self.q_lora_rank, False),
            (self.q_lora_rank, self.heads * (head + rope), True),
            (hidden, self.kv_lora_rank + rope, False),
            (self.kv_lora_rank, self.heads * (head + value), True),
            (self.heads * value, hidden, True),
        )

    @cached_property
    def attention_parameters(self) -> int:
        """Of one layer: query, key, value and output matrices."""
        return sum(inputs * outputs for inputs, outputs, _ in self.attention_shapes)

    @cached_property
    def key_head(self) -> int:
        """Features of a query and a key in the scores."""
        return self.head + (self.qk_rope_head_dim or 0)

    @cached_property
    def value_head(self) -> int:
        """Features of a value."""
        return self.head if self.v_head_dim is None else self.v_head_dim

    @cached_property
    def seen(self) -> float:
        """Keys that a query sees in the mean of all layers, attention being causal."""
        whole = self.sequence / 2
        if not self.window:
            return whole
        windowed = self.layers if self.windowed is None else self.windowed
        return whole + windowed / self.layers * (min(self.window, whole) - whole)

    @cached_property
    def dense_parameters(self) -> int:
        """Of one layer's MLP; in a layer with experts, of the shared expert and the router."""
        if not self.experts:
            return self._matrices * self.hidden * self.width
        return self._matrices * self.hidden * self.shared_ffn + self.hidden * self.experts

    @cached_property
    def expert_parameters(self) -> int:
        """Of one expert, its biases among them."""
        if not self.experts:
            return 0
        biases = (self._matrices - 1) * self.expert_width + self.hidden if self.biases else 0
        return self._matrices * self.hidden * self.expert_width + biases

    @cached_property
    def small_parameters(self) -> int:
        """Of one layer's norms and biases."""
        if not self.biases:
            return 2 * self.hidden
        width = self.shared_ffn if self.experts else self.width
        mlp = (self._matrices - 1) * width + self.hidden if width else 0
        attention = self.head * (self.heads + 2 * self.num_kv_heads) + self.hidden
        return 4 * self.hidden + attention + mlp

    @cached_property
    def layer_parameters(self) -> int:
        """Of one layer."""
        dense = self.attention_parameters + self.dense_parameters + self.small_parameters
        return dense + self.experts * self.expert_parameters

    @cached_property
    def first_parameters(self) -> int:
        """Of one of the first layers, which has a dense MLP where the others have experts."""
        mlp = self._matrices * self.hidden * self.width
        return self.attention_parameters + mlp + self.small_parameters

    @cached_property
    def embedding_parameters(self) -> int:
        """Of the embedding, or of the output layer."""
        return self.vocabulary * self.hidden

    @cached_property
    def parameters(self) -> int:
        """Of the whole model; as Narayanan et al. 2021, equation 2, for GPT."""
        ends = self.embedding_parameters * (1 if self.tied else 2)
        positions = self.sequence * self.hidden if self.biases else 0
        first = self.dense_layers * (self.first_parameters - self.layer_parameters)
        more = self.mtp_layers * (self.layer_parameters + 2 * self.hidden * self.hidden)
        return self.layers * self.layer_parameters + first + more + ends + positions

    @cached_property
    def active_parameters(self) -> int:
        """Parameters used for one token."""
        layers = self.layers - self.dense_layers + self.mtp_layers
        return self.parameters - layers * (self.experts - self.top_k) * self.expert_parameters

    @cached_property
    def matrix_flops(self) -> float:
        """Of one token's forward through the matrices of one layer: two for each parameter."""
        routed = self.top_k * self._matrices * self.hidden * self.expert_width
        return 2.0 * (self.attention_parameters + self.dense_parameters + routed)

    @cached_property
    def score_flops(self) -> float:
        """Of one token's forward through one layer's attention, as if it were not causal."""
        return 4.0 * self.seen * self.heads * (self.key_head + self.value_head)

    @cached_property
    def flops_per_token(self) -> float:
        """Of forward and backward, as papers count them: three forwards, nothing computed again,
        attention as if it were not causal, and the output layer.

        Korthikanti et al. 2022 (arXiv 2205.05198), appendix A: 72·l·h²(1 + s/6h + V/12lh) for GPT.
        """
        layers = (self.layers + self.mtp_layers) * (self.matrix_flops + self.score_flops)
        return 3.0 * (layers + 2.0 * self.embedding_parameters * (1 + self.mtp_layers))

    @cached_property
    def recomputed_flops_per_token(self) -> float:
        """`flops_per_token` with every layer's forward computed again before its backward.

        Narayanan et al. 2021, equation 3: 96·l·h²(1 + s/6h + V/16lh) for GPT.
        """
        return self.flops_per_token + self.layers * (self.matrix_flops + self.score_flops)

    @property
    def _matrices(self) -> int:
        return 3 if self.gated else 2


_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim")
_MOST = 10**12  # of anything that a model has


MODELS = Table(
    "model ", Path(__file__).with_name("models.yaml"),
    lambda name, row: Model.from_dict({"name": name, **row}),
)  # fmt: skip
"""Models that people train, by name; sequence and batch are those they were trained with."""


def find_model(given: str) -> Model:
    """A built-in model by its name, or one from a YAML file by its path.

    Raises:
        SpecError: there is neither, or the file describes none.

    >>> find_model("llama3-70b").layers
    80
    """
    return MODELS.find(given, Model.from_yaml)
