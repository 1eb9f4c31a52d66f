"""train_gpt's text and what is made of it: a step's windows, and this rank's microbatches of them.

A batch is drawn whole on every rank, the same on every grid; `own_microbatches` alone says what of
it a rank takes.
"""

from __future__ import annotations

import argparse
import importlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import commgrid
from commgrid.context_parallel import SequenceSharding
from gpt_training.flags import refuse
from gpt_training.sequences import sharding_of


@dataclass(frozen=True)
class Microbatch:
    """What a rank computes on at once.

    Args:
        tokens: (sequence, batch).
        targets: the token after each, (sequence, batch).
        positions: of the tokens in their text, (sequence,).
        sharding: who has which positions; None: this rank has all, of one text each.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    sharding: SequenceSharding | None = None


@dataclass(frozen=True)
class Text:
    """Bytes to train on, and others to evaluate on, of which there may be none."""

    training: Tensor
    held_out: Tensor


def read_text(path: str | None, seq_len: int) -> Tensor:
    """The whole text as bytes: a file, or Python's documentation topics."""
    if path is None:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
        raw = "\n".join(topics[key] for key in sorted(topics)).encode()
    else:
        try:
            raw = Path(path).read_bytes()
        except OSError as error:
            refuse(f"--data {path}: cannot be read ({error.strerror}); give a file of text")
    if len(raw) < seq_len + 2:
        source = f"--data {path}" if path else "the default text"
        refuse(f"{source}: {len(raw)} bytes are less than --seq-len + 2 = {seq_len + 2}")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def split_text(text: Tensor, args: argparse.Namespace) -> Text:
    """Holds out the text's end for evaluation; without --eval-every nothing."""
    if not args.eval_every:
        return Text(text, text[:0])
    held = int(len(text) * args.held_out)
    parts = Text(text[: len(text) - held], text[len(text) - held :])
    for size, what in ((len(parts.training), "to train on"), (held, "to evaluate on")):
        if size < args.seq_len + 2:
            refuse(
                f"--held-out {args.held_out:g}: leaves {size} of {len(text)} bytes {what}, less "
                f"than --seq-len + 2 = {args.seq_len + 2}; give more text, or another share"
            )
    return parts


def global_batch(text: Tensor, step: int, args: argparse.Namespace) -> Tensor:
    """The step's windows of text, (batch_size, seq_len + 1), the same on every grid."""
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    starts = torch.randint(len(text) - args.seq_len - 1, (args.batch_size,), generator=generator)
    return windows(text, starts, args)


def evaluation_batches(text: Tensor, args: argparse.Namespace) -> list[Tensor]:
    """Windows spread evenly over a text, (batch_size, seq_len + 1) each: always the same ones."""
    count = args.eval_batches * args.batch_size
    starts = torch.arange(count) * (len(text) - args.seq_len - 1) // max(count - 1, 1)
    return [windows(text, part, args) for part in starts.split(args.batch_size)]


def windows(text: Tensor, starts: Tensor, args: argparse.Namespace) -> Tensor:
    """A sequence and the byte after it from each start, (len(starts), seq_len + 1)."""
    return text[starts[:, None] + torch.arange(args.seq_len + 1)].long()


def own_microbatches(
    batch: Tensor, args: argparse.Namespace, grid: commgrid.HyperCommGrid, device: torch.device
) -> list[Microbatch]:
    """This rank's share of a whole batch, (batch_size, seq_len + 1), cut into microbatches."""
    mine = batch.chunk(grid.size("dp"))[grid.get_local_rank("dp")]
    return [own_part(one, args, grid, device) for one in mine.chunk(args.microbatches)]


def own_part(
    windows: Tensor, args: argparse.Namespace, grid: commgrid.HyperCommGrid, device: torch.device
) -> Microbatch:
    """What this rank has of the windows of a microbatch, (batch, seq_len + 1), over cp."""
    sharding = sharding_of(windows, args)
    tokens, targets = windows.t()[:-1].to(device), windows.t()[1:].to(device)
    if sharding is None:
        return Microbatch(tokens, targets, torch.arange(args.seq_len, device=device))
    if args.packed:  # one sequence of all windows
        tokens, targets = (whole.t().reshape(-1, 1) for whole in (tokens, targets))
    rank = grid.get_local_rank("cp")
    return Microbatch(
        sharding.shard(tokens, rank),
        sharding.shard(targets, rank),
        sharding.position_ids(rank, device),
        sharding,
    )
