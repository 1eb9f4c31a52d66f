"""Train megatron-core's own GPTModel, through its own schedule, on commgrid's groups.

    torchrun --standalone --nproc-per-node 4 examples/megatron_gpt.py --tp 2 --pp 2
    torchrun --standalone --nproc-per-node 4 examples/megatron_gpt.py --experts 4 --ep 2 \\
        --tp 2 --etp 1 --sequence-parallel          # which Megatron wants of experts beside tp

The program is one for megatron-core; the lines marked <- commgrid are all that was added. With
--groups megatron they do nothing, and the losses are the same to the last bit. Needs
megatron-core 0.15.3 to 0.20. There is one thing to learn: a token is 3 times the one before + 1.

On a machine without CUDA a few stand-ins make megatron-core run (the end of this file); they
have nothing to do with commgrid.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what is not installed beside it
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils

import commgrid  # <- commgrid
import megatron_adapter  # <- commgrid

VOCABULARY, LENGTH = 64, 16

# Megatron's router asks whether this is None, but only Transformer Engine gives it a value.
moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)


def start(args: argparse.Namespace) -> Any:
    """torch.distributed, Megatron's groups, and with --groups collection a collection of them."""
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise SystemExit("start it with torchrun: " + (__doc__ or "").splitlines()[2].strip())
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    sizes = {
        "tensor_model_parallel_size": args.tp,
        "pipeline_model_parallel_size": args.pp,
        "virtual_pipeline_model_parallel_size": args.vpp,
        "expert_model_parallel_size": args.ep,
        "expert_tensor_parallel_size": args.etp,
    }
    if args.groups == "collection":  # no state in megatron-core at all: every group is handed on
        grid = megatron_adapter.initialize_model_parallel(**sizes)  # <- commgrid
        parallel_state._set_global_memory_buffer()  # its attention takes no other
        return megatron_adapter.process_group_collection(grid)  # <- commgrid
    if args.groups == "commgrid":
        megatron_adapter.install()  # <- commgrid: the next line makes a grid
    parallel_state.initialize_model_parallel(**sizes)
    return None


def build(args: argparse.Namespace, collection: Any) -> tuple[list[torch.nn.Module], Any, Any]:
    """The model's chunks on this rank, wrapped for data parallelism, its optimizer and config."""
    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=32,
        num_attention_heads=4,
        add_bias_linear=not args.experts,
        num_moe_experts=args.experts,
        moe_ffn_hidden_size=128 if args.experts else None,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="aux_loss" if args.experts else "none",
        moe_aux_loss_coeff=0.01 if args.experts else 0.0,
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=args.vpp,
        expert_model_parallel_size=args.ep,
        expert_tensor_parallel_size=args.etp,
        sequence_parallel=args.sequence_parallel,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        overlap_p2p_comm=args.vpp is not None,
        batch_p2p_comm=args.vpp is None,
        deallocate_pipeline_outputs=torch.cuda.is_available(),  # gloo may still be sending them
        cross_entropy_loss_fusion=True,  # which takes its group from the collection
    )
    torch.manual_seed(args.seed)
    model_parallel_cuda_manual_seed(args.seed, **_positions(collection))
    handed = {"pg_collection": collection} if collection is not None else {}
    pp_group = collection.pp if collection else parallel_state.get_pipeline_model_parallel_group()
    stages = args.vpp or 1
    chunks: list[torch.nn.Module] = []
    for stage in range(stages):
        first = pp_group.rank() == 0 and stage == 0
        last = pp_group.rank() == pp_group.size() - 1 and stage == stages - 1
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(num_experts=args.experts),
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=True,
            vp_stage=stage if args.vpp else None,
            **handed,
        )
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=args.distributed_optimizer)
        if torch.cuda.is_available():
            model.cuda()
        chunks.append(DistributedDataParallel(config, ddp, model, **handed))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=1e-3, use_distributed_optimizer=args.distributed_optimizer, clip_grad=1.0
        ),
        chunks,
        **(handed | {"use_gloo_process_groups": False} if handed else {}),
    )
    config.finalize_model_grads_func = partial(finalize_model_grads, **handed)
    return chunks, optimizer, config


def _positions(collection: Any) -> dict[str, int]:
    """This rank's positions in tp, ep and etp, which Megatron's random states depend on."""
    if collection is None:
        return {}
    groups = {"tp_rank": collection.tp, "ep_rank": collection.ep, "etp_rank": collection.expt_tp}
    return {name: group.rank() for name, group in groups.items()}


def batches(args: argparse.Namespace, step: int, data_rank: int) -> Iterator[torch.Tensor]:
    """The microbatches of a step, (2, LENGTH + 1) tokens each, others on every dp rank."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    first = data_rank * args.microbatches
    for number in range(first, first + args.microbatches):
        generator = torch.Generator().manual_seed(args.seed + 1000 * step + number)
        tokens = [torch.randint(VOCABULARY, (2,), generator=generator)]
        for _ in range(LENGTH):
            tokens.append((3 * tokens[-1] + 1) % VOCABULARY)
        yield torch.stack(tokens, 1).to(device)


def forward_step(data: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple[Any, Any]:
    """What Megatron's schedule calls for each microbatch: the output, and how it becomes a loss."""
    tokens = next(data)
    positions = torch.arange(LENGTH, device=tokens.device).expand(len(tokens), -1)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=tokens.device).triu(1)
    output = model(tokens[:, :-1], positions, mask[None, None], labels=tokens[:, 1:])

    def loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = losses.mean()
        return mean, {"loss": mean.detach().clone()}  # the schedule divides in place

    return output, loss


