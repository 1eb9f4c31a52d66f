"""Vocabulary-parallel embedding, head and loss against nn.Embedding and F.cross_entropy."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import commgrid
from commgrid import ShapeError, SpecError
from commgrid.collectives import all_gather, all_reduce, gather_from_group, scatter_to_group
from commgrid.tensor_parallel import (
    VocabParallelEmbedding,
    VocabParallelHead,
    initialize_parameters,
    vocab_parallel_cross_entropy,
)
from commgrid.testing import run_on_ranks
from tests.memory import peak_bytes

# Sums of at most some hundred terms in another order, each good to the dtype's ulp.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def drawn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def close(ours: Tensor | None, theirs: Tensor | None) -> None:
    assert ours is not None
    assert theirs is not None
    bound = TOLERANCE[theirs.dtype]
    scale = float(theirs.detach().abs().max())
    torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound * scale)


def tied_model(tp: int) -> None:
    """Embedding and tied head, as one model, in every way the vocabulary can be padded."""
    me = commgrid.get_grid().get_local_rank("tp")
    for dtype in TOLERANCE:
        for vocabulary in (24, 13, 3):
            for dim in (None, 0, 1):
                options = {"sequence_parallel": dim is not None, "sequence_dim": dim or 0}
                embedding = VocabParallelEmbedding(vocabulary, 6, dtype=dtype, **options)
                head = VocabParallelHead(6, vocabulary, weight=embedding.weight, **options)
                initialize_parameters(nn.ModuleList([embedding, head]), seed=1)
                full = all_gather(embedding.weight.detach(), "tp")
                assert full[vocabulary:].eq(0).all()
                full = full[:vocabulary].requires_grad_()
                tokens = torch.randint(
                    vocabulary, (8, 8), generator=torch.Generator().manual_seed(2)
                )
                hidden, x = embedding(tokens), F.embedding(tokens, full)
                close(hidden, x if dim is None else x.chunk(tp, dim)[me])
                logits = head(torch.tanh(hidden))
                whole = gather_from_group(logits, "tp")
                assert whole[..., vocabulary:].eq(-torch.inf).all()
                expected = torch.tanh(x) @ full.t()
                close(whole[..., :vocabulary], expected)
                target = tokens.roll(1, 0)
                loss = vocab_parallel_cross_entropy(
                    logits, target, vocabulary=vocabulary, reduction="mean"
                )
                loss.backward()
                reference = F.cross_entropy(expected.flatten(0, 1), target.flatten())
                reference.backward()
                close(loss, reference)
                found = all_gather(embedding.weight.grad, "tp")
                assert found[vocabulary:].eq(0).all()
                close(found[:vocabulary], full.grad)


@pytest.mark.full("8")
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_embedding_and_head_equal_the_unsharded_ones(tp: int) -> None:
    def every() -> None:
        commgrid.initialize(tp=tp)
        tied_model(tp)

    run_on_ranks(every, tp)


def losses(tp: int) -> None:
    me = commgrid.get_grid().get_local_rank("tp")
    for dtype in (*TOLERANCE, torch.bfloat16):
        for smoothing in (0.0, 0.1, 1.0):
            for reduction in ("none", "mean", "sum"):
                # Large logits: exp alone would overflow in every dtype.
                full = (drawn(5, 7, 16) * 300).to(dtype).requires_grad_()
                ours = full.detach().chunk(tp, -1)[me].clone().requires_grad_()
                target = torch.randint(16, (5, 7), generator=torch.Generator().manual_seed(1))
                target[0, :3] = -7
                options = {
                    "label_smoothing": smoothing, "ignore_index": -7, "reduction": reduction,
                }  # fmt: skip
                same = ours.detach().clone().requires_grad_()
                vocab_parallel_cross_entropy(
                    same * 1.0, target, overwrite_logits=True, **options
                ).sum().backward()
                loss = vocab_parallel_cross_entropy(ours, target, **options)
                exact = torch.promote_types(dtype, torch.float32)
                reference = F.cross_entropy(
                    full.to(exact).flatten(0, 1), target.flatten(), **options
                )
                close(loss, reference.view(loss.shape))
                loss.backward(torch.ones_like(loss))
                reference.backward(torch.ones_like(reference))
                if dtype == torch.bfloat16:
                    assert torch.equal(ours.grad, same.grad)
                else:
                    close(same.grad, ours.grad)
                whole = all_gather(ours.grad, "tp", dim=-1)
                assert whole.dtype == dtype
                if dtype == torch.bfloat16:  # both round one fp32 gradient to bf16
                    torch.testing.assert_close(whole, full.grad, rtol=2**-7, atol=1e-6)
                else:
                    close(whole, full.grad)


@pytest.mark.full("8")
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_cross_entropy_equals_the_unsharded_one(tp: int) -> None:
    def every() -> None:
        commgrid.initialize(tp=tp)
        losses(tp)

    run_on_ranks(every, tp)


def masked() -> None:
    """Masked logits, -inf: the first column of each part, and of one token a whole part."""
    me = commgrid.initialize(tp=2).get_local_rank("tp")
    full = drawn(3, 8)
    full[:, ::4] = -torch.inf
    full[2, 4:] = -torch.inf
    full.requires_grad_()
    target = torch.tensor([5, 6, 1])
    reference = F.cross_entropy(full, target, reduction="none")
    reference.sum().backward()
    for overwrite in (False, True):
        mine = full.detach().chunk(2, -1)[me].clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(mine * 1.0, target, overwrite_logits=overwrite)
        loss.sum().backward()
        close(loss, reference)
        close(mine.grad, full.grad.chunk(2, -1)[me])


def test_masked_logits() -> None:
    run_on_ranks(masked, 2)


def lockstep() -> None:
    """Gradients of functions of replicated tensors, all ranks nudging the same element."""
    commgrid.initialize(tp=2)
    target = torch.tensor([0, 4, -100, 2])

    def loss(full: Tensor) -> Tensor:
        mine = scatter_to_group(full, "tp")
        return vocab_parallel_cross_entropy(mine, target, vocabulary=5, label_smoothing=0.2)

    assert torch.autograd.gradcheck(loss, (drawn(4, 6).requires_grad_(),))
    for sequence_parallel in (False, True):
        embedding = VocabParallelEmbedding(
            5, 3, dtype=torch.float64, sequence_parallel=sequence_parallel
        )

        def embed(full: Tensor, embedding: nn.Module = embedding) -> Tensor:
            mine = scatter_to_group(full, "tp", dim=0)
            given = {"weight": mine}
            y = torch.func.functional_call(embedding, given, (torch.tensor([0, 4, 1, 4]),))
            return gather_from_group(y, "tp", dim=0) if embedding.sequence_parallel else y

        assert torch.autograd.gradcheck(embed, (drawn(6, 3).requires_grad_(),))


def test_gradcheck() -> None:
    run_on_ranks(lockstep, 2)


def memory() -> tuple[int, int, int]:
    """Peak of the loss forward, and of forward and backward, beyond logits of 16 MiB."""
    commgrid.initialize(tp=2)
    logits = drawn(2048, 2048, dtype=torch.float32).requires_grad_()
    target = torch.randint(4096, (2048,), generator=torch.Generator().manual_seed(0))

    def both() -> None:
        vocab_parallel_cross_entropy(logits, target, reduction="sum").backward()

    forward = peak_bytes(lambda: vocab_parallel_cross_entropy(logits.detach(), target))
    logits.grad = None

    def in_place() -> None:
        whole = logits * 1.0  # 16 MiB of its own
        loss = vocab_parallel_cross_entropy(whole, target, overwrite_logits=True).sum()
        torch.autograd.grad(loss, whole)

    return forward, peak_bytes(both), peak_bytes(in_place)


def test_cross_entropy_needs_the_memory_it_states() -> None:
    for forward, both, in_place in run_on_ranks(memory, 2):
        # 2 MiB at once, and small change: 2 numbers per token of 2 ranks, masks, indices.
        assert forward <= 2 * 2**20 + 2048 * 100
        assert 16 * 2**20 < both <= 16 * 2**20 + 2 * 2**20 + 2048 * 100
        assert 16 * 2**20 < in_place <= 16 * 2**20 + 2 * 2**20 + 2048 * 100


def wrong() -> None:
    commgrid.initialize(tp=2)
    embedding = VocabParallelEmbedding(10, 4)
    for tokens in (torch.tensor([0, 10]), torch.tensor([-1])):
        with pytest.raises(
            ShapeError, match=r"VocabParallelEmbedding\(10, 4\): tokens outside the"
        ):
            embedding(tokens)
    with pytest.raises(ShapeError, match=r"tokens of dtype torch.float32; expected integers"):
        embedding(torch.ones(2))
    with pytest.raises(ShapeError, match=r"the sequence of 3 in dim 0 of shape \(3, 2\) .* 'tp'"):
        VocabParallelEmbedding(10, 4, sequence_parallel=True)(torch.zeros(3, 2, dtype=torch.int64))
    for dtype in (torch.uint8, torch.int16, torch.int32):
        embedding(torch.ones(2, dtype=dtype))
    with pytest.raises(
        SpecError, match=r"VocabParallelHead\(4, 10\): it has no bias, so bias=True"
    ):
        VocabParallelHead(4, 10, bias=True)
    with pytest.raises(ShapeError, match="a vocabulary of 0; expected 1 or more"):
        VocabParallelEmbedding(0, 4)
    logits, target = torch.zeros(3, 4), torch.tensor([0, 1, 7])
    vocab_parallel_cross_entropy(logits, target)
    for call, said in (
        (lambda: vocab_parallel_cross_entropy(logits, target, vocabulary=7),
         r"targets outside the vocabulary of 7: 7 in targets of shape \(3,\) \(group 'tp' of 2"),
        (lambda: vocab_parallel_cross_entropy(logits, target[:2]),
         r"logits of shape \(3, 4\) and target of shape \(2,\)"),
        (lambda: vocab_parallel_cross_entropy(logits, target, vocabulary=9),
         "vocabulary=9, but the 2 ranks of group 'tp' have 8 columns"),
        (lambda: vocab_parallel_cross_entropy(logits, target, label_smoothing=2),
         "label_smoothing=2; expected 0 to 1"),
        (lambda: vocab_parallel_cross_entropy(logits, target, reduction="avg"), "reduction='avg'"),
    ):  # fmt: skip
        with pytest.raises(ShapeError, match=said):
            call()
    assert all_reduce(torch.ones(1), "tp") == 2  # nobody was left waiting


def test_bad_input_is_named() -> None:
    run_on_ranks(wrong, 2)
