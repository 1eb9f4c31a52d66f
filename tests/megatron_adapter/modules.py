"""Megatron-core's programs of several modules, on the adapter's grids and on its own.

Each runs twice on the same ranks; what comes out is the same to the last bit. On gloo, with the
stand-ins that the example has for CUDA.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import ModelParallelConfig
from megatron.core.hyper_comm_grid import HyperCommGrid as Theirs
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator
from megatron.core.pipeline_parallel.multimodule_communicator import (
    MultiModulePipelineCommunicator,
)
from megatron.core.process_groups_config import (
    MultiModuleProcessGroupCollection,
    ProcessGroupCollection,
)
from megatron.core.utils import GlobalMemoryBuffer
from torch.overrides import TorchFunctionMode

import commgrid
import megatron_adapter
from commgrid.testing import run_on_ranks
from examples import megatron_gpt
from megatron_adapter import HyperCommGrid as Ours

Kind = Callable[..., Any]
DIMS = ["tp", "cp", "pp", "dp"]


def on_both(function: Callable[[Kind], Any], world: int) -> list[Any]:
    """What a function answers on Megatron's grids, and on the adapter's the same."""

    def both() -> Any:
        run_on_gloo()
        found = [function(kind) for kind in (Theirs, Ours)]
        assert_equal(*found)
        return found[0]

    return run_on_ranks(both, world, timeout=300, check=False)


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_equal(*pair)
    else:
        assert one == other


def run_on_gloo() -> None:
    """Stand-ins for CUDA, and gloo for the nccl that Megatron's communicators ask for."""
    megatron_gpt.run_without_cuda()
    torch.cuda.empty_cache = lambda: None
    for name in ("new_group", "new_subgroups_by_enumeration"):
        make = getattr(dist, name)

        def made(*args: Any, backend: str | None = None, make: Any = make, **more: Any) -> Any:
            return make(*args, backend="gloo" if backend == "nccl" else backend, **more)

        setattr(dist, name, made)


def grid_of(kind: Kind, offset: int = 0, **sizes: int) -> Any:
    """A grid with groups along each of its dims and what schedules ask for besides."""
    grid = kind([sizes.get(dim, 1) for dim in DIMS], list(DIMS), rank_offset=offset)
    for dims in (*DIMS, ["dp", "cp"], ["tp", "pp"]):
        grid.create_pg(dims)
    return grid


def holds(grid: Any) -> bool:
    return bool(grid.is_current_rank_in_grid())


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- the bridge between two grids -------------------------------------------------------


def bridge() -> None:
    on_both(_bridge, 8)


