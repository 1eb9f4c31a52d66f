"""train_gpt's sample: how the model goes on after a prompt, the same on every grid."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from commgrid.collectives import all_gather, broadcast
from gpt_data import Microbatch
from gpt_model import VOCABULARY
from gpt_trainer import Trainer


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
    length, device = trainer.args.seq_len, trainer.device
    # What follows does not matter to a causal model, and shapes stay as they are.
    tokens = F.pad(seen, (0, length - len(seen)))[:, None]
    output = trainer.logits(Microbatch(tokens, tokens, torch.arange(length, device=device)))
    found = torch.zeros(VOCABULARY, dtype=torch.float64, device=device)
    if output is not None:
        found += all_gather(output[len(seen) - 1, 0], "tp")[:VOCABULARY]
    return broadcast(found, "pp", source=trainer.grid.size("pp") - 1).cpu()
