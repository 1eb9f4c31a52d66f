"""train_gpt's sequences: who holds which positions (--cp), and what is one text (--packed)."""

from __future__ import annotations

import argparse
import re
from itertools import pairwise

from torch import Tensor

import commgrid
from commgrid.context_parallel import SequenceSharding, choose
from commgrid.context_parallel.plans import heads_complaint
from gpt_training.flags import refuse

HEADING = re.compile(rb"^.+\n([*=~-])\1{2,}$", re.M)
"""What a topic, or a section of one, begins with: a line underlined with ***, ===, --- or ~~~."""


def document_lengths(window: Tensor, seq_len: int) -> list[int]:
    """Of the documents in a window of text, (seq_len + 1,): one begins at each heading.

    A function of the window alone, so that all ranks cut it alike.

    >>> import torch
    >>> window = torch.tensor(list(b"the end" + bytes([10]) + b"New" + bytes([10]) + b"==="))
    >>> document_lengths(window, 14)
    [8, 6]
    """
    starts = [found.start() for found in HEADING.finditer(bytes(window.tolist()))]
    bounds = [0, *(start for start in starts if 0 < start < seq_len), seq_len]
    return [stop - start for start, stop in pairwise(bounds)]


def sharding_of(windows: Tensor, args: argparse.Namespace) -> SequenceSharding | None:
    """Who holds which positions of a microbatch; None: this rank all, and each window is one text.

    With --packed all windows of a microbatch lie one after the other in one sequence, in which
    documents attend only themselves.

    Args:
        windows: of text, (batch, seq_len + 1).
        args: the command line's.
    """
    if args.packed:
        lengths = [one for row in windows for one in document_lengths(row, args.seq_len)]
        return SequenceSharding.packed(lengths, args.cp)
    return of_one_text(args) if args.cp > 1 else None


def of_one_text(args: argparse.Namespace) -> SequenceSharding:
    """Of sequences that are one text each: zig-zag, or where that does not fit the balanced one."""
    if args.seq_len % (2 * args.cp):
        return SequenceSharding.packed([args.seq_len], args.cp)
    return SequenceSharding.zigzag(args.seq_len, args.cp)


# -- sizes --------------------------------------------------------------------------------


def shared_heads(args: argparse.Namespace, ranks: int) -> bool:
    """Whether so many ranks can share the heads that a tp rank has, and those of its keys."""
    heads, keys = args.heads // args.tp, max(args.kv_heads // args.tp, 1)
    return heads_complaint(heads, keys, ranks) is None


def split_of_cp(args: argparse.Namespace) -> dict[str, object]:
    """The groups table's rows for --cp-comm: 2d's two levels, as many ranks inside as share heads.

    Refuses a --cp that has no such split.
    """
    if args.cp_comm != "2d":
        return {}
    inside = [n for n in range(2, args.cp) if args.cp % n == 0 and shared_heads(args, n)]
    if not inside:
        refuse(
            f"--cp-comm 2d cannot split --cp {args.cp}: the ranks inside share the "
            f"{args.heads // args.tp} heads ({max(args.kv_heads // args.tp, 1)} of keys) of a tp "
            "rank, and there are several across; expected a product such as 4, of which a factor "
            "divides the heads, or --cp-comm ring"
        )
    return {"cp_levels": {"of": "cp", "split": {"cp_ring": -1, "cp_a2a": max(inside)}}}


def check_context(args: argparse.Namespace, grid: commgrid.HyperCommGrid | None) -> None:
    """Refuses sequences and heads that the ranks of cp cannot share out."""
    if args.seq_len < args.cp:
        refuse(
            f"--seq-len {args.seq_len} is less than --cp {args.cp}; expected a position for each "
            "rank, or more",
        )
    if args.sequence_parallel and args.cp > 1 and args.seq_len % (args.cp * args.tp):
        refuse(
            f"--seq-len {args.seq_len} cannot be shared equally by --cp {args.cp} × --tp {args.tp} "
            f"with --sequence-parallel; expected a multiple of {args.cp * args.tp}",
        )
    if args.packed and args.pp > 1 and args.seq_len % args.cp:
        refuse(
            f"--seq-len {args.seq_len} cannot be shared equally by --cp {args.cp}, and with "
            f"--packed a rank's share would change between microbatches, which --pp sends in one "
            f"shape; expected a multiple of {args.cp}",
        )
    if args.cp_comm == "ulysses" and not shared_heads(args, args.cp):
        refuse(
            f"--cp-comm ulysses cannot share the {args.heads // args.tp} heads "
            f"({max(args.kv_heads // args.tp, 1)} of keys) of a tp rank among --cp {args.cp}; "
            "expected a multiple of it (of keys also a divisor), or --cp-comm ring",
        )


# -- what is said -------------------------------------------------------------------------


def about(args: argparse.Namespace, device: str) -> list[str]:
    """Lines that say how sequences are shared out; none where each rank has whole texts."""
    packed = "packs of documents, each attending itself" if args.packed else ""
    if args.cp == 1:
        return [f"text   {packed}"] if packed else []
    if args.packed:
        way = "what suits each" if args.cp_comm == "auto" else args.cp_comm
        return [f"cp     {packed}, balanced over {args.cp} ranks; attention by {way}"]
    sharding = of_one_text(args)
    way = args.cp_comm
    if way == "auto":
        chosen = choose(
            sharding,
            heads=args.heads // args.tp,
            kv_heads=max(args.kv_heads // args.tp, 1),
            device=device,
        )
        way = f"{chosen}"
    cut = "balanced" if args.seq_len % (2 * args.cp) else "zig-zag"
    return [f"cp     {sharding}, {cut}; attention by {way}"]
