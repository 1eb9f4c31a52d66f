"""Evaluation, sample, learning rate and the count of parameters: the same on any grid."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import commgrid
from commgrid.testing import run_on_ranks
from tests.examples.curves import curve, load, run, run_example, same_curve
from tests.sizes import full

TINY = [
    "--layers", "4", "--hidden", "16", "--heads", "4", "--batch-size", "8", "--seq-len", "4",
    "--lr", "1e-2", "--dtype", "fp64",
]  # fmt: skip
LOOKED_AT = [*TINY, "--steps", "3", "--eval-every", "2", "--eval-batches", "3"]
SAMPLED = [*LOOKED_AT, "--sample", "def ", "--sample-tokens", "6", "--temperature", "0"]
SHALLOW = ["--layers", "2"]  # as many as stages
MODELS = {
    "dense": [*SAMPLED, *SHALLOW],
    "tied": [*SAMPLED, "--tie-embeddings"],
    "experts": [*SAMPLED, *SHALLOW, "--experts", "4"],
    "drawn": [*LOOKED_AT, "--sample", "--sample-tokens", "10"],
}
# World size, model, and how it is cut. The short run takes the first two.
CUTS: list[tuple[int, str, list[str]]] = [
    (4, "tied", ["--pp", "2", "--tp", "2", "--sequence-parallel", "--schedule", "zb-h1"]),
    (4, "experts", ["--ep", "2", "--tp", "2", "--fsdp", "--microbatches", "2"]),
    (4, "dense", ["--fsdp", "--tp", "2"]),
    (4, "experts", ["--ep", "2", "--tp", "2", "--zero1"]),
    (2, "drawn", ["--pp", "2", "--chunks", "2", "--microbatches", "4"]),
    (2, "experts", ["--ep", "2", "--fsdp"]),
    (8, "dense", ["--pp", "2", "--tp", "2", "--zero1", "--sequence-parallel"]),
    (8, "drawn", ["--fsdp", "--tp", "2", "--dp-replicate", "2"]),
    (8, "experts", ["--pp", "2", "--ep", "2", "--etp", "2", "--tp", "2"]),
    (8, "tied", ["--pp", "4", "--dp", "2", "--schedule", "1f1b", "--microbatches", "4"]),
]


def watched(*jobs: list[str]) -> list[dict[str, Any]]:
    """What each job's log was told, with all digits."""
    train_gpt: Any = load()
    told: list[dict[str, Any]] = []

    class Watched(train_gpt.Log):  # type: ignore[misc]
        def begin(self, parameters: int, held: int) -> None:
            told.append({"parameters": (parameters, held), "evaluations": []})

        def evaluated(self, loss: float) -> None:
            told[-1]["evaluations"].append((self.last, loss))

        def sample(self, text: str) -> None:
            told[-1]["sample"] = text

    train_gpt.Log = Watched
    run_example(train_gpt, *jobs)
    return told


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    """Each model in one process."""
    models = list(MODELS) if full() else [model for _, model, _ in CUTS[:2]]
    jobs = [MODELS[model] for model in models]
    found = run_on_ranks(watched, 1, *jobs, backend=None, launcher="torchrun", timeout=300)
    return dict(zip(models, found[0], strict=True))


@pytest.mark.full("2", "8")
@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_same_on_any_grid(world: int, alone: dict[str, Any]) -> None:
    cuts = [
        (model, flags) for size, model, flags in (CUTS if full() else CUTS[:2]) if size == world
    ]
    jobs = [[*MODELS[model], *flags] for model, flags in cuts]
    ranks = run_on_ranks(watched, world, *jobs, backend=None, launcher="torchrun", timeout=300)
    for told in ranks:
        for (model, flags), ours in zip(cuts, told, strict=True):
            theirs = alone[model]
            assert ours["sample"] == theirs["sample"], flags
            steps, losses = zip(*ours["evaluations"], strict=True)
            assert steps == (2, 3)
            expected = [loss for _, loss in theirs["evaluations"]]
            assert losses == pytest.approx(expected, rel=1e-9), flags
            assert ours["parameters"][0] == theirs["parameters"][0], flags
            assert ours["parameters"][1] < theirs["parameters"][0], flags


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
    loss, expected, sampled, written, counted, there = run_on_ranks(
        by_hand, 1, SAMPLED, backend=None, launcher="torchrun"
    )[0]
    assert loss == pytest.approx(expected, rel=1e-12)
    assert sampled == written
    assert counted == there


@pytest.mark.full
def test_evaluation_looks_at_other_text_and_changes_nothing(tmp_path: Path) -> None:
    """Nor does it draw from what dropout draws from."""
    dropped = [*TINY, "--steps", "6", "--dropout", "0.2", "--eval-batches", "2"]
    paths = [tmp_path / name for name in ("often", "once")]
    jobs = [
        [*dropped, "--eval-every", every, "--metrics", str(path)]
        for every, path in zip(("1", "6"), paths, strict=True)
    ]
    run_on_ranks(run, 1, *jobs, backend=None, launcher="torchrun")
    often, once = (curve(path) for path in paths)
    assert [row["loss"] for row in often] == [row["loss"] for row in once]
    train_gpt = load()
    args = train_gpt.parse([*dropped, "--eval-every", "1"])
    whole = train_gpt.read_text(None, args.seq_len)
    text = train_gpt.split_text(whole, args)
    assert len(text.held_out) == len(whole) // 10
    assert torch.equal(torch.cat([text.training, text.held_out]), whole)
    args = train_gpt.parse(dropped)
    assert torch.equal(train_gpt.split_text(whole, args).training, whole)


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


@pytest.mark.full
def test_a_falling_rate_goes_on_on_another_grid(tmp_path: Path) -> None:
    """Saved after an evaluation, which leaves some of FSDP's weights gathered."""
    falling = [*TINY, "--warmup", "3", "--lr-decay", "cosine", "--lr-decay-steps", "10"]
    job, saved = [*falling, "--eval-every", "2", "--eval-batches", "1"], str(tmp_path / "saved")
    paths = [tmp_path / name for name in ("through", "first", "then")]
    one = [*job, "--steps", "8", "--metrics", str(paths[0])]
    run_on_ranks(run, 1, one, backend=None, launcher="torchrun")
    run_on_ranks(
        run, 2,
        [*job, "--steps", "4", "--fsdp", "--save", saved, "--save-every", "2",
         "--metrics", str(paths[1])],
        [*job, "--steps", "8", "--pp", "2", "--resume", saved, "--metrics", str(paths[2])],
        backend=None, launcher="torchrun",
    )  # fmt: skip
    through, first, then = (curve(path) for path in paths)
    same_curve([*first, *then], through, "fp64")
