"""The same curve however sequences are shared out over cp, whole texts and packs of documents."""

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import commgrid
from commgrid.tensor_parallel import vocab_parallel_cross_entropy
from commgrid.testing import run_on_ranks
from tests.examples.curves import PROMISED, SOME, curve, load, run, same_curve
from tests.sizes import full, some

STEPS = PROMISED if full() else 4
TINY = [
    "--layers", "2", "--hidden", "16", "--heads", "4", "--kv-heads", "2", "--batch-size", "8",
    "--seq-len", "24", "--clip-grad", "1.5", "--dtype", "fp64", "--lr", "1e-2",
]  # fmt: skip
KINDS = {
    "plain": [],
    "packed": ["--packed"],
    "odd": ["--seq-len", "22"],  # no multiple of cp
    "experts": ["--experts", "4"],
    "packed experts": ["--packed", "--experts", "4"],
}
"""The jobs that have one curve each."""

# The kind of job, and how it is cut.
GRIDS: dict[int, list[tuple[str, str]]] = {
    2: [
        ("plain", "--cp 2 --cp-comm ring"),
        ("packed", "--cp 2 --zero1"),
    ],
    4: [
        ("plain", "--cp 4 --cp-comm ring"),
        ("plain", "--cp 4 --cp-comm 2d"),
        ("packed", "--cp 4 --cp-comm ulysses"),
        ("packed", "--cp 4 --cp-comm 2d"),
        ("odd", "--cp 4"),
        ("plain", "--cp 2 --tp 2 --sequence-parallel --zero1 --cp-comm allgather"),
        ("packed", "--cp 2 --pp 2 --microbatches 4 --schedule zb-h1"),
        ("packed", "--cp 2 --dp 2 --fsdp --cp-comm allgather"),
        ("experts", "--cp 2 --dp 2 --ep 4"),
        ("packed experts", "--cp 2 --dp 2 --ep 2 --fsdp"),
    ],
    6: [
        ("packed", "--cp 3 --tp 2 --sequence-parallel"),
        ("plain", "--cp 3 --dp 2 --zero1"),
        ("odd", "--cp 3 --pp 2"),
    ],
    8: [
        ("plain", "--cp 2 --tp 2 --pp 2 --sequence-parallel --cp-comm ulysses"),
        ("plain", "--cp 4 --tp 2 --sequence-parallel --cp-comm 2d"),
        ("plain", "--cp 8"),
        ("packed experts", "--cp 2 --tp 2 --dp 2 --ep 4 --etp 1 --sequence-parallel --zero1"),
        ("plain", "--cp 2 --tp 2 --dp 2 --fsdp --dp-replicate 2 --sequence-parallel"),
    ],
}


def many_documents(path: Path) -> Path:
    """A text of documents of 7 to 40 bytes."""
    draw = random.Random(0)

    def letters(most: int) -> str:
        return "".join(draw.choice("abcdefgh ") for _ in range(draw.randint(1, most)))

    path.write_text(
        "".join(f"{letters(6)}\n{draw.choice('=*-') * 3}\n{letters(30)}\n" for _ in range(60))
    )
    return path


def cut_by_masks(*jobs: list[str]) -> None:
    """As `run`, where attention is torch's over all pairs, with a mask that separates documents."""

    def masked(q: Tensor, k: Tensor, v: Tensor, *, sharding: Any, way: str) -> Tensor:
        ids = torch.repeat_interleave(torch.tensor(sharding.document_lengths))
        mask = (ids[:, None] == ids).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    load()
    sys.modules["gpt_model"].attention = masked  # type: ignore[attr-defined]
    run(*jobs)


def job(kind: str, text: Path, *more: str) -> list[str]:
    return [*TINY, "--steps", str(STEPS), "--data", str(text), *KINDS[kind], *more]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return many_documents(tmp_path_factory.mktemp("text") / "text")


