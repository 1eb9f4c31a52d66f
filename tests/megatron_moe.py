"""megatron-core's mixture of experts over a commgrid grid, on the CPU as well.

megatron-core asks CUDA for its streams and current device; `prepare` answers where there is none,
and changes nothing else, so that times can be compared.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import commgrid
import megatron_adapter
from commgrid.expert import MoELayer
from tests import megatron_layers


class Stream:
    """A stream or an event where all is done already."""

    def __call__(self, *_: Any) -> Stream:
        return self

    wait_stream = wait_event = record_event = synchronize = __call__


def prepare(grid: commgrid.HyperCommGrid) -> None:
    """Makes megatron-core's experts run in this process, with the grid's groups."""
    megatron_layers.prepare(grid.get_group("tp"))
    warnings.simplefilter("ignore")
    if torch.cuda.is_available():
        return
    from megatron.core.transformer.moe import moe_utils

    cuda: Any = torch.cuda
    cuda.Stream = cuda.current_stream = Stream
    cuda.stream = lambda _: nullcontext()
    moe_utils.te_general_gemm = None
    if getattr(dist.all_to_all_single, "takes_tensors", False):
        return
    exchange = dist.all_to_all_single

    def all_to_all_single(
        output: Any, given: Any, output_split_sizes: Any = None, input_split_sizes: Any = None,
        **more: Any,
    ) -> Any:  # fmt: skip
        """On CUDA Megatron makes numbers of these tensors; gloo wants numbers too."""
        sizes = [
            one.tolist() if isinstance(one, torch.Tensor) else one
            for one in (output_split_sizes, input_split_sizes)
        ]
        return exchange(output, given, *sizes, **more)

    gather, add = dist.all_gather, dist.reduce_scatter

    def all_gather(parts: Any, given: Any, group: Any = None, **more: Any) -> Any:
        """Also of tensors of different lengths, which gloo does not gather."""
        sizes = [len(part) for part in parts] if given.dim() else []
        if len(set(sizes)) <= 1:
            return gather(parts, given, group, **more)
        whole = torch.cat(parts)
        exchange(whole, torch.cat([given] * len(parts)), sizes, [len(given)] * len(parts), group)
        for part, found in zip(parts, torch.split(whole, sizes), strict=True):
            part.copy_(found)
        return None

    def reduce_scatter(own: Any, parts: Any, group: Any = None, **more: Any) -> Any:
        """Also of tensors of different lengths."""
        sizes = [len(part) for part in parts]
        if len(set(sizes)) <= 1:
            return add(own, parts, group=group, **more)
        found = own.new_empty(len(parts), *own.shape)
        exchange(found.flatten(0, 1), torch.cat(parts), [len(own)] * len(parts), sizes, group)
        own.copy_(found.sum(0))
        return None

    all_to_all_single.takes_tensors = True  # type: ignore[attr-defined]
    dist.all_to_all_single = all_to_all_single
    dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter


def config(grid: commgrid.HyperCommGrid, ours: MoELayer, **more: Any) -> Any:
    """Megatron's configuration of a layer like ours."""
    from megatron.core.transformer import TransformerConfig

    experts, router = ours.experts, ours.router
    return TransformerConfig(
        num_layers=1, hidden_size=ours.hidden, num_attention_heads=8,
        ffn_hidden_size=experts.ffn_hidden, moe_ffn_hidden_size=experts.ffn_hidden,
        num_moe_experts=experts.num_experts, moe_router_topk=router.top_k,
        moe_token_dispatcher_type="alltoall", add_bias_linear=False, bias_activation_fusion=False,
        activation_func=experts.activation, gated_linear_unit=experts.gated,
        tensor_model_parallel_size=grid.size("tp"), expert_model_parallel_size=grid.size("ep"),
        expert_tensor_parallel_size=grid.size("etp"),
        sequence_parallel=grid.size("tp") > 1, use_cpu_initialization=True,
        perform_initialization=False, params_dtype=experts.up.dtype,
        moe_router_dtype="fp64" if experts.up.dtype == torch.float64 else "fp32",
        gradient_accumulation_fusion=False, **more,
    )  # fmt: skip


def layer(grid: commgrid.HyperCommGrid, ours: MoELayer, **more: Any) -> nn.Module:
    """megatron-core's MoELayer of the same sizes and weights as ours."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer as TheirLayer

    spec = get_moe_module_spec(
        use_te=False, num_experts=ours.experts.num_experts, moe_grouped_gemm=False
    )
    theirs: nn.Module = TheirLayer(
        config(grid, ours, **more), spec.submodules, layer_number=1,
        pg_collection=megatron_adapter.process_group_collection(grid),
    )  # fmt: skip
    with torch.no_grad():
        for mine, other in pairs(ours, theirs):
            other.copy_(mine.view(other.shape))
    return theirs


def data_parallel(grid: commgrid.HyperCommGrid, layer: Any) -> Any:
    """Megatron's wrapper that keeps gradients in flat buffers."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    return DistributedDataParallel(
        layer.config, DistributedDataParallelConfig(), layer,
        pg_collection=megatron_adapter.process_group_collection(grid),
    )  # fmt: skip


def pairs(ours: MoELayer, theirs: Any) -> list[tuple[torch.Tensor, nn.Parameter]]:
    """The same weights of both, those of ours as views of its parameters."""
    found = [(ours.router.weight.detach(), theirs.router.weight)]
    for e, expert in enumerate(theirs.experts.local_experts):
        found.append((ours.experts.up.detach()[e], expert.linear_fc1.weight))
        found.append((ours.experts.down.detach()[e], expert.linear_fc2.weight))
    if ours.shared is not None:
        halves = [w.detach() for w in (ours.shared.gate, ours.shared.up) if w is not None]
        found.append((torch.cat(halves), theirs.shared_experts.linear_fc1.weight))
        found.append((ours.shared.down.detach(), theirs.shared_experts.linear_fc2.weight))
        if ours.shared.scale is not None:
            found.append((ours.shared.scale.detach(), theirs.shared_experts.gate_weight))
    return found
