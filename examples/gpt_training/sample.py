"""train_gpt's sample: how the model goes on after a prompt, the same on every grid."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from commgrid.collectives import all_gather, all_reduce, broadcast
from gpt_training.data import own_part
from gpt_training.model import VOCABULARY
from gpt_training.trainer import Trainer


def generate(trainer: Trainer) -> str:
    """The prompt and --sample-tokens bytes after it; every rank takes part, and draws the same."""
    args = trainer.args
    trainer.pipeline.forget_shapes()  # a batch of one from here on
    generator = torch.Generator().manual_seed(args.seed)
    text = torch.tensor(list(args.sample.encode()), device=trainer.device)
    for _ in range(args.sample_tokens):
        logits = next_logits(trainer, text[-args.seq_len :])
        if args.temperature:
            shares = torch.softmax(logits / args.temperature, -1)
            drawn = torch.multinomial(shares, 1, generator=generator)
        else:
            drawn = logits.argmax(-1, keepdim=True)
        text = torch.cat([text, drawn.to(trainer.device)])
    return bytes(text.tolist()).decode(errors="replace")


def next_logits(trainer: Trainer, seen: Tensor) -> Tensor:
    """Of the byte after those seen, (VOCABULARY,) in fp64 on the CPU; on every rank the same."""
    args, grid, device = trainer.args, trainer.grid, trainer.device
    # What follows does not matter to a causal model, and shapes stay as they are.
    window = F.pad(seen, (0, args.seq_len + 1 - len(seen)))[None]
    one = own_part(window, args, grid, device)
    output = trainer.logits(one)
    found = torch.zeros(VOCABULARY, dtype=torch.float64, device=device)
    last = len(seen) - 1
    if one.sharding is None:
        held = list(range(args.seq_len))
    else:
        held = one.sharding.positions(grid.get_local_rank("cp")).tolist()
    if output is not None and last in held:  # on one rank of cp
        found += all_gather(output[held.index(last), 0], "tp")[:VOCABULARY]
    found = all_reduce(found, "cp")
    return broadcast(found, "pp", source=grid.size("pp") - 1).cpu()