def _bridge(kind: Kind) -> Any:
    """Activations of tp 2 · dp 2 to dp 4 and gradients back, batches being cut and joined."""
    source, target = grid_of(kind, tp=2, dp=2), grid_of(kind, 4, dp=4)
    found = BridgeCommunicator(source, target, comm_dtype=torch.float32)
    whole = [numbers(4, 3, 5, seed=replica) for replica in range(2)]
    rank = dist.get_rank()
    if holds(source):
        mine = whole[rank // 2]
        found.send_forward(mine)
        back = found.recv_backward()
        assert torch.equal(back, 2 * mine)
    else:
        back = found.recv_forward()
        assert torch.equal(back, whole[(rank - 4) // 2].chunk(2)[rank % 2])
        found.send_backward(2 * back)
    _forget(source, target)
    return back


def _forget(*grids: Any) -> None:
    BridgeCommunicator.destroy_broadcast_pgs()
    BridgeCommunicator.destroy_bridge_pgs()
    for grid in grids:
        grid.destroy()
    dist.barrier()


# -- two grids over the same ranks (MIMO) -----------------------------------------------


def colocated() -> None:
    on_both(_colocated, 4)


def _colocated(kind: Kind) -> Any:
    """From dp 4 to tp 2 · dp 2, the gradient back to where it belongs."""
    from megatron.core.models.mimo.comm.colocated_communicator import ColocatedBridgeCommunicator

    source, target = grid_of(kind, dp=4), grid_of(kind, tp=2, dp=2)
    found = ColocatedBridgeCommunicator(source, target)
    rank = dist.get_rank()
    mine = numbers(2, 3, 5, seed=rank).requires_grad_()
    output = found.communicate(mine)
    first = rank // 2 * 2
    expected = torch.cat([numbers(2, 3, 5, seed=first + i) for i in range(2)])
    assert torch.equal(output, expected)
    weight = numbers(4, 3, 5, seed=99)
    (output * weight).sum().backward()
    assert mine.grad is not None
    assert torch.equal(mine.grad, weight[rank % 2 * 2 :][:2])
    found.destroy()
    _forget(source, target)
    return output.detach(), mine.grad


# -- MIMO's own model, trained ----------------------------------------------------------


IMAGE = 60
"""The token that stands for a piece of an image."""


class Encoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = torch.nn.Linear(6, 32)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(pixels))


def mimo() -> None:
    """An encoder on dp 4 and a language model on tp 2 · dp 2, beside the same on one rank."""
    for losses, alone in on_both(_mimo, 4):
        torch.testing.assert_close(losses, alone)
        assert losses[-1] < losses[0] - 0.1


def _mimo(kind: Kind) -> Any:
    from megatron.core import parallel_state

    rank = dist.get_rank()
    parallel_state._GLOBAL_MEMORY_BUFFER = GlobalMemoryBuffer()  # its attention has no other
    grids = {"vision": grid_of(kind, dp=4), "language": grid_of(kind, tp=2, dp=2)}
    losses = _train_mimo(grids)
    _forget(*grids.values())
    group = dist.new_subgroups(1)[0]  # on which a rank is alone
    alone = SimpleNamespace(
        dim_names=[], rank_offset=rank, size=1, get_pg=lambda _: group
    )  # fmt: skip
    return losses, _train_mimo({"vision": alone, "language": alone})


def _train_mimo(grids: dict[str, Any]) -> list[float]:
    """Losses of four steps, of all samples."""
    from megatron.core.models.mimo import MimoModel, MimoModelConfig
    from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    vision, language = grids["vision"], grids["language"]
    model = MimoModel(MimoModelConfig(
        language_model_spec=_language(language),
        modality_submodules_spec={"vision": ModuleSpec(
            module=VisionModalitySubmodules, params={},
            submodules={"encoders": {"own": ModuleSpec(module=Encoder)}},
        )},
        special_token_ids={"vision": IMAGE},
        module_to_grid_map=grids,
    ))  # fmt: skip
    assert len(model.colocated_comms) == (vision is not language)
    owners = {"modality_submodules": vision, "language_model": language}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    parts = [one.get_pg("dp") for one in (language, vision)]
    losses = []
    for step in range(4):
        tokens = torch.randint(0, IMAGE, (4, 8), generator=torch.Generator().manual_seed(step))
        tokens[:, 2:5] = IMAGE
        pixels = numbers(4, 3, 6, seed=step)
        mine, images = (
            whole.chunk(group.size())[group.rank()]
            for whole, group in zip((tokens, pixels), parts, strict=True)
        )
        output, _ = model(
            mine, torch.arange(8).expand_as(mine), labels=mine.roll(-1, 1) % IMAGE,
            modality_inputs={"vision": {"own": {"pixels": images}}},
        )  # fmt: skip
        loss = output.mean() / parts[0].size()
        loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=owners[name.split(".")[0]].get_pg("dp"))
        optimizer.step()
        optimizer.zero_grad()
        found = loss.detach()
        dist.all_reduce(found, group=parts[0])
        losses.append(found.item())
    return losses


def _language(grid: Any) -> Any:
    """Megatron's GPT on a grid's groups."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import ModuleSpec

    found = {name: grid.get_pg(name) for name in ("tp", "cp", "pp", "dp")}
    # Of one rank, as cp's is: nothing of these is used by a dense model of one stage.
    found |= dict.fromkeys(("ep", "expt_tp", "embd", "tp_ep", "expt_dp"), found["cp"])
    collection = ProcessGroupCollection(**found, tp_cp=found["tp"], dp_cp=found["dp"])
    tp = found["tp"].size()
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True,
        tensor_model_parallel_size=tp, hidden_dropout=0.0, attention_dropout=0.0,
        gradient_accumulation_fusion=False, persist_layer_norm=False,
    )  # fmt: skip
    model_parallel_cuda_manual_seed(1, tp_rank=found["tp"].rank(), ep_rank=0, etp_rank=0)
    torch.manual_seed(4)  # the whole weights are drawn, then cut
    return ModuleSpec(module=GPTModel, params={
        "config": config, "transformer_layer_spec": get_gpt_layer_local_spec(), "vocab_size": 64,
        "max_sequence_length": 8, "pre_process": True, "post_process": True,
        "share_embeddings_and_output_weights": False, "position_embedding_type": "rope",
        "pg_collection": collection,
    })  # fmt: skip


# -- a schedule over several modules ----------------------------------------------------


class Model(torch.nn.Module):
    """A layer of the module that this rank is in; fed by the module before."""

    def __init__(self, name: str, config: Any, is_first: bool) -> None:
        super().__init__()
        self.name, self.config, self.is_first = name, config, is_first
        torch.manual_seed(dist.get_rank())
        self.layer = torch.nn.Linear(8, 8)
        self.received: torch.Tensor | None = None

    def set_input_tensor(self, given: Any) -> None:
        for value in (given[0] or {}).values() if given else ():
            self.received = value[0] if isinstance(value, list) else value

    def forward(self, data: torch.Tensor | None) -> dict[str, torch.Tensor]:
        found = data if self.is_first else self.received
        assert found is not None
        return {self.name: torch.tanh(self.layer(found))}


def schedule() -> None:
    losses = on_both(_schedule, 6)
    assert len(losses[-1][0]) == 4
    assert losses[0][0] == []


def _schedule(kind: Kind) -> Any:
    """An encoder of two stages, and of two copies, in front of a language model of two stages."""
    grids = {"encoder": grid_of(kind, pp=2, dp=2), "llm": grid_of(kind, 4, pp=2)}
    name = next(name for name, grid in grids.items() if holds(grid))
    grid = grids[name]
    config: Any = ModelParallelConfig(pipeline_dtype=torch.float32)
    config.variable_seq_lengths, config.hidden_size = True, 8
    config.calculate_per_token_loss = config.fine_grained_activation_offloading = False
    collection = ProcessGroupCollection(
        tp=grid.get_pg("tp"), cp=grid.get_pg("cp"), pp=grid.get_pg("pp"), dp=grid.get_pg("dp"),
        dp_cp=grid.get_pg(["dp", "cp"]),
    )  # fmt: skip
    communicator = MultiModulePipelineCommunicator(
        grids, {"encoder": ["llm"], "llm": []}, config, dim_mapping={"s": 0, "h": 2, "b": 1}
    )
    is_first = name == "encoder" and collection.pp.rank() == 0
    model: Any = Model(name, config, is_first)
    model.model_type = "a test's"
    replica = collection.dp.rank()
    data = iter([numbers(3, 2, 8, seed=10 * step + replica) for step in range(4)])

    def step(iterator: Iterator[torch.Tensor] | None, model: Any) -> Any:
        output = model(next(iterator) if iterator is not None and is_first else None)
        return output, lambda found: (found["llm"].sum(), {"loss": found["llm"].sum().item()})

    reports = schedules.forward_backward_pipelining_without_interleaving(
        forward_step_func=step,
        data_iterator=data,
        model=[model],
        num_microbatches=4,
        seq_length=3,
        micro_batch_size=2,
        p2p_communicator=communicator,
        pg_collection=MultiModuleProcessGroupCollection(
            module_pgs={name: collection},
            language_model_module_name="llm" if name == "llm" else None,
        ),
    )
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)
    _forget(*grids.values())
    return [report["loss"] for report in reports], gradients


# -- weights from one grid to another ---------------------------------------------------


class Unpinned(TorchFunctionMode):
    """There is no pinned memory without CUDA."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return function(*args, **given)


def reshard() -> None:
    """From tp 2 · pp 2 to tp 4, both collections of commgrid's grids, through Megatron's refit."""
    run_on_ranks(_reshard, 4, timeout=300, check=False)


def _reshard() -> None:
    run_on_gloo()
    from megatron.core.resharding.refit import clear_all_caches, swap_model_weights

    source = gpt("source", tp=2, pp=2)
    target = gpt("target", tp=4)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.fill_(7.0)
    with Unpinned():
        swap_model_weights([source], [target], "gloo")
    expected = gpt("again", tp=4)
    found = dict(target.named_parameters())
    for name, parameter in expected.named_parameters():
        assert torch.equal(found[name], parameter), name
    clear_all_caches()
    commgrid.shutdown()


def gpt(name: str, tp: int = 1, pp: int = 1, layers: int = 4, width: int = 32) -> Any:
    """Megatron's GPT on a grid, with weights that are cut from the same whole on every grid."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    grid = megatron_adapter.initialize_model_parallel(
        tp, pp, create_gloo_process_groups=False, name=name
    )
    collection = megatron_adapter.process_group_collection(grid)
    config = TransformerConfig(
        num_layers=layers, hidden_size=width, num_attention_heads=width // 8,
        use_cpu_initialization=True, tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32, hidden_dropout=0.0, attention_dropout=0.0,
        gradient_accumulation_fusion=False, persist_layer_norm=False,
    )  # fmt: skip
    places = SimpleNamespace(tp=collection.tp.rank(), ep=0, etp=collection.expt_tp.rank())
    model_parallel_cuda_manual_seed(1, tp_rank=places.tp, ep_rank=places.ep, etp_rank=places.etp)
    model = GPTModel(
        config=config, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=64,
        max_sequence_length=8, pre_process=grid.is_first("pp"), post_process=grid.is_last("pp"),
        share_embeddings_and_output_weights=False, position_embedding_type="rope",
        pg_collection=collection,
    )  # fmt: skip
    first = grid.get_local_rank("pp") * (layers // pp)
    with torch.no_grad(), contextlib.suppress(StopIteration):
        for key, parameter in model.named_parameters():
            parameter.copy_(_part_of_whole(key, parameter, first, tp, places.tp))
    return model


def _part_of_whole(
    key: str, parameter: torch.Tensor, first: int, tp: int, place: int
) -> torch.Tensor:
    """This rank's part of a weight that depends on the name that it has in the whole model."""
    parts = key.split(".")
    if "layers" in parts:
        at = parts.index("layers") + 1
        parts[at] = str(int(parts[at]) + first)
    dim = getattr(parameter, "partition_dim", -1)
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[dim] *= tp
    seed = sum(ord(letter) * (i + 1) for i, letter in enumerate(".".join(parts)))
    whole = numbers(*shape, seed=seed)
    cut = getattr(parameter, "tensor_model_parallel", False)
    return whole.chunk(tp, dim)[place] if cut else whole
