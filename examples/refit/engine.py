"""A toy inference engine, whose weights come from a trainer that is another program.

Tensors have vLLM's fused names, matrices are in fp8 with block scales, and tp cuts each. See
trainer.py for how to start both.
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import commgrid
from commgrid.collectives import all_gather, all_reduce
from commgrid.transfer import Part, Transfer
from moe import (
    BLOCK,
    CHOSEN,
    EPSILON,
    EXPERTS,
    HEAD,
    HEADS,
    INNER,
    KV_HEADS,
    LAYERS,
    NAMES,
    PROMPT,
    VOCABULARY,
    WIDTH,
)

Q, KV = HEADS * HEAD, KV_HEADS * HEAD


class Engine:
    """This rank's weights, and greedy tokens of all ranks together.

    Args:
        rank, ranks: of tp.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.weights: dict[str, list[Part]] = {}
        self.add("model.embed_tokens.weight", (VOCABULARY, WIDTH), 0)
        for number in range(LAYERS):
            layer = f"model.layers.{number}"
            self.add(f"{layer}.input_layernorm.weight", (WIDTH,))
            self.add_fp8(f"{layer}.self_attn.qkv_proj.weight", (Q + 2 * KV, WIDTH), 0, (Q, KV, KV))
            self.add_fp8(f"{layer}.self_attn.o_proj.weight", (WIDTH, Q), 1)
            self.add(f"{layer}.post_attention_layernorm.weight", (WIDTH,))
            self.add(f"{layer}.mlp.gate.weight", (EXPERTS, WIDTH))
            experts = f"{layer}.mlp.experts"
            self.add_fp8(f"{experts}.w13_weight", (EXPERTS, 2 * INNER, WIDTH), 1, (INNER, INNER))
            self.add_fp8(f"{experts}.w2_weight", (EXPERTS, WIDTH, INNER), 2)
        self.add("model.norm.weight", (WIDTH,))
        self.add("lm_head.weight", (VOCABULARY, WIDTH), 0)

    def add(
        self,
        name: str,
        shape: tuple[int, ...],
        dim: int | None = None,
        fused: tuple[int, ...] = (),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Makes this rank's parts of a tensor.

        Args:
            name, shape: of the full tensor.
            dim: that tp cuts; None: each rank has all.
            fused: lengths along it of tensors that are cut each by itself; none: it is one.
            dtype: of the numbers.
        """
        parts, start = [], 0
        for length in fused or (shape[dim or 0],):
            own = length if dim is None else length // self.ranks
            size, offset = list(shape), [0] * len(shape)
            if dim is not None:
                size[dim], offset[dim] = own, start + self.rank * own
            parts.append(Part(torch.zeros(size, dtype=dtype), shape, tuple(offset)))
            start += length
        self.weights[name] = parts

    def add_fp8(
        self, name: str, shape: tuple[int, ...], dim: int, fused: tuple[int, ...] = ()
    ) -> None:
        """Makes this rank's parts of a matrix in fp8, or of one for each expert, and its scales."""
        self.add(name, shape, dim, fused, torch.float8_e4m3fn)
        blocks = (*[1] * (len(shape) - 2), *BLOCK)
        scales = tuple(size // block for size, block in zip(shape, blocks, strict=True))
        self.add(f"{name}_scale_inv", scales, dim, tuple(size // blocks[dim] for size in fused))

    def matrices(self, name: str) -> list[Tensor]:
        """This rank's parts of a tensor, as numbers of 64 bits."""
        parts = [part.tensor.double() for part in self.weights[name]]
        for part, scale in zip(parts, self.weights.get(f"{name}_scale_inv", ()), strict=False):
            rows = scale.tensor.double().repeat_interleave(BLOCK[0], -2)
            part.mul_(rows.repeat_interleave(BLOCK[1], -1))
        return parts

    def logits(self, tokens: Tensor) -> Tensor:
        """The logits of the token after a sequence, (VOCABULARY,)."""
        (embedding,) = self.matrices("model.embed_tokens.weight")
        own = tokens - self.rank * len(embedding)
        here = (own >= 0) & (own < len(embedding))
        x = all_reduce(embedding[own.where(here, 0)] * here[:, None], "tp")
        for number in range(LAYERS):
            layer = f"model.layers.{number}"
            h = self.norm(x, f"{layer}.input_layernorm")
            x = x + all_reduce(self.attention(h, f"{layer}.self_attn"), "tp")
            h = self.norm(x, f"{layer}.post_attention_layernorm")
            x = x + all_reduce(self.experts(h, f"{layer}.mlp"), "tp")
        (head,) = self.matrices("lm_head.weight")
        return all_gather(head @ self.norm(x, "model.norm")[-1], "tp")

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (WIDTH,), *self.matrices(f"{name}.weight"), EPSILON)

    def attention(self, x: Tensor, name: str) -> Tensor:
        """This rank's heads."""
        q, k, v = (
            (x @ weight.T).unflatten(-1, (-1, HEAD)).transpose(0, 1)
            for weight in self.matrices(f"{name}.qkv_proj.weight")
        )
        q = q.unflatten(0, (len(k), -1))
        scores = q @ k.transpose(-2, -1)[:, None] / math.sqrt(HEAD)
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        y = scores.masked_fill(later, -math.inf).softmax(-1) @ v[:, None]
        (out,) = self.matrices(f"{name}.o_proj.weight")
        return y.flatten(0, 1).transpose(0, 1).flatten(1) @ out.T

    def experts(self, x: Tensor, name: str) -> Tensor:
        """This rank's columns of each expert."""
        (router,) = self.matrices(f"{name}.gate.weight")
        gates, ups = self.matrices(f"{name}.experts.w13_weight")
        (downs,) = self.matrices(f"{name}.experts.w2_weight")
        chosen, which = (x @ router.T).topk(CHOSEN)
        shares = torch.zeros(len(x), EXPERTS, dtype=x.dtype).scatter(1, which, chosen.softmax(-1))
        inner = F.silu(torch.einsum("tw,eiw->eti", x, gates))
        inner = inner * torch.einsum("tw,eiw->eti", x, ups)
        return torch.einsum("te,eti,ewi->tw", shares, inner, downs)

    def greedy(self, count: int) -> tuple[list[int], float]:
        """The most likely tokens after PROMPT, and the logit of the last one."""
        tokens, most = list(PROMPT), 0.0
        for _ in range(count):
            logits = self.logits(torch.tensor(tokens))
            tokens.append(int(logits.argmax()))
            most = logits.max().item()
        return tokens[len(PROMPT) :], most


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--refits", type=int, default=3, help="after the first weights")
    parser.add_argument("--tokens", type=int, default=16, help="that are generated each time")
    parser.add_argument("--store", default="127.0.0.1:29700", help="where the programs meet")
    args = parser.parse_args(argv)

    grid = commgrid.initialize(tp=-1, dp=1)
    engine = Engine(grid.get_local_rank("tp"), grid.size("tp"))
    host, port = args.store.split(":")
    store = dist.TCPStore(host, int(port), is_master=False)
    transfer = Transfer(
        None, engine.weights, target_grid=grid, store=store, peer="trainer",
        rename=NAMES, max_bytes=1 << 20,
    )  # fmt: skip
    for refit in range(args.refits + 1):
        for when in ["before", "after"] if refit else ["after"]:
            if when == "after":
                transfer.run()
            tokens, logit = engine.greedy(args.tokens)
            if grid.rank == 0:
                print(f"{when} refit {refit}  {tokens}  logit {logit:.9f}", flush=True)

    transfer.close()
    dist.barrier()  # all ranks are done with the store
    if grid.rank == 0:
        store.set("engine is done", "")
    commgrid.shutdown()


if __name__ == "__main__":
    main()
