"""Train a small byte-level GPT with tensor, sequence, pipeline, expert and data parallelism.

    torchrun --standalone --nproc-per-node 8 examples/train_gpt.py --tp 2 --sequence-parallel
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --pp 4 --schedule zb-h1
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --experts 8 --ep 4
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --fsdp --dp-replicate 2
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --save runs/1 --save-every 100
    torchrun … --max-restarts 3 examples/train_gpt.py --save runs/1 --save-every 100 --resume runs/1
    python examples/train_gpt.py --steps 20                  # one process, no launcher

Every rank draws the same weights and the same batches from --seed, so the loss curve does
not depend on how the job is cut: not on --tp, --dp, --sequence-parallel, --zero1, --fsdp, --pp,
--chunks, --schedule, --microbatches, --ep or --etp. (It does with --dropout, since ranks drop other
elements, and with --capacity-factor and --aux-loss-coef, which look at the tokens of a rank.) Nor
does it depend on where --resume takes up what --save has saved, or on how that job was cut. The
text is Python's own documentation, unless --data names a file.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import commgrid
import gpt_flags
from commgrid import checkpoint
from commgrid.collectives import all_gather, all_reduce, broadcast
from commgrid.data_parallel import (
    GradientReducer,
    ShardedOptimizer,
    clip_gradients,
    gradient_norm,
    reduce_partial_gradients,
)
from commgrid.expert import MoELayer
from commgrid.parameters import mark_parameters
from commgrid.pipeline import Pipeline, partition_layers
from commgrid.runtime.failures import named_failures
from commgrid.tensor_parallel import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    initialize_parameters,
    set_random_seed,
    sharded_rng,
    vocab_parallel_cross_entropy,
)

VOCABULARY = 256  # bytes
MODEL_FLAGS = (
    "layers", "hidden", "heads", "kv_heads", "seq_len", "tie_embeddings", "experts", "top_k",
)  # fmt: skip
"""Those that a checkpoint must have been saved with."""


# -- the model: activations are (sequence, batch, hidden) ----------------------------------


class Attention(nn.Module):
    """Causal self-attention whose heads are shared out over the tp group."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.dropout = args.dropout
        options = {"sequence_parallel": args.sequence_parallel, "dtype": args.weights}
        self.qkv = QKVParallelLinear(
            args.hidden, args.heads, num_kv_heads=args.kv_heads, init=weights(), **options
        )
        self.out = RowParallelLinear(args.hidden, args.hidden, init=weights(args.layers), **options)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.permute(1, 2, 0, 3) for part in self.qkv(x))
        dropout = self.dropout if self.training else 0.0
        with sharded_rng("tp") if dropout else nullcontext():  # each rank has other heads
            y = F.scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=True
            )
        return self.out(y.permute(2, 0, 1, 3).flatten(2))


class MLP(nn.Module):
    """A column-parallel layer and a row-parallel one."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        hidden, dtype = args.hidden, args.weights
        options = {"sequence_parallel": args.sequence_parallel, "dtype": dtype}
        self.up = ColumnParallelLinear(hidden, 4 * hidden, init=weights(), **options)
        self.down = RowParallelLinear(4 * hidden, hidden, init=weights(args.layers), **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def experts(args: argparse.Namespace) -> MoELayer:
    """What stands in an MLP's place with --experts."""
    return MoELayer(
        args.hidden, 4 * args.hidden, args.experts, args.top_k,
        capacity_factor=args.capacity_factor, aux_loss=args.aux_loss_coef, summed_loss=True,
        sequence_parallel=args.sequence_parallel, init=weights(), init_down=weights(args.layers),
        dtype=args.weights,
    )  # fmt: skip


class Block(nn.Module):
    """Attention, and an MLP or experts."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(args), norm(args)
        self.attention = Attention(args)
        self.mlp = experts(args) if args.experts else MLP(args)
        self.drop = Dropout(args)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class Dropout(nn.Module):
    """Dropout of what all tp ranks hold, or under sequence parallelism of this rank's slice."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.probability, self.sharded = args.dropout, args.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        if not self.probability:
            return x
        with sharded_rng("tp") if self.sharded else nullcontext():
            return F.dropout(x, self.probability, self.training)


