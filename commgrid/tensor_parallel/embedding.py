"""Token embedding and output head, split over a group by vocabulary.

Per rank, with n ranks, vocabulary v padded to v' = n · ⌈v / n⌉, and tokens of shape (*):

| layer | weight | forward | communicates forward | backward |
|---|---|---|---|---|
| embedding | (v'/n, h) | rows of own tokens, zeros for others | all-reduce y, or with sequence parallelism reduce-scatter | all-gather ∂y with sequence parallelism |
| head | (v'/n, h) | logits of own part of the vocabulary | all-gather x with sequence parallelism | as the column layer's |

The rows that pad the vocabulary are zero and stay so: no token finds them, and the head's
logits for them are -inf, which no softmax gives a share and no sampling chooses.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from commgrid.collectives.asynchronous import (
    as_output,
    start_all_gather,
    start_all_reduce_,
    start_reduce_scatter,
)
from commgrid.collectives.first_order import first_order
from commgrid.collectives.group_ref import GroupRef
from commgrid.equality.inputs import note
from commgrid.errors import ShapeError, SpecError
from commgrid.runtime.grid import HyperCommGrid
from commgrid.tensor_parallel.init import Init, draw
from commgrid.tensor_parallel.linear import ColumnParallelLinear, Output, ParallelLayer


class VocabParallelEmbedding(ParallelLayer):
    """A token's row of a table that is split by rows, vocabulary padded to fit.

    Args:
        num_embeddings: the vocabulary's size v; any, it is padded.
        embedding_dim: width h of a row.
        sequence_parallel: y is this rank's slice of the sequence.
        sequence_dim: which dim of the tokens is the sequence.
        init: fills the full weight (v, h) in place; None: normal, as nn.Embedding.
        group: a group name, or a bare ProcessGroup (which cannot be pickled).
        grid: the grid to look the name up in; None: the default one.
        device, dtype: as nn.Embedding's; "meta" as ColumnParallelLinear's.

    Shapes:
        tokens: (*), integers, equal on all ranks; y: (*, h), with `sequence_parallel` of 1/n
        of the tokens' length in `sequence_dim`. weight: (padded_size / n, h).

    Communication:
        Forward all-reduce of y, backward none. With `sequence_parallel`: forward
        reduce-scatter of y, backward all-gather of ∂y.

    Raises:
        ShapeError: a token outside 0 … v - 1, or a sequence the group's size does not divide.
        GridNotInitializedError: called after its grid was destroyed.
    """

    shard_dims: ClassVar[Mapping[str, int]] = {"weight": 0}

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        init: Init | None = None,
        group: str | ProcessGroup = "tp",
        grid: HyperCommGrid | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            f"VocabParallelEmbedding({num_embeddings}, {embedding_dim})", group=group, grid=grid,
            sequence_parallel=sequence_parallel, sequence_dim=sequence_dim,
            device=device, dtype=dtype,
        )  # fmt: skip
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self._init = init
        share = vocabulary_share(num_embeddings, self.group)
        self.padded_size = share * self.group.size
        self.weight = self._new_parameter(share, embedding_dim)
        self.reset_parameters()

    def full_shape(self, name: str) -> tuple[int, ...]:
        return self.num_embeddings, self.embedding_dim

    def reset_parameters(self) -> None:
        """Draws this rank's rows of the full weight; rows past the vocabulary are zero."""
        shape = (self.num_embeddings, self.embedding_dim)
        draw(self.weight, shape, self._init or nn.init.normal_, 0, self.group)

    def forward(self, tokens: Tensor) -> Tensor:
        check_indices(tokens, self.num_embeddings, self.group.owner, "tokens", self.group)
        if self.sequence_parallel and not -tokens.dim() <= self.sequence_dim < tokens.dim():
            raise ShapeError(
                f"{self.group.owner}: tokens of shape {tuple(tokens.shape)} have no dim "
                f"{self.sequence_dim} for the sequence; give sequence_dim= a dim of the tokens"
            )
        self._check_sequence(tokens)
        note(f"{self.group.owner}'s tokens", tokens, self.group)
        dim = self._sharded_dim
        if dim is not None and dim < 0:
            dim -= 1  # y has one more dim than the tokens
        y: Tensor = _Embed.apply(tokens.long(), self.weight, self.group.group, dim)  # type: ignore[no-untyped-call]
        return y

    def extra_repr(self) -> str:
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, padded to {self.padded_size}, "
            f"sequence_parallel={self.sequence_parallel}, {self.group}"
        )


