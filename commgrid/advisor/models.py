"""Models that people train, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from commgrid.advisor.model import Model
from commgrid.errors import SpecError
from commgrid.planning.names import nearest


def _gpt(name: str, layers: int, hidden: int, heads: int, batch: int) -> Model:
    return Model(
        name, layers, hidden, heads, vocabulary=51200, sequence=2048, batch=batch,
        biases=True, dropout=True, tied=True,
        source="Korthikanti et al. 2022, arXiv 2205.05198, Table 3",
    )  # fmt: skip


def _llama(name: str, layers: int, hidden: int, heads: int, ffn: int, **rest: Any) -> Model:
    return Model(
        name, layers, hidden, heads, vocabulary=128256, sequence=8192, ffn=ffn, kv_heads=8,
        gated=True, source="Llama team 2024, arXiv 2407.21783, Table 3", **rest,
    )  # fmt: skip


_ALL = (
    _gpt("gpt-22b", 48, 6144, 64, batch=4),
    _gpt("gpt-175b", 96, 12288, 96, batch=64),
    _gpt("gpt-530b", 105, 20480, 128, batch=280),
    _gpt("gpt-1t", 128, 25600, 160, batch=512),
    _llama("llama3-8b", 32, 4096, 32, 14336, batch=1024),
    _llama("llama3-70b", 80, 8192, 64, 28672, batch=1024),
    _llama("llama3-405b", 126, 16384, 128, 53248, batch=2048),
    Model(
        "nemotron-4-340b", 96, 18432, 96, vocabulary=256000, sequence=4096, batch=2304, ffn=73728,
        kv_heads=8, source="Nemotron-4 340B technical report 2024, arXiv 2406.11704, Table 1",
    ),
    Model(
        "mixtral-8x7b", 32, 4096, 32, vocabulary=32000, sequence=4096, batch=256, ffn=14336,
        kv_heads=8, head_size=128, gated=True, experts=8, top_k=2,
        source="config.json of mistralai/Mixtral-8x7B-v0.1; Jiang et al. 2024, arXiv 2401.04088",
    ),
    Model(
        "mixtral-8x22b", 56, 6144, 48, vocabulary=32000, sequence=4096, batch=256, ffn=16384,
        kv_heads=8, head_size=128, gated=True, experts=8, top_k=2,
        source="config.json of mistralai/Mixtral-8x22B-v0.1",
    ),
    Model(
        "qwen3-235b-a22b", 94, 4096, 64, vocabulary=151936, sequence=4096, batch=2048, ffn=12288,
        kv_heads=4, head_size=128, gated=True, experts=128, top_k=8, expert_ffn=1536,
        source="config.json of Qwen/Qwen3-235B-A22B",
    ),
)  # fmt: skip

MODELS: Mapping[str, Model] = MappingProxyType({model.name: model for model in _ALL})
"""The built-in ones, by name; sequence and batch are those they were trained with."""


def find_model(given: str) -> Model:
    """A built-in model by its name, or one from a YAML file by its path.

    Raises:
        SpecError: there is neither, or the file describes none.

    >>> find_model("llama3-70b").layers
    80
    """
    if given in MODELS:
        return MODELS[given]
    if given.endswith((".yaml", ".yml")) or "/" in given:
        return Model.from_yaml(given)
    raise SpecError(
        f"model {given!r}: expected one of {', '.join(MODELS)}, or the path of a YAML file"
        f"{nearest(given, MODELS)}"
    )
