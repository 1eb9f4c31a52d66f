"""train_gpt's trainer: the model, what reduces its gradients, its optimizer, and what they do."""

from __future__ import annotations

import argparse
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import commgrid
from commgrid import checkpoint
from commgrid.collectives import all_reduce, broadcast
from commgrid.data_parallel import (
    GradientReducer,
    ShardedOptimizer,
    clip_gradients,
    gradient_norm,
    reduce_partial_gradients,
)
from commgrid.pipeline import Pipeline
from commgrid.tensor_parallel import (
    initialize_parameters,
    set_random_seed,
    vocab_parallel_cross_entropy,
)
from gpt_training.data import Microbatch, own_microbatches
from gpt_training.flags import refuse
from gpt_training.model import VOCABULARY, Part, build

MODEL_FLAGS = (
    "layers", "hidden", "heads", "kv_heads", "seq_len", "tie_embeddings", "experts", "top_k",
)  # fmt: skip
"""Those that a checkpoint must have been saved with."""
CURVE_FLAGS = (
    "seed", "batch_size", "clip_grad", "lr", "warmup", "lr_decay", "lr_decay_steps", "min_lr",
    "held_out", "packed",
)  # fmt: skip
"""Those that may change at a checkpoint, and then the curve is not that of a run without it."""


