"""Train a model with experts, and give its weights to an engine that is another program.

    torchrun --standalone --nproc-per-node 4 examples/refit/trainer.py   # tp 2 · dp 2, experts on 2
    torchrun --standalone --nproc-per-node 4 examples/refit/engine.py    # tp 4, in fp8

Each program has a torch.distributed of its own, and either may be started first. They meet at a
store, which the trainer serves. The weights go from the trainer's layers to the engine's fused
tensors, and become fp8 with block scales on the way.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics

import torch
import torch.distributed as dist

import commgrid
from commgrid import checkpoint
from commgrid.collectives import all_reduce
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.tensor_parallel import initialize_parameters, vocab_parallel_cross_entropy
from commgrid.transfer import Fp8Blocks, Transfer
from moe import BLOCK, NAMES, Transformer

BATCH, LENGTH = 16, 32  # sequences in a step, and their length


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel size; dp is the rest")
    parser.add_argument("--ep", type=int, default=2, help="ranks that share the experts")
    parser.add_argument("--refits", type=int, default=3, help="after the first weights")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps before each refit")
    parser.add_argument("--store", default="127.0.0.1:29700", help="where the programs meet")
    parser.add_argument("--save", metavar="DIR", help="save a checkpoint at each refit, too")
    args = parser.parse_args(argv)

    grid = commgrid.initialize(tp=args.tp, ep=args.ep, etp=1)
    model = Transformer()
    initialize_parameters(model, seed=0)
    reducer = GradientReducer(model, shard=True)
    optimizer = ShardedOptimizer(reducer, torch.optim.AdamW, lr=1e-2)
    words = " ".join(topics[key] for key in sorted(topics)).split()
    text = torch.tensor(list(" ".join(words).encode()))  # Python's own documentation, as bytes

    host, port = args.store.split(":")
    store = dist.TCPStore(host, int(port), is_master=grid.rank == 0, wait_for_workers=False)
    transfer = Transfer(
        model, None, source_grid=grid, store=store, peer="engine",
        rename=NAMES, convert=Fp8Blocks(BLOCK, only=["*_proj.weight"]), max_bytes=1 << 20,
    )  # fmt: skip
    if grid.rank == 0:
        print(transfer.plan, flush=True)

    for refit in range(args.refits + 1):
        loss = torch.zeros(())
        for step in range(args.steps if refit else 0):
            generator = torch.Generator().manual_seed(refit * args.steps + step)
            starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
            batch = text[starts + torch.arange(LENGTH + 1)].long()
            mine = batch.chunk(grid.size("dp"))[grid.get_local_rank("dp")]
            loss = vocab_parallel_cross_entropy(model(mine[:, :-1]), mine[:, 1:], reduction="mean")
            loss.backward()
            reducer.finish()
            optimizer.step()
            optimizer.zero_grad()
        transfer.run()
        loss = all_reduce(loss.detach(), "dp", op="avg")
        if grid.rank == 0:
            print(f"refit {refit}  loss {loss.item():.4f}", flush=True)
        if args.save:
            checkpoint.save(args.save, refit, model, progress=False)

    transfer.close()
    if grid.rank == 0:
        store.wait(["engine is done"])  # the store ends with this process
    commgrid.shutdown()


if __name__ == "__main__":
    main()