class Positions(nn.Embedding):
    """nn.Embedding with GPT-2's initial scale."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class Part(nn.Module):
    """Consecutive blocks of a GPT-2 over bytes; the first part embeds, the last has the head.

    Its modules have the names they have in the whole model, so that their weights are drawn alike.

    Args:
        args: the command line's.
        layers: which blocks.
        tokens: the first part's embedding, where the tied head is on the same rank.
    """

    def __init__(
        self, args: argparse.Namespace, layers: range, tokens: VocabParallelEmbedding | None = None
    ) -> None:
        super().__init__()
        self.sequence_parallel = args.sequence_parallel
        self.is_first, self.is_last = layers.start == 0, layers.stop == args.layers
        options = {"sequence_parallel": args.sequence_parallel, "dtype": args.weights}
        tied = self.is_last and args.tie_embeddings
        if self.is_first or tied:
            self.tokens = tokens or VocabParallelEmbedding(
                VOCABULARY, args.hidden, init=weights(), **options
            )
        if self.is_first:
            self.positions = Positions(args.seq_len, args.hidden, dtype=args.weights)
            if args.sequence_parallel:  # each rank sees its slice of the sequence only
                mark_parameters(self.positions, partial="tp")
            self.drop = Dropout(args)
        self.blocks = nn.ModuleDict({str(layer): Block(args) for layer in layers})
        if self.is_last:
            self.norm = norm(args)
            weight = self.tokens.weight if tied else None
            self.head = VocabParallelHead(
                args.hidden, VOCABULARY, init=weights(), weight=weight, **options
            )
        if args.tie_embeddings:  # first and last stage each have the table, and use it differently
            for name in ("tokens", "head"):
                if hasattr(self, name):
                    mark_parameters(getattr(self, name), shared="embedding")

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (sequence, batch), or the part before's output (sequence, batch, hidden), to the
        next part's input, or this rank's part of the logits (sequence, batch, part)."""
        if self.is_first:
            x = self.drop(self.embed(x))
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x

    def embed(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        first = commgrid.get_grid().get_local_rank("tp") * len(x) if self.sequence_parallel else 0
        return x + self.positions(torch.arange(first, first + len(x), device=x.device))[:, None]


def build(args: argparse.Namespace, grid: commgrid.HyperCommGrid) -> list[Part]:
    """This stage's chunks of the model."""
    stages, stage = grid.size("pp"), grid.get_local_rank("pp")
    head = VOCABULARY / (12 * args.hidden)  # of a block's multiplications
    layers = partition_layers(args.layers, stages * args.chunks, head=head)
    parts: list[Part] = []
    for own in layers[stage::stages]:
        parts.append(Part(args, own, parts[0].tokens if parts and stages == 1 else None))
    return parts


def norm(args: argparse.Namespace) -> nn.LayerNorm:
    """A LayerNorm; under sequence parallelism its gradients are partial sums over tp."""
    made = nn.LayerNorm(args.hidden, dtype=args.weights)
    return mark_parameters(made, partial="tp") if args.sequence_parallel else made


def weights(layers: int = 0) -> partial[Tensor]:
    """GPT-2's initial weights; those that add to the residual stream shrink with depth."""
    return partial(nn.init.normal_, std=0.02 / (2 * layers) ** 0.5 if layers else 0.02)


# -- the data ---------------------------------------------------------------------------


def read_text(path: str | None, seq_len: int) -> Tensor:
    """The training text as bytes: a file, or Python's documentation topics."""
    if path is None:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
        raw = "\n".join(topics[key] for key in sorted(topics)).encode()
    else:
        try:
            raw = Path(path).read_bytes()
        except OSError as error:
            raise SystemExit(f"--data {path}: {error}") from error
    if len(raw) < seq_len + 2:
        source = f"--data {path}" if path else "the default text"
        raise SystemExit(f"{source}: {len(raw)} bytes are less than --seq-len + 2 = {seq_len + 2}")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def global_batch(text: Tensor, step: int, args: argparse.Namespace) -> Tensor:
    """The step's windows of text, (batch_size, seq_len + 1), the same on every grid."""
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    starts = torch.randint(len(text) - args.seq_len - 1, (args.batch_size,), generator=generator)
    return text[starts[:, None] + torch.arange(args.seq_len + 1)].long()


# -- training ---------------------------------------------------------------------------


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


class Trainer:
    """Model, what reduces its gradients, pipeline and optimizer, and the steps they take."""

    def __init__(self, args: argparse.Namespace, grid: commgrid.HyperCommGrid) -> None:
        self.args, self.grid = args, grid
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
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

    def step(self, step: int, batch: Tensor) -> tuple[float, float]:
        """One optimizer step on the whole batch, (batch_size, seq_len + 1): loss and norm."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.lr * min(1.0, step / self.args.warmup)
        mine = batch.chunk(self.grid.size("dp"))[self.grid.get_local_rank("dp")]
        microbatches = [one.t() for one in mine.to(self.device).chunk(self.args.microbatches)]
        losses = self.pipeline.step(
            [one[:-1] for one in microbatches], [one[1:] for one in microbatches]
        )
        norm = self.reduce(batch[:, 1:].numel())
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if losses is not None:  # on the last stage
            total += all_reduce(losses.double().sum(), "dp_cp")
        total = broadcast(total, "pp", source=self.grid.size("pp") - 1)
        return total.item() / batch[:, 1:].numel(), norm.item()

    def reduce(self, tokens: int) -> Tensor:
        """Averages gradients over all tokens of the step, and clips; their norm before that."""
        clip = self.args.clip_grad
        if self.reducer is not None:
            self.reducer.finish(count=tokens / self.grid.size("dp"))
            return self.reducer.clip_gradients(clip) if clip else self.reducer.gradient_norm()
        reduce_partial_gradients(self.model)  # FSDP has summed them over the data axes
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(tokens)
        return clip_gradients(self.model, clip) if clip else gradient_norm(self.model)

    def save(self, step: int) -> None:
        """Writes a checkpoint of the step just taken."""
        flags = {flag: getattr(self.args, flag) for flag in MODEL_FLAGS}
        checkpoint.save(
            self.args.save, step, self.chunks, self.optimizer, extra={"flags": flags},
            keep=self.args.keep,
        )  # fmt: skip

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
                raise SystemExit(
                    f"--resume {self.args.resume}: saved with --{flag.replace('_', '-')} {saved}, "
                    f"not {getattr(self.args, flag)}"
                )
        set_random_seed(self.args.seed * 1_000_003 + found.step)  # not the same masks again
        return found.step


def by_mesh(model: nn.Module) -> list[dict[str, Any]]:
    """Parameters in groups of one mesh each, which is what torch updates at once."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return [{"params": parameters} for parameters in groups.values()]


def train(args: argparse.Namespace) -> None:
    groups: dict[str, Any] = {}
    data = {"dp": args.dp}
    if args.tie_embeddings:
        groups["embedding"] = {"of": "pp", "pick": ["first", "last"]}
    if args.fsdp:
        groups["fsdp"] = "dp_shard_cp"
        shards = args.dp // args.dp_replicate if args.dp > 0 else -1
        data = {"dp_replicate": args.dp_replicate, "dp_shard": shards}
    grid = commgrid.initialize(
        tp=args.tp, pp=args.pp, ep=args.ep, etp=args.etp, groups=groups, ranks=args.ranks, **data
    )
    if grid is None:  # a spare rank
        commgrid.shutdown()
        return
    gpt_flags.check(args, grid)
    text = read_text(args.data, args.seq_len)
    trainer = Trainer(args, grid)
    main_rank = grid.get_local_rank() == 0
    if main_rank:
        print(grid, f"on {trainer.device.type}", flush=True)
    done = 0
    if args.resume:
        with named_failures(grid, lambda: "loading a checkpoint"):
            done = trainer.resume()
        if main_rank:
            print(f"goes on after step {done}", flush=True)
    if done >= args.steps and main_rank:
        print(f"--steps {args.steps} were done at step {done} already", flush=True)
    if args.metrics and main_rank:
        forget_after(done, Path(args.metrics))
    for step in range(done + 1, args.steps + 1):
        started = time.perf_counter()
        with named_failures(grid, partial("step {}".format, step)):
            loss, norm = trainer.step(step, global_batch(text, step, args))
        speed = args.batch_size * args.seq_len / (time.perf_counter() - started)
        if main_rank:
            print(f"step {step:4}  loss {loss:.4f}  {speed:,.0f} tokens/s", flush=True)
        if args.metrics and main_rank:
            row = {"step": step, "loss": loss, "grad_norm": norm, "tokens_per_s": speed}
            with Path(args.metrics).open("a") as lines:
                print(json.dumps(row), file=lines)
        if args.save and (step % args.save_every == 0 or step == args.steps):
            with named_failures(grid, partial("saving step {}".format, step)):
                trainer.save(step)
    sample = generate(trainer)
    if main_rank:
        print(f"--- a sample\n{sample}")
    commgrid.shutdown()


def forget_after(step: int, metrics: Path) -> None:
    """Leaves the rows up to a step, since those after it come again."""
    rows = metrics.read_text().splitlines() if step and metrics.exists() else []
    kept = [row for row in rows if json.loads(row)["step"] <= step]
    metrics.write_text("".join(f"{row}\n" for row in kept))


@torch.no_grad()
def generate(trainer: Trainer, length: int = 120) -> str:
    """Text sampled from the model; every rank takes part, and draws the same bytes."""
    args, stages = trainer.args, trainer.grid.size("pp")
    trainer.model.eval()
    trainer.pipeline.forget_shapes()  # a batch of one from here on
    generator = torch.Generator().manual_seed(args.seed)
    text = torch.tensor(list(b"The "), device=trainer.device)
    for _ in range(length):
        seen = text[-args.seq_len :]
        # What follows does not matter to a causal model, and shapes stay as they are.
        outputs = trainer.pipeline.forward([F.pad(seen, (0, args.seq_len - len(seen)))[:, None]])
        share = torch.zeros(VOCABULARY, dtype=torch.float64, device=trainer.device)
        if outputs is not None:  # on the last stage
            logits = all_gather(outputs[0], "tp", dim=-1)[len(seen) - 1, 0, :VOCABULARY]
            share = torch.softmax(logits.double() / 0.8, -1)
        share = broadcast(share, "pp", source=stages - 1).cpu()
        drawn = torch.multinomial(share, 1, generator=generator)
        text = torch.cat([text, drawn.to(trainer.device)])
    return bytes(text.tolist()).decode(errors="replace")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line's flags, or those of a list."""
    return gpt_flags.parse(argv, description=__doc__)


if __name__ == "__main__":
    try:
        train(parse())
    except commgrid.CommGridError as error:
        sys.exit(f"{type(error).__name__}: {error}")
