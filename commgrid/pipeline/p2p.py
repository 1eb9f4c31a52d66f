"""Messages between the stages of a pipeline: several tensors each, along a named axis.

    links = StageLinks("pp", device=device)
    links.start(exchange, tensors_of)      posts the sends and receives of one time of a program
    x, mask = links.take(message)          waits for one posted message
    links.finish()                         waits until every send has completed

A message's shapes and dtypes are declared once: the first message across a boundary is preceded
by a header that describes it, and every later message must match, so that only tensors travel and
no stage waits for a description. Gradients have the shapes and dtypes of the floating-point
activations that they belong to.

On NCCL an exchange is one batch, on gloo its messages travel one by one; both in parallel with the
stage's computations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from commgrid.collectives.group_ref import GroupRef
from commgrid.errors import ShapeError, SpecError
from commgrid.pipeline_schedules.messages import Exchange
from commgrid.pipeline_schedules.proof import MOST_LEAVING
from commgrid.pipeline_schedules.schedule import Send, StageMessage
from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.named_failures import blamed
from commgrid.runtime.registry import get_grid
from commgrid.torch_compat.messages import can_send, start_transfers

_HEADER_NUMBERS = 128
_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


class TensorSpec(NamedTuple):
    """A tensor's shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __repr__(self) -> str:
        return f"{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')}"


Specs = tuple[TensorSpec, ...]
Typed = TypeVar("Typed", Tensor, TensorSpec)


@dataclass
class _Travelling:
    """Tensors on their way to or from another stage."""

    peer: int
    message: StageMessage
    tensors: list[Tensor]
    works: list[dist.Work] = field(default_factory=list)