def train(args: argparse.Namespace) -> list[float]:
    """The loss of every step, on ranks of the last stage; elsewhere 0."""
    if not torch.cuda.is_available():
        run_without_cuda()
    collection = start(args)
    chunks, optimizer, config = build(args, collection)
    dp = collection.dp if collection else parallel_state.get_data_parallel_group()
    pp = collection.pp if collection else parallel_state.get_pipeline_model_parallel_group()
    handed: dict[str, Any] = {} if collection is None else {"pg_collection": collection}
    if collection is not None and pp.size() > 1:
        handed["p2p_communicator"] = P2PCommunicator(pp, config)
    # Without arguments it asks the global state, which with a collection there is none of.
    schedule = get_forward_backward_func(*((pp.size(), args.vpp) if handed else ()))
    losses = []
    for step in range(args.steps):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        data = [batches(args, step, dp.rank()) for _ in chunks]
        reports = schedule(
            forward_step_func=forward_step,
            data_iterator=data if args.vpp else data[0],
            model=chunks if args.vpp else chunks[0],
            num_microbatches=args.microbatches,
            seq_length=LENGTH,
            micro_batch_size=2,
            **handed,
        )
        optimizer.step()
        losses.append(sum(float(report["loss"]) for report in reports) / args.microbatches)
        if dist.get_rank() == dist.get_world_size() - 1:
            print(f"step {step + 1:3}  loss {losses[-1]:.6f}", flush=True)
            if args.metrics:
                with Path(args.metrics).open("a" if step else "w") as lines:
                    print(json.dumps({"step": step + 1, "loss": losses[-1]}), file=lines)
    return losses


def finish(args: argparse.Namespace) -> None:
    """Ends Megatron's state."""
    if args.groups == "collection":
        megatron_adapter.destroy_model_parallel()  # <- commgrid
    else:
        parallel_state.destroy_model_parallel()
    megatron_adapter.uninstall()  # <- commgrid


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--groups",
        choices=("commgrid", "megatron", "collection"),
        default="commgrid",
        help="whose groups: commgrid's behind Megatron's state (default), Megatron's own, or "
        "commgrid's in a ProcessGroupCollection that is handed to every part",
    )
    add("--tp", type=int, default=1, help="tensor-parallel size (default 1)")
    add("--pp", type=int, default=1, help="pipeline-parallel size (default 1)")
    add("--vpp", type=int, help="virtual stages of each rank (default: no interleaving)")
    add("--ep", type=int, default=1, help="expert-parallel size (default 1)")
    add("--etp", type=int, help="expert tensor-parallel size (default: as --tp)")
    add("--experts", type=int, help="experts of each layer (default: a dense model)")
    add("--sequence-parallel", action="store_true", help="Megatron's sequence parallelism")
    add("--distributed-optimizer", action="store_true", help="Megatron's distributed optimizer")
    add("--layers", type=int, default=4, help="transformer layers (default 4)")
    add("--microbatches", type=int, default=4, help="microbatches a step (default 4)")
    add("--steps", type=int, default=5, help="optimizer steps (default 5)")
    add("--seed", type=int, default=0, help="of weights and tokens (default 0)")
    add("--metrics", metavar="FILE", help="write a JSON line a step: step, loss")
    args = parser.parse_args(argv)
    sizes = {axis: getattr(args, axis) for axis in ("tp", "pp", "ep", "etp")}
    vars(args).update(commgrid.audit_sizes(**sizes))  # <- commgrid: while `commgrid audit` runs
    return args


# -- megatron-core without CUDA ---------------------------------------------------------


class Norm(torch.nn.LayerNorm):
    """torch's LayerNorm as Megatron's, its parameters marked for sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


class Stream:
    """A CUDA stream, and its events, that have nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def synchronize(self, *_: Any) -> Stream:
        return self

    wait_stream = wait_event = record_event = synchronize


class OnTheCPU(TorchFunctionMode):
    """Makes on the CPU what is to be on CUDA; tensors say they are CUDA's when asked their type."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function in (torch.Tensor.cuda, torch.Tensor.record_stream):
            return args[0]
        found = function(*args, **kwargs)
        if function is torch.Tensor.type and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.")  # the distributed optimizer goes by it
        return found


def run_without_cuda() -> None:
    """Answers what megatron-core asks CUDA for, so that it runs on the CPU without dropout."""
    cuda: Any = torch.cuda
    if cuda.Stream is Stream:
        return
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.moe import shared_experts

    torch.compiler.set_stance("force_eager")  # compiling takes longer than training here
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    warnings.simplefilter("ignore", FutureWarning)
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = lambda *_: None
    cuda.Stream = Stream
    cuda.current_stream = cuda.default_stream = Stream
    cuda.stream = lambda _: nullcontext()
    cuda.get_rng_state = random._get_cuda_rng_state = lambda *_, **__: torch.zeros(1)
    cuda.set_rng_state = random._set_cuda_rng_state = lambda *_, **__: None
    torch_norm.WrappedTorchNorm.__new__ = lambda cls, *args, **more: Norm(*args, **more)
    shared_experts.is_te_min_version = lambda *_: False
    exchange = dist.all_to_all_single

    def all_to_all_single(
        output: Any,
        given: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        **more: Any,
    ) -> Any:
        splits = (output_split_sizes, input_split_sizes)
        lists = (None if sizes is None else [int(size) for size in sizes] for sizes in splits)
        return exchange(output, given, *lists, **more)

    dist.all_to_all_single = torch.distributed.all_to_all_single = all_to_all_single
    OnTheCPU().__enter__()


if __name__ == "__main__":
    arguments = parse()
    try:
        train(arguments)
    except commgrid.CommGridError as error:  # <- commgrid
        sys.exit(f"{type(error).__name__}: {error}")
    finish(arguments)
    dist.destroy_process_group()