def own_device() -> torch.device:
    """Where this rank computes."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Trainer:
    """Model, what reduces its gradients, pipeline and optimizer, and the steps they take."""

    def __init__(self, args: argparse.Namespace, grid: commgrid.HyperCommGrid) -> None:
        self.args, self.grid = args, grid
        self.changed: list[str] = []
        """Flags of the curve that are others than those the run resumed from was given."""
        self.device = own_device()
        self.chunks = build(args, grid)
        for chunk in self.chunks:
            initialize_parameters(chunk, args.seed)
        self.model = nn.ModuleList(self.chunks).to(self.device)
        set_random_seed(args.seed)  # of dropout: the same on the ranks of a tp group
        options: dict[str, Any] = {
            "lr": args.lr, "weight_decay": 0.01, "fused": self.device.type == "cuda" or None
        }  # fmt: skip
        self.reducer: GradientReducer | None = None
        self.optimizer: torch.optim.Optimizer
        if args.fsdp:
            for chunk in self.chunks:
                shard(chunk, args, grid)
            self.optimizer = torch.optim.AdamW(by_mesh(self.model), **options)
        else:
            self.reducer = GradientReducer(self.model, shard=args.zero1)
            if args.zero1 or args.dtype == "bf16":  # which also keeps bf16 weights in fp32
                self.optimizer = ShardedOptimizer(self.reducer, torch.optim.AdamW, **options)
            else:
                self.optimizer = torch.optim.AdamW(self.model.parameters(), **options)
        self.pipeline = Pipeline(
            self.chunks, args.schedule, num_microbatches=args.microbatches,
            loss=partial(vocab_parallel_cross_entropy, vocabulary=VOCABULARY, reduction="sum"),
            reducer=self.reducer,
        )  # fmt: skip

    # -- what it does -------------------------------------------------------------------

    def step(self, step: int, batch: Tensor) -> tuple[float, float]:
        """One optimizer step on the whole batch, (batch_size, seq_len + 1): loss and norm."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.args)
        mine = own_microbatches(batch, self.args, self.grid, self.device)
        losses = self.pipeline.step(
            [one.tokens for one in mine], [one.targets for one in mine], kwargs=beside(mine)
        )
        tokens = batch[:, 1:].numel()
        norm = self.reduce(tokens)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.mean(losses, tokens), norm.item()

    def evaluate(self, batches: list[Tensor]) -> float:
        """The mean loss over whole batches, (batch_size, seq_len + 1) each; trains nothing."""
        mine = [
            one for b in batches for one in own_microbatches(b, self.args, self.grid, self.device)
        ]
        self.model.eval()
        losses = self.pipeline.evaluate(
            [one.tokens for one in mine], [one.targets for one in mine], kwargs=beside(mine)
        )
        self.model.train()
        return self.mean(losses, sum(batch[:, 1:].numel() for batch in batches))

    def logits(self, one: Microbatch) -> Tensor | None:
        """This rank's part of a microbatch's, (sequence, batch, part); None: not the last stage."""
        self.model.eval()
        outputs = self.pipeline.forward([one.tokens], kwargs=beside([one]))
        self.model.train()
        return None if outputs is None else outputs[0]

    # -- its parts ----------------------------------------------------------------------

    def mean(self, losses: Tensor | None, tokens: int) -> float:
        """Of the losses summed on the last stages, each over its tokens; on all ranks."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if losses is not None:  # on the last stage
            total += all_reduce(losses.double().sum(), "dp_cp")
        total = broadcast(total, "pp", source=self.grid.size("pp") - 1)
        return total.item() / tokens

    def reduce(self, tokens: int) -> Tensor:
        """Averages gradients over all tokens of the step, and clips; their norm before that."""
        clip = self.args.clip_grad
        if self.reducer is not None:
            self.reducer.finish(count=tokens / self.grid.size("dp_cp"))
            return self.reducer.clip_gradients(clip) if clip else self.reducer.gradient_norm()
        reduce_partial_gradients(self.model)  # FSDP has summed them over the data axes
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(tokens)
        return clip_gradients(self.model, clip) if clip else gradient_norm(self.model)

    # -- checkpoints --------------------------------------------------------------------

    def save(self, step: int) -> None:
        """Writes a checkpoint of the step just taken."""
        flags = {flag: getattr(self.args, flag) for flag in MODEL_FLAGS}
        curve = {flag: getattr(self.args, flag) for flag in CURVE_FLAGS}
        checkpoint.save(
            self.args.save, step, self.chunks, self.optimizer,
            extra={"flags": flags, "curve": curve}, keep=self.args.keep,
            background=self.args.save_in_background and step < self.args.steps,
        )  # fmt: skip

    def keep(self, step: int) -> None:
        """Keeps the step just taken in memory, for when other ranks are gone."""
        checkpoint.keep(step, self.chunks, self.optimizer)

    def resume(self) -> int:
        """Loads the last checkpoint; the step it is of.

        0 where there is none yet in the folder that --save writes to: a launcher that restarts its
        workers gives every start the same command, the first one too.
        """
        if self.args.resume == self.args.save and not checkpoint.steps(self.args.resume):
            return 0
        found = checkpoint.load(self.args.resume, self.chunks, self.optimizer)
        for flag, saved in found.extra.get("flags", {}).items():
            if saved != getattr(self.args, flag, saved):
                refuse(
                    f"--resume {self.args.resume}: saved with {spelled(flag)} {saved}, "
                    f"not {getattr(self.args, flag)}"
                )
        self.changed = [
            f"{spelled(flag)} {getattr(self.args, flag)} (was {saved})"
            for flag, saved in found.extra.get("curve", {}).items()
            if getattr(self.args, flag, None) not in (saved, None)
        ]
        self.go_on_from(found.step)
        return found.step

    def go_on_from(self, step: int) -> None:
        """After a step that another trainer has done: not with its dropout masks again."""
        set_random_seed(self.args.seed * 1_000_003 + step)


def spelled(flag: str) -> str:
    """A flag as it is typed."""
    return f"--{flag.replace('_', '-')}"


def beside(microbatches: list[Microbatch]) -> list[dict[str, Any]]:
    """What every chunk of every stage is given beside its input."""
    return [{"positions": one.positions, "sharding": one.sharding} for one in microbatches]


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """A step's, from 1: it rises over --warmup steps and then falls as --lr-decay says.

    A function of step and flags alone, so that a resumed run has the one it would have had.
    """
    if step <= args.warmup or args.lr_decay == "constant":
        return args.lr * min(1.0, step / max(args.warmup, 1))
    done = min(1.0, (step - args.warmup) / (args.lr_decay_steps - args.warmup))
    left = 1 - done if args.lr_decay == "linear" else (1 + math.cos(math.pi * done)) / 2
    return args.min_lr + (args.lr - args.min_lr) * left


def shard(part: Part, args: argparse.Namespace, grid: commgrid.HyperCommGrid) -> None:
    """FSDP2, with --dp-replicate HSDP; experts over the ranks that have copies of them."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if args.dtype == "bf16" else None, reduce_dtype=args.weights
    )
    data = ("dp_replicate", "fsdp") if args.dp_replicate > 1 else ("fsdp",)
    dense = grid.device_mesh(*data)
    for block in part.blocks.values():
        if args.experts:
            fully_shard(block.mlp.experts, mesh=grid.device_mesh("edp"), mp_policy=policy)
        fully_shard(block, mesh=dense, mp_policy=policy)
    fully_shard(part, mesh=dense, mp_policy=policy)
    for module in part.modules():
        if isinstance(module, FSDPModule):  # summed; Trainer.reduce divides, by tokens
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def by_mesh(model: nn.Module) -> list[dict[str, Any]]:
    """Parameters in groups of one mesh each, which is what torch updates at once."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return [{"params": parameters} for parameters in groups.values()]
