"""A transformer as numbers: parameters and operations against papers and published counts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from commgrid.cost_model.config import ParallelConfig
from commgrid.cost_model.model import MODELS, Model, find_model
from commgrid.errors import SpecError

GPT = Model(
    "gpt", layers=96, hidden=12288, heads=96, vocabulary=51200, sequence=2048, batch=64,
    biases=True, dropout=True, tied=True,
)  # fmt: skip
NEEDED = "name: a\nlayers: 2\nhidden: 8\nheads: 2\nvocabulary: 16\nsequence: 4\nbatch: 2\n"


def test_parameters_are_those_of_the_paper() -> None:
    """Narayanan et al. 2021, equation 2: 12·l·h²(1 + 13/12h + (V + s)/12lh)."""
    layers, hidden, vocabulary, sequence = GPT.layers, GPT.hidden, GPT.vocabulary, GPT.sequence
    inside = 1 + 13 / (12 * hidden) + (vocabulary + sequence) / (12 * layers * hidden)
    assert GPT.parameters == pytest.approx(12 * layers * hidden**2 * inside, rel=1e-12)


def test_operations_are_those_of_the_papers() -> None:
    """Korthikanti et al. 2022, appendix A, and Narayanan et al. 2021, equation 3."""
    layers, hidden, vocabulary, sequence = GPT.layers, GPT.hidden, GPT.vocabulary, GPT.sequence
    whole = layers * hidden**2
    once = 1 + sequence / (6 * hidden) + vocabulary / (12 * layers * hidden)
    again = 1 + sequence / (6 * hidden) + vocabulary / (16 * layers * hidden)
    assert GPT.flops_per_token == pytest.approx(72 * whole * once, rel=1e-12)
    assert GPT.recomputed_flops_per_token == pytest.approx(96 * whole * again, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        # As the models' own pages count them.
        ("gpt-22b", 22.07, 22.07),
        ("gpt-175b", 174.6, 174.6),
        ("gpt-530b", 529.6, 529.6),
        ("gpt-1t", 1008.0, 1008.0),
        ("llama3-8b", 8.03, 8.03),
        ("llama3-70b", 70.55, 70.55),
        ("llama3-405b", 405.85, 405.85),
        ("nemotron-4-340b", 341.0, 341.0),
        ("mixtral-8x22b", 140.6, 39.15),
        ("qwen3-235b-a22b", 235.1, 22.2),
    ],
)
def test_built_in_models_have_their_published_parameters(
    name: str, billions: float, active: float
) -> None:
    model = MODELS[name]
    assert model.name == name
    assert model.source
    assert model.parameters / 1e9 == pytest.approx(billions, rel=1e-3)
    assert model.active_parameters / 1e9 == pytest.approx(active, rel=1e-3)


def test_parameters_by_listing_every_matrix() -> None:
    """A small gated model with grouped queries and experts, tensor by tensor."""
    model = Model(
        "small", layers=3, hidden=16, heads=4, vocabulary=32, sequence=8, batch=2, ffn=24,
        kv_heads=2, head_size=8, gated=True, experts=4, top_k=2, expert_ffn=12, shared_ffn=20,
    )  # fmt: skip
    query, key = (16, 4 * 8), (16, 2 * 8)
    layer = [query, key, key, (4 * 8, 16), (16, 4), (16,), (16,)]
    layer += [(16, 20), (16, 20), (20, 16)] + 4 * [(16, 12), (16, 12), (12, 16)]
    shapes = 3 * layer + 2 * [(32, 16)]
    assert model.parameters == sum(shape[0] * (shape[1:] or (1,))[0] for shape in shapes)
    assert model.parameters - model.active_parameters == 3 * 2 * 3 * 16 * 12


def test_numbers_of_numpy_do_not_overflow() -> None:
    """Its int32 wraps around above two billion, as parameters and operations are."""
    big = MODELS["llama3-405b"]
    counted = ("layers", "hidden", "heads", "vocabulary", "sequence", "batch", "ffn")
    model = replace(big, **{key: np.int32(getattr(big, key)) for key in counted})
    assert (model, model.parameters) == (big, big.parameters)
    config = ParallelConfig.of(dp=2, microbatch=np.int32(2), gradient_bytes=np.int32(4))
    assert (type(config.microbatch), type(config.gradient_bytes)) == (int, int)
    with pytest.raises(SpecError, match=r"microbatch=0: expected a whole number from 1 on"):
        ParallelConfig.of(dp=2, microbatch=0)


def test_yaml_comes_back(tmp_path: Path) -> None:
    import yaml

    for model in MODELS.values():
        path = tmp_path / f"{model.name}.yaml"
        path.write_text(yaml.safe_dump(model.to_dict()))
        assert find_model(str(path)) == model


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("layer: 2", r"layer: unknown key, expected some of .*; did you mean 'layers'\?"),
        ("heads: 3", "heads=3: does not divide hidden=8; give head_size"),
        ("kv_heads: 4", "kv_heads=4: does not divide heads=2"),
        ("layers: 0", "layers=0: expected a whole number from 1 on"),
        ("batch: true", "batch=True: expected a whole number"),
        ("gated: 1", "gated=1: expected true or false"),
        ("attention: flush", r"attention='flush': .*; did you mean 'flash'\?"),
        ("{experts: 4, top_k: 5}", "top_k=5: expected a whole number from 1 to experts=4"),
        ("top_k: 2", "top_k, expert_ffn, shared_ffn and dense_layers are of models with experts"),
        ("dense_layers: 2", "top_k, expert_ffn, shared_ffn and dense_layers are of models with"),
        ("windowed: 1000", "windowed=1000: expected at most the"),
        ("q_lora_rank: 8", "q_lora_rank: multi-head latent attention has q_lora_rank, kv_lora_"),
        ("{batch: null}", "batch=None: expected a whole number"),
    ],
)
def test_bad_models_are_refused(tmp_path: Path, change: str, said: str) -> None:
    import yaml

    config = yaml.safe_load(NEEDED) | yaml.safe_load(change)
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(SpecError, match=said) as refused:
        Model.from_yaml(path)
    assert str(path) in str(refused.value)


def test_what_is_missing_or_unknown_is_named() -> None:
    with pytest.raises(SpecError, match="batch: missing; expected name, layers, hidden"):
        Model.from_dict({"name": "a", "layers": 1, "hidden": 8, "heads": 1, "vocabulary": 1,
                         "sequence": 1})  # fmt: skip
    with pytest.raises(SpecError, match=r"did you mean 'llama3-70b'\?"):
        find_model("llama-70b")
    with pytest.raises(SpecError, match=r"none\.yaml: there is no such file"):
        find_model("none.yaml")