@pytest.fixture(scope="module")
def alone(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process, whose packs of documents are cut by masks."""
    folder = tmp_path_factory.mktemp("alone")
    kinds = list(KINDS) if full() else ["plain", "packed"]
    given = [job(kind, text, "--metrics", str(folder / kind)) for kind in kinds]
    run_on_ranks(cut_by_masks, 1, *given, backend=None, launcher="torchrun", timeout=300)
    found = {kind: curve(folder / kind) for kind in kinds}
    assert found["plain"][-1]["loss"] < found["plain"][0]["loss"]
    assert any(row["grad_norm"] > 1.5 for row in found["plain"])  # so that clipping clips
    losses = {kind: rows[0]["loss"] for kind, rows in found.items()}
    assert len(set(losses.values())) == len(losses)  # documents make a difference
    return found


@pytest.mark.full("4", "6", "8")
@pytest.mark.parametrize("world", GRIDS)
def test_same_curve_however_sequences_are_shared(
    world: int, text: Path, alone: dict[str, Any], tmp_path: Path
) -> None:
    cuts = some(GRIDS[world], 2)
    steps = [STEPS if index == 0 else min(STEPS, SOME) for index in range(len(cuts))]
    given = [
        [*job(kind, text, *flags.split(), "--metrics", str(tmp_path / str(index))),
         "--steps", str(steps[index])]
        for index, (kind, flags) in enumerate(cuts)
    ]  # fmt: skip
    for made in run_on_ranks(run, world, *given, backend=None, launcher="torchrun", timeout=400):
        assert made == [0] * len(cuts)
    for index, (kind, flags) in enumerate(cuts):
        rows = curve(tmp_path / str(index))
        assert len(rows) == steps[index]
        try:
            same_curve(rows, alone[kind][: len(rows)], "fp64")
        except AssertionError as error:
            raise AssertionError(f"{kind} {flags}: {error}") from error


@pytest.mark.full
def test_packed_alone_as_with_masks(text: Path, alone: dict[str, Any], tmp_path: Path) -> None:
    """One process, and a pipeline that cuts the batch into microbatches: longer packs, or fewer."""
    metrics = str(tmp_path / "metrics")
    given = job("packed", text, "--metrics", metrics, "--microbatches", "2")
    run_on_ranks(run, 1, given, backend=None, launcher="torchrun", timeout=300)
    same_curve(curve(tmp_path / "metrics"), alone["packed"], "fp64")


@pytest.mark.full
def test_a_run_goes_on_with_another_cp(text: Path, alone: dict[str, Any], tmp_path: Path) -> None:
    folder, metrics = str(tmp_path / "saved"), tmp_path / "metrics"
    half = [*job("packed", text, "--cp", "4", "--save", folder), "--steps", str(STEPS // 2)]
    rest = job("packed", text, "--cp", "2", "--resume", folder, "--metrics", str(metrics))
    run_on_ranks(run, 4, half, rest, backend=None, launcher="torchrun", timeout=300)
    same_curve(curve(metrics), alone["packed"][STEPS // 2 :], "fp64")


# -- evaluation, the sample, and documents ------------------------------------------------------


def looks(*jobs: list[str]) -> list[tuple[float, str]]:
    """Each job's evaluation loss and sample, untrained."""
    train_gpt, found = load(), []
    for one in jobs:
        args = train_gpt.parse(one)
        grid = train_gpt.make_grid(args)
        text = train_gpt.split_text(train_gpt.read_text(args.data, args.seq_len), args)
        trainer = train_gpt.Trainer(args, grid)
        loss = trainer.evaluate(train_gpt.evaluation_batches(text.held_out, args))
        found.append((loss, train_gpt.generate(trainer)))
        commgrid.destroy()
    commgrid.shutdown()
    return found


@pytest.mark.full
def test_evaluation_and_sample_do_not_depend_on_cp(text: Path) -> None:
    more = ["--eval-every", "9", "--eval-batches", "2", "--held-out", "0.3", "--temperature", "0"]
    # The model looks at no more than the last 24 bytes.
    more += ["--sample", "aaa\nheading\n===\nab cd", "--sample-tokens", "6"]
    jobs = [[*job(kind, text), *more] for kind in ("plain", "packed")]
    expected = run_on_ranks(looks, 1, *jobs, backend=None, launcher="torchrun")[0]
    shared = [[*one, "--cp", "2", "--pp", "2"] for one in jobs]
    for found in run_on_ranks(looks, 4, *shared, backend=None, launcher="torchrun", timeout=300):
        for (loss, sample), (reference, said) in zip(found, expected, strict=True):
            assert loss == pytest.approx(reference, rel=1e-12)
            assert sample == said


def one_by_one(text: Path) -> tuple[float, float]:
    """The loss of a pack, and that of its documents, each alone through the model."""
    train_gpt = load()
    args = train_gpt.parse([*job("packed", text), "--batch-size", "2", "--experts", "2"])
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


@pytest.mark.full
def test_a_pack_has_the_loss_of_its_documents(text: Path) -> None:
    found, expected = run_on_ranks(one_by_one, 1, text, backend=None, launcher="torchrun")[0]
    assert found == pytest.approx(expected, rel=1e-13)


def test_documents_begin_at_headings() -> None:
    load()
    lengths = sys.modules["gpt_context"].document_lengths
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


# -- what does not fit ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--cp 8 --seq-len 6", "--seq-len 6 is less than --cp 8"),
        (
            "--cp 4 --tp 2 --sequence-parallel --seq-len 20",
            "--seq-len 20 cannot be shared equally by --cp 4 × --tp 2 with --sequence-parallel; "
            "expected a multiple of 8",
        ),
        ("--cp 3 --pp 2 --packed --seq-len 20", "in one shape; expected a multiple of 3"),
        ("--cp 3 --cp-comm ulysses", "ulysses cannot share the 8 heads (8 of keys) of a tp rank"),
        ("--cp 4 --tp 4 --cp-comm ulysses", "the 2 heads (2 of keys) of a tp rank among --cp 4"),
        ("--cp 5 --cp-comm 2d", "--cp-comm 2d cannot split --cp 5"),
        ("--cp 9 --cp-comm 2d", "--cp-comm 2d cannot split --cp 9: the ranks inside share the 8"),
        ("--cp-comm ring", "--cp-comm is about --cp N"),
        ("--cp 2 --dropout 0.1", "--dropout 0.1 is of attention too, which has none"),
        ("--packed --dropout 0.1", "--dropout 0.1 is of attention too, which has none"),
        ("--cp 2 --cp-comm rign", "invalid choice: 'rign'"),
    ],
)
def test_what_does_not_fit_is_one_line(
    flags: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train_gpt = load()
    context = sys.modules["gpt_context"]

    def check() -> None:
        args = train_gpt.parse(flags.split())
        context.split_of_cp(args)
        context.check_context(args, None)

    with pytest.raises(SystemExit) as found:
        check()
    told = f"{found.value}" if isinstance(found.value.code, str) else capsys.readouterr().err
    assert said in told
    assert told.strip().count("\n") == 0


def test_2d_puts_as_many_ranks_inside_as_share_heads() -> None:
    train_gpt = load()
    split = sys.modules["gpt_context"].split_of_cp
    for flags, inside in {
        "--cp 8": 4,
        "--cp 8 --tp 4": 2,
        "--cp 6 --heads 6 --hidden 96": 3,
    }.items():
        rows = split(train_gpt.parse([*flags.split(), "--cp-comm", "2d"]))
        assert rows == {"cp_levels": {"of": "cp", "split": {"cp_ring": -1, "cp_a2a": inside}}}
    assert split(train_gpt.parse(["--cp", "4"])) == {}