class VocabParallelHead(ColumnParallelLinear):
    """Logits of this rank's part of a padded vocabulary; may share the embedding's weight.

    A ColumnParallelLinear without bias whose output features need not be divisible: each rank
    has the rows that VocabParallelEmbedding of the same vocabulary gives it.

    Args:
        in_features: width h of x.
        vocabulary: the vocabulary's size v, without padding.
        **options: as ColumnParallelLinear's; `weight=embedding.weight` ties the two.

    Shapes:
        x: (*, h); y: (*, padded_size / n), -inf where it is padding, or (*, v) with
        `gather_output`.
    """

    def __init__(self, in_features: int, vocabulary: int, **options: Any) -> None:
        for option in ("bias", "skip_bias_add"):
            if option in options:
                raise SpecError(
                    f"VocabParallelHead({in_features}, {vocabulary}): it has no bias, so "
                    f"{option}={options[option]!r} means nothing; leave it out"
                )
        super().__init__(in_features, vocabulary, bias=False, **options)

    def _rows(self, out_features: int) -> int:
        return vocabulary_share(out_features, self.group)

    def full_shape(self, name: str) -> tuple[int, ...]:
        return self.out_features, self.in_features

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Output:
        logits = super().forward(x, weight)
        assert isinstance(logits, Tensor)
        if self.gather_output:
            return logits[..., : self.out_features]
        share = vocabulary_share(self.out_features, self.group)
        real = min(max(self.out_features - self.group.rank * share, 0), share)
        if real == share:
            return logits
        if torch.compiler.is_compiling():  # torch 2.11 cannot write into what another Function made
            return F.pad(logits[..., :real], (0, share - real), value=-torch.inf)
        logits[..., real:] = -torch.inf
        return logits


def vocabulary_share(vocabulary: int, group: GroupRef) -> int:
    """Number of rows of the padded vocabulary on each rank."""
    if vocabulary < 1:
        raise ShapeError(f"{group.owner}: a vocabulary of {vocabulary}; expected 1 or more")
    return -(-vocabulary // group.size)


def check_indices(indices: Tensor, size: int, who: str, what: str, group: GroupRef) -> None:
    """Refuses indices outside the vocabulary, on CUDA without waiting for the device.

    Raises:
        ShapeError: on the CPU; on CUDA and in compiled code it is an assertion of the same words.
    """
    if indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
        raise ShapeError(f"{who}: {what} of dtype {indices.dtype}; expected integers")
    if indices.numel() == 0:
        return
    low, high = indices.aminmax()
    said = f"{who}: {what} outside the vocabulary of {size}"
    if indices.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async((low >= 0) & (high < size), said)
    elif low < 0 or high >= size:
        raise ShapeError(
            f"{said}: {int(low) if low < 0 else int(high)} in {what} of shape "
            f"{tuple(indices.shape)} (group {group.name!r} of {group.size} ranks)"
        )


class _Embed(torch.autograd.Function):
    """Rows of the own part of the table, zero for others' tokens, summed over the group."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weight: Tensor, group: ProcessGroup, sequence_dim: int | None
    ) -> Tensor:
        share = weight.shape[0]
        rows = tokens - group.rank() * share
        others = (rows < 0) | (rows >= share)
        rows.masked_fill_(others, 0)
        y = F.embedding(rows, weight)
        if group.size() > 1:
            y.masked_fill_(others.unsqueeze(-1), 0)
            if sequence_dim is None:
                y = start_all_reduce_(y, group).wait()
            else:
                y = start_reduce_scatter(y, group, sequence_dim).wait()
        ctx.save_for_backward(rows, others, weight)
        ctx.group, ctx.sequence_dim = group, sequence_dim
        return as_output(y)

    @staticmethod
    @first_order("VocabParallelEmbedding")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        rows, others, weight = ctx.saved_tensors
        if ctx.sequence_dim is not None and ctx.group.size() > 1:
            dy = start_all_gather(dy, ctx.group, ctx.sequence_dim).wait()
        dy, rows, own = dy.reshape(-1, dy.shape[-1]), rows.reshape(-1), ~others.reshape(-1)
        if dy.device.type == "cpu" and not torch.compiler.is_compiling():
            rows, dy = rows[own], dy[own]  # on CUDA the host would wait for how many there are
        else:
            dy = dy.masked_fill(~own.unsqueeze(-1), 0)  # also where it is infinite
        # Many tokens of one row: added up in fp32, rounded once.
        exact = torch.promote_types(weight.dtype, torch.float32)
        made = torch.zeros_like(weight, dtype=exact).index_add_(0, rows, dy.to(exact))
        return None, made.to(weight.dtype), None, None