class StageLinks:
    """Sends and receives between this rank's stage and the others of its pipeline.

    Args:
        group: the axis whose ranks are the stages, first to last.
        grid: where it is looked up; None: the default grid.
        device: of received tensors.

    Example:
        >>> import commgrid
        >>> grid = commgrid.initialize()
        >>> links = StageLinks("pp", device=torch.device("cpu"))
        >>> links.stage, links.num_stages
        (0, 1)
        >>> commgrid.shutdown()
    """

    def __init__(
        self, group: str = "pp", grid: HyperCommGrid | None = None, *, device: torch.device
    ) -> None:
        grid = grid or get_grid()
        self.group, self.device = GroupRef(group, grid, owner="StageLinks"), device
        self.ranks = grid.get_ranks(group)
        self.stage, self.num_stages = self.group.rank, self.group.size
        self._declared: dict[tuple[str, int], Specs] = {}  # by kind and boundary
        self._arriving: dict[StageMessage, _Travelling] = {}
        self._leaving: deque[_Travelling] = deque()

    # -- sending and receiving ----------------------------------------------------------

    def start(self, exchange: Exchange, tensors_of: Callable[[Send], Sequence[Tensor]]) -> None:
        """Posts all of an exchange and returns; sent tensors are copied first.

        So a module with a static buffer or a captured CUDA graph may overwrite its output while a
        message is on its way.

        Args:
            exchange: of this stage's program.
            tensors_of: the tensors of a Send.

        Raises:
            ShapeError: tensors of other shapes or dtypes than were declared.
            GoneError: the stage that a header is awaited from is gone.
        """
        sent = {send: tensors_of(send) for send in exchange.sends}
        self._declare(exchange, sent)
        leaving, arriving = [], []
        for send, tensors in sent.items():
            self._check(send.message, tensors)
            leaving.append(_Travelling(send.peer, send.message, _copied(tensors)))
        for recv in exchange.recvs:
            buffers = [
                torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
                for spec in self._declared[recv.message.kind, recv.message.boundary]
            ]
            arriving.append(_Travelling(recv.peer, recv.message, buffers))
            self._arriving[recv.message] = arriving[-1]
        self._post(leaving, arriving)
        # Their tensors are kept because they may still be on their way: gloo does not say whether
        # they are without waiting for them, and waiting too early would hold up what comes next.
        self._let_leave(MOST_LEAVING)

    def take(self, message: StageMessage) -> list[Tensor]:
        """A message's tensors, once they have arrived (on CUDA: once the stream may use them).

        Raises:
            GoneError: the stage that sends it is gone, or does not answer.
        """
        arriving = self._arriving.pop(message)
        self._wait(arriving)
        return arriving.tensors

    def hand_over(self, message: StageMessage, tensors: Iterable[Tensor]) -> None:
        """A message from one chunk of this stage to another, which `take` finds; copied, too."""
        self._arriving[message] = _Travelling(self.stage, message, _copied(tensors))

    def finish(self) -> None:
        """Returns when every send has completed.

        Raises:
            GoneError: a stage that should receive is gone, or does not answer.
        """
        self._let_leave(0)

    def _let_leave(self, remaining: int) -> None:
        while self._leaving and all(work.is_completed() for work in self._leaving[0].works):
            self._leaving.popleft()
        while len(self._leaving) > remaining:
            self._wait(self._leaving.popleft())

    def _post(self, leaving: Sequence[_Travelling], arriving: Sequence[_Travelling]) -> None:
        self._leaving.extend(leaving)
        sends, recvs = (
            [(tensor, one) for one in many for tensor in one.tensors if tensor.numel()]
            for many in (leaving, arriving)
        )

        def refused(error: RuntimeError, peer: int | None) -> Exception:
            every = (*leaving, *arriving)
            return self._explain(error, next((one for one in every if one.peer == peer), every[0]))

        works = start_transfers(
            self.group.group,
            [(tensor, one.peer) for tensor, one in sends],
            [(tensor, one.peer) for tensor, one in recvs],
            refused,
        )
        if len(works) == len(sends) + len(recvs):
            for (_, one), work in zip((*sends, *recvs), works, strict=True):
                one.works.append(work)
        else:  # one batch, which is over when all of it is
            for one in (*leaving, *arriving):
                one.works.extend(works)

    def _wait(self, travelling: _Travelling) -> None:
        try:
            for work in travelling.works:
                work.wait()
        except RuntimeError as error:
            raise self._explain(error, travelling) from error

    def _explain(self, error: RuntimeError, travelling: _Travelling) -> RuntimeError:
        peer, me = travelling.peer, self.stage
        return blamed(
            error, [self.ranks[peer]],
            f"stage {me} (rank {self.ranks[me]}) waited on group {self.group.name!r} for the "
            f"{travelling.message}",
            who=f"stage {peer} (rank {self.ranks[peer]})",
        )  # fmt: skip

    # -- declaring ----------------------------------------------------------------------

    def forget_shapes(self) -> None:
        """Declares anew with the next messages, as where an evaluation has other sizes.

        On all stages, between two steps.
        """
        self._declared.clear()

    def reset(self) -> None:
        """Forgets what was declared and under way: on a new grid, perhaps after a failed step."""
        self.forget_shapes()
        self._arriving.clear()
        self._leaving.clear()

    def _declare(self, exchange: Exchange, sent: dict[Send, Sequence[Tensor]]) -> None:
        """Send and receive headers of boundaries that are crossed for the first time."""
        leaving: list[_Travelling] = []
        arriving: dict[int, _Travelling] = {}
        for send in exchange.sends:
            boundary = send.message.boundary
            if ("activation", boundary) not in self._declared:
                specs = specs_of(sent[send])
                header = self._header(specs, send.message)
                self._set_specs(boundary, specs)
                leaving.append(_Travelling(send.peer, send.message, [header]))
        for recv in exchange.recvs:
            boundary = recv.message.boundary
            if ("activation", boundary) not in self._declared and boundary not in arriving:
                buffer = torch.empty(_HEADER_NUMBERS, dtype=torch.int64, device=self.device)
                arriving[boundary] = _Travelling(recv.peer, recv.message, [buffer])
        if not leaving and not arriving:
            return
        self._post(leaving, list(arriving.values()))
        for boundary, coming in arriving.items():
            self._wait(coming)
            self._set_specs(boundary, _decode(coming.tensors[0].tolist()))

    def _header(self, specs: Specs, message: StageMessage) -> Tensor:
        """The count, then for each tensor its dtype's number, its number of dims and its dims."""
        numbers = [len(specs)]
        for spec in specs:
            if not can_send(spec.dtype, self.group.group, self.device):
                raise SpecError(
                    f"the {message} has a tensor of {spec.dtype}, which NCCL does not send; "
                    "convert it, integers to int32 and complex numbers with torch.view_as_real"
                )
            if spec.dtype not in _DTYPES:
                raise SpecError(
                    f"the {message} has a tensor of {spec.dtype}; expected one of "
                    f"{', '.join(str(dtype).removeprefix('torch.') for dtype in _DTYPES)}"
                )
            numbers += [_DTYPES.index(spec.dtype), len(spec.shape), *spec.shape]
        if len(numbers) > _HEADER_NUMBERS:
            raise SpecError(
                f"the {message} has {len(specs)} tensors, whose dims a header of "
                f"{_HEADER_NUMBERS} numbers does not hold; send fewer, or join them"
            )
        numbers += [0] * (_HEADER_NUMBERS - len(numbers))
        return torch.tensor(numbers, device=self.device)

    def _set_specs(self, boundary: int, specs: Specs) -> None:
        self._declared["activation", boundary] = specs
        self._declared["gradient", boundary] = tuple(differentiable(specs))

    def _check(self, message: StageMessage, tensors: Sequence[Tensor]) -> None:
        declared, found = self._declared[message.kind, message.boundary], specs_of(tensors)
        if found != declared:
            raise ShapeError(
                f"the {message} is {_said(found)}, but the first one over that boundary declared "
                f"{_said(declared)}; give every microbatch one shape (pad it), or call "
                "forget_shapes() on all stages between two steps"
            )


def _copied(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]


def differentiable(tensors: Iterable[Typed]) -> list[Typed]:
    """Those that can have a gradient, of tensors or of their specs."""
    return [one for one in tensors if one.dtype.is_floating_point or one.dtype.is_complex]


def specs_of(tensors: Iterable[Tensor]) -> Specs:
    return tuple(TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors)


def _said(specs: Specs) -> str:
    return " and ".join(map(repr, specs)) or "nothing"


def _decode(numbers: Iterable[int]) -> Specs:
    left = iter(numbers)
    pairs = ((_DTYPES[next(left)], next(left)) for _ in range(next(left)))
    return tuple(TensorSpec(tuple(islice(left, dims)), dtype) for dtype, dims in pairs)
