"""Parts of train_gpt by themselves: evaluation, sample, documents, learning rate, durations."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import commgrid
from commgrid.tensor_parallel import vocab_parallel_cross_entropy
from commgrid.testing import run_on_ranks
from tests.examples.curves import load, on_ranks

TINY = [
    "--layers", "2", "--hidden", "16", "--heads", "4", "--batch-size", "4", "--seq-len", "4",
    "--lr", "1e-2", "--dtype", "fp64",
]  # fmt: skip


# -- evaluation and sample -------------------------------------------------------------------


def by_hand(job: list[str]) -> tuple[float, float, str, str, int, int]:
    """The evaluation loss and the sample, each from the trainer and from its modules as they are;
    parameters as counted and as they are."""
    train_gpt: Any = load()
    args = train_gpt.parse(job)
    grid = train_gpt.make_grid(args)
    trainer = train_gpt.Trainer(args, grid)
    text = train_gpt.split_text(train_gpt.read_text(None, args.seq_len), args)
    for step in range(1, 4):
        trainer.step(step, train_gpt.global_batch(text.training, step, args))
    batches = train_gpt.evaluation_batches(text.held_out, args)
    ours, sampled = trainer.evaluate(batches), train_gpt.generate(trainer)
    (model,) = trainer.chunks
    losses = []
    with torch.no_grad():
        for window in torch.cat(batches):  # a sequence at a time
            logits = model(window[:-1, None], torch.arange(args.seq_len))[:, 0]
            losses.append(F.cross_entropy(logits, window[1:]))
        written = list(args.sample.encode())
        for _ in range(args.sample_tokens):
            seen = torch.tensor(written[-args.seq_len :])
            logits = model(seen[:, None], torch.arange(len(seen)))[-1, 0]
            written.append(int(logits.argmax()))
    counted = train_gpt.count_parameters(trainer.model)[0]
    there = sum(p.numel() for p in nn.ModuleList(trainer.chunks).parameters())
    commgrid.shutdown()
    return (
        ours, torch.stack(losses).mean().item(), sampled, bytes(written).decode(errors="replace"),
        counted, there,
    )  # fmt: skip


def test_evaluation_and_sample_are_what_the_modules_say() -> None:
    job = [*TINY, "--eval-every", "2", "--eval-batches", "3", "--sample", "def "]
    job += ["--sample-tokens", "6", "--temperature", "0"]
    loss, expected, sampled, written, counted, there = run_on_ranks(
        by_hand, 1, job, backend=None, launcher="torchrun"
    )[0]
    assert loss == pytest.approx(expected, rel=1e-12)
    assert sampled == written
    assert counted == there


def test_evaluation_looks_at_other_text_and_changes_nothing() -> None:
    """The random state of dropout is left alone as well."""
    dropped = [*TINY, "--steps", "3", "--dropout", "0.2", "--eval-batches", "2"]
    often, once = on_ranks(1, *(" ".join([*dropped, "--eval-every", every]) for every in "13"))
    assert often.rows == once.rows
    assert [len(often.evaluations), len(once.evaluations)] == [3, 1]
    train_gpt = load()
    args = train_gpt.parse([*dropped, "--eval-every", "1"])
    whole = train_gpt.read_text(None, args.seq_len)
    text = train_gpt.split_text(whole, args)
    assert len(text.held_out) == len(whole) // 10
    assert torch.equal(torch.cat([text.training, text.held_out]), whole)
    args = train_gpt.parse(dropped)
    assert torch.equal(train_gpt.split_text(whole, args).training, whole)


# -- documents, and ranks that share a sequence --------------------------------------------------


def one_by_one() -> tuple[float, float]:
    """The loss of a pack, and that of its documents, each alone through the model."""
    train_gpt = load()
    flags = ["--seq-len", "24", "--batch-size", "2", "--packed", "--experts", "2"]
    args = train_gpt.parse([*TINY, *flags])
    trainer = train_gpt.Trainer(args, train_gpt.make_grid(args))
    rows = [b"bc\nNew\n===\nso\nOld\n---\nabc", b"of one document, and more"]
    batch = torch.tensor([list(row) for row in rows])
    documents = [(0, 0, 3), (0, 3, 14), (0, 14, 24), (1, 0, 24)]
    total = 0.0
    for row, start, stop in documents:
        tokens = batch[row, start : stop + 1, None]
        logits = trainer.chunks[0](tokens[:-1], torch.arange(stop - start))
        losses = vocab_parallel_cross_entropy(logits, tokens[1:], vocabulary=256, reduction="sum")
        total += losses.item()
    found = trainer.evaluate([batch])
    commgrid.shutdown()
    return found, total / 48


def test_a_pack_has_the_loss_of_its_documents() -> None:
    found, expected = run_on_ranks(one_by_one, 1, backend=None, launcher="torchrun")[0]
    assert found == pytest.approx(expected, rel=1e-13)


def test_documents_begin_at_headings() -> None:
    lengths = load("gpt_training/sequences").document_lengths
    for window, expected in {
        b"no heading here": [14],
        b"A\n===\nx\nB\n***\nyy": [8, 7],
        b"xA\n---\n\nC\n~~~~\n": [8, 6],
        b"x\nA\n--\nB\n+++\n1": [13],  # two are too few, and another sign
        b"x\nA\n==-\nB\n=== =": [14],
        b"ab\ncd\nLast\n===": [6, 7],
        b"ab\ncd\nLas\n====": [6, 7],
    }.items():
        assert lengths(torch.tensor(list(window)), len(window) - 1) == expected, window


def test_2d_puts_as_many_ranks_inside_as_share_heads() -> None:
    parse, split = load().parse, load("gpt_training/sequences").split_of_cp
    for flags, inside in {
        "--cp 8": 4,
        "--cp 8 --tp 4": 2,
        "--cp 6 --heads 6 --hidden 96": 3,
    }.items():
        rows = split(parse([*flags.split(), "--cp-comm", "2d"]))
        assert rows == {"cp_levels": {"of": "cp", "split": {"cp_ring": -1, "cp_a2a": inside}}}
    assert split(parse(["--cp", "4"])) == {}


# -- learning rate and durations -------------------------------------------------------------------


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_the_learning_rate_is_that_of_torchs_schedulers(decay: str) -> None:
    train_gpt: Any = load()
    warmup, steps, least = 5, 30, 1e-4
    falling = [] if decay == "constant" else ["--lr-decay", decay, "--min-lr", str(least)]
    args = train_gpt.parse(["--warmup", str(warmup), "--steps", str(steps), *falling])
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=args.lr)
    schedulers = torch.optim.lr_scheduler
    rising = schedulers.LinearLR(optimizer, 1 / warmup, 1.0, warmup - 1)
    then: Any = {
        "constant": lambda: schedulers.ConstantLR(optimizer, 1.0),
        "linear": lambda: schedulers.LinearLR(optimizer, 1.0, least / args.lr, steps - warmup),
        "cosine": lambda: schedulers.CosineAnnealingLR(optimizer, steps - warmup, least),
    }[decay]()
    both = schedulers.SequentialLR(optimizer, [rising, then], [warmup - 1])
    for step in range(1, steps + 1):
        expected = optimizer.param_groups[0]["lr"]
        assert train_gpt.learning_rate(step, args) == pytest.approx(expected, rel=1e-9), step
        optimizer.step()
        both.step()
    end = args.lr if decay == "constant" else least
    assert train_gpt.learning_rate(steps + 7, args) == pytest.approx(end)


def test_without_decay_the_rate_is_what_it_was() -> None:
    train_gpt: Any = load()
    args = train_gpt.parse([])
    for step in range(1, 50):
        assert train_gpt.learning_rate(step, args) == args.lr * min(1.0, step / 20)
    assert train_gpt.learning_rate(1, train_gpt.parse(["--warmup", "0"])) == args.lr


def test_durations() -> None:
    duration = load("gpt_training/log").duration
    said = [duration(s) for s in (0.42, 9.96, 12.3, 59.7, 200, 3599.8, 7500, 86_399, 200_000)]
    assert said == [
        "0.4 s", "10 s", "12 s", "1 min 00 s", "3 min 20 s", "1 h 00 min", "2 h 05 min",
        "23 h 59 min", "2 d 07 h",
    ]  # fmt: skip
