"""The same layers as megatron-core's, with the same weights on the same ranks."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import commgrid
from commgrid.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    initialize_parameters,
    vocab_parallel_cross_entropy,
)
from commgrid.testing import run_on_ranks
from tests import megatron_layers

# fp32 on both sides, the same matmuls and sums of the same parts: a few ulps of the largest.
RELATIVE = 1e-6


def close(ours: Tensor | None, theirs: Tensor | None, what: object) -> None:
    assert ours is not None, what
    assert theirs is not None, what
    scale = float(theirs.detach().abs().max())
    torch.testing.assert_close(
        ours, theirs, rtol=RELATIVE, atol=RELATIVE * scale, msg=lambda m: f"{what}: {m}"
    )


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def first(output: Any) -> Tensor:
    """Megatron's layers return (output, bias)."""
    return output[0]


def blocks() -> None:
    grid = commgrid.get_grid()
    group = grid.get_group("tp")
    for sequence_parallel in (False, True):
        for bias in (True, False):
            options = {"sequence_parallel": sequence_parallel, "bias": bias}
            ours = nn.ModuleList(
                [ColumnParallelLinear(16, 32, **options), RowParallelLinear(32, 16, **options)]
            )
            initialize_parameters(ours, seed=1)
            theirs = nn.ModuleList(
                [megatron_layers.column((16, 32), group, **options),
                 megatron_layers.row((32, 16), group, **options)]
            )  # fmt: skip
            theirs.load_state_dict(ours.state_dict(), strict=False)
            inputs = drawn(8, 3, 16, seed=grid.rank if sequence_parallel else 0)
            x, x_theirs = (inputs.clone().requires_grad_() for _ in range(2))
            y = ours[1](F.gelu(ours[0](x)))
            y_theirs = first(theirs[1](F.gelu(first(theirs[0](x_theirs)))))
            upstream = drawn(*y.shape, seed=10 + grid.rank if sequence_parallel else 10)
            y.backward(upstream)
            y_theirs.backward(upstream)
            close(y, y_theirs, options)
            close(x.grad, x_theirs.grad, options)
            for name, parameter in ours.named_parameters():
                close(parameter.grad, theirs.get_parameter(name).grad, (options, name))
    gathering = ColumnParallelLinear(16, 32, gather_output=True)
    theirs_gathering = megatron_layers.column((16, 32), group, gather_output=True)
    theirs_gathering.load_state_dict(gathering.state_dict(), strict=False)
    close(gathering(drawn(2, 16)), first(theirs_gathering(drawn(2, 16))), "gather_output")


def vocabularies() -> None:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy as theirs_loss

    grid = commgrid.get_grid()
    group, me = grid.get_group("tp"), grid.get_local_rank("tp")
    tokens = torch.randint(32, (8, 3), generator=torch.Generator().manual_seed(1))
    for sequence_parallel in (False, group.size() > 1):
        ours = VocabParallelEmbedding(32, 16, sequence_parallel=sequence_parallel)
        initialize_parameters(ours, seed=1)
        theirs = megatron_layers.embedding((32, 16), group, sequence_parallel=sequence_parallel)
        theirs.load_state_dict(ours.state_dict())
        # Megatron takes (batch, sequence) when it shards the sequence, and turns it round.
        y, y_theirs = ours(tokens), theirs(tokens.t() if sequence_parallel else tokens)
        upstream = drawn(*y.shape, seed=grid.rank if sequence_parallel else 0)
        y.backward(upstream)
        y_theirs.backward(upstream)
        close(y, y_theirs, "embedding")
        close(ours.weight.grad, theirs.weight.grad, "embedding")
    # Megatron smooths over its own part of the vocabulary alone, and counts it as the whole: its
    # ranks then disagree. Where one rank has it all, its share ε·v/(v-1) of the rest is our ε.
    for smoothing in (0.0, 0.1) if group.size() == 1 else (0.0,):
        parts = [drawn(8, 3, 32).chunk(group.size(), -1)[me].clone() for _ in range(2)]
        x, x_theirs = (part.requires_grad_() for part in parts)
        loss = vocab_parallel_cross_entropy(x, tokens, label_smoothing=smoothing * 32 / 31)
        loss_theirs = theirs_loss(x_theirs * 1.0, tokens, smoothing)
        loss.sum().backward()
        loss_theirs.sum().backward()
        close(loss, loss_theirs, "cross-entropy")
        close(x.grad, x_theirs.grad, "cross-entropy")


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_layers_equal_megatrons(tp: int) -> None:
    def every() -> None:
        commgrid.initialize(tp=tp)
        megatron_layers.prepare(commgrid.get_group("tp"))
        blocks()
        vocabularies()

    # The ranks set variables of the environment.
    run_on_ranks(every, tp, check=False)
