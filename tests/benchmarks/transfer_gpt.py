"""What `transfer.py` runs on a release of megatron-core: Megatron's GPT, moved by both."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService
from megatron.core.resharding.refit import reshard_model_weights
from torch import nn

import commgrid
from tests.benchmarks.report import run_on_ranks
from tests.benchmarks.transfer import in_turn, runs_of
from tests.megatron_adapter.modules import gpt, run_on_gloo


def on_ranks(world: int, *given: Any) -> list[dict[str, list[float]]]:
    """What every rank measures."""
    return run_on_ranks(on_a_rank, world, *given, timeout=900)


def on_a_rank(
    pair: tuple[dict[str, int], dict[str, int]], layers: int, width: int, repeats: int, peer: str
) -> dict[str, list[float]]:
    """Milliseconds of ours and of theirs, in turn."""
    warnings.simplefilter("ignore")
    run_on_gloo()
    without_pinned_memory()
    source, target = (
        gpt(name, layers=layers, width=width, **sizes)
        for name, sizes in zip(("source", "target"), pair, strict=True)
    )
    grids = [commgrid.get_grid(name) for name in ("source", "target")]
    of_grids = {"source_grid": grids[0], "target_grid": grids[1]}
    views = [
        whole_names(model, grid, layers)
        for model, grid in zip((source, target), grids, strict=True)
    ]
    service = GlooCopyService()
    own = dict(target.named_parameters())
    expected = {name: parameter.detach().clone() for name, parameter in own.items()}
    actions = {
        **runs_of(*views, of_grids),
        peer: lambda: reshard_model_weights([source], [target], service=service),
    }
    spent = in_turn(actions, repeats, own, expected)
    commgrid.shutdown()
    return spent


def whole_names(model: Any, grid: commgrid.HyperCommGrid, layers: int) -> nn.Module:
    """The same parameters by the names that they have in the whole model: stages count from 0."""
    view = nn.Module()
    for name, child in model.named_children():
        if name != "decoder":
            view.add_module(name, child)
    first = grid.get_local_rank("pp") * layers // grid.size("pp")
    view.layers = nn.ModuleDict({str(first + i): one for i, one in enumerate(model.decoder.layers)})
    if model.decoder.final_layernorm is not None:
        view.final_layernorm = model.decoder.final_layernorm
    return view


def without_pinned_memory() -> None:
    """There is none without CUDA, and Megatron's service asks for it."""
    empty = torch.empty

    def made(*args: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        return empty(*args, **more)

    torch.empty = made  # type: ignore[assignment]
