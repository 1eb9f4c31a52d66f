"""Programs that run twice: on the ranks of a grid, and on one process that has the whole model.

A program is a short function of a `Side`. With the plain side it is torch alone over the data of
all ranks, in fp64; with the other side it is commgrid on one rank. Its weights are then compared
with the plain ones, or its error with the expected words.
"""

from __future__ import annotations

import gc
import re
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import commgrid
from commgrid import CommGridError, PeerFailedError, PeerTimeoutError
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.expert import MoELayer
from commgrid.parameters import mark_parameters, own_slice, placements
from commgrid.pipeline import Pipeline, partition_layers
from commgrid.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from tests.data_parallel.random_draws import INNER, WIDTH
from tests.data_parallel.random_models import Mixture

OUT, ROWS = 6, 8
RIGHT, REFUSED, EITHER = "right", "refused", "right or refused"
NORM = re.compile(r"norm\d*\.weight$")


class Summed:
    """A reducer's calls on one process that has all of the data."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def finish(self, count: float | None = None) -> None:
        """Divide sums by their count."""
        for p in self.model.parameters():
            if p.grad is not None and count is not None:
                p.grad /= count

    def clip_gradients(self, max_norm: float) -> Tensor:
        """As torch."""
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing to wait for."""
        yield

    def close(self) -> None:
        """Nothing to detach."""


class WholePipeline:
    """All microbatches, one after the other, through all layers."""

    is_first = is_last = True

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor]) -> None:
        self.model, self.loss = model, loss

    def step(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        """Forward and backward."""
        losses = torch.stack(
            [self.loss(self.model(x), t) for x, t in zip(inputs, targets, strict=True)]
        )
        losses.sum().backward()
        return losses.detach()


class Block(nn.Module):
    """x and an MLP of its norm."""

    def __init__(self, side: Side, drop: float, sequence: bool, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=side.dtype)
        self.up = side.column(WIDTH, 2 * WIDTH, bias=bias, sequence=sequence)
        self.down = side.row(2 * WIDTH, WIDTH, bias=bias, sequence=sequence)
        self.drop = nn.Dropout(drop)
        if sequence and not side.plain:
            mark_parameters(self.norm, partial="tp")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Side:
    """A program's kit of layers and optimizers: on one rank of a grid, or of torch alone.

    Args:
        grid: None: the plain side.
    """

    def __init__(self, grid: commgrid.HyperCommGrid | None) -> None:
        self.grid, self.plain, self.dtype = grid, grid is None, torch.float64
        self.places: dict[str, Full] = {}

    def size(self, *axes: str) -> int:
        """Of a group; 1 on the plain side."""
        return self.grid.size(*axes) if self.grid is not None else 1

    def at(self, *axes: str) -> int:
        """This rank's place in a group; 0 on the plain side."""
        return self.grid.get_local_rank(*axes) if self.grid is not None else 0

    # -- models -------------------------------------------------------------------------

    def column(self, given: int, made: int, *, sequence: bool = False, **options: Any) -> nn.Module:
        if self.plain:
            return nn.Linear(given, made, dtype=self.dtype, **options)
        return ColumnParallelLinear(
            given, made, sequence_parallel=sequence, dtype=self.dtype, **options
        )

    def row(self, given: int, made: int, *, sequence: bool = False, **options: Any) -> nn.Module:
        if self.plain:
            return nn.Linear(given, made, dtype=self.dtype, **options)
        return RowParallelLinear(
            given, made, sequence_parallel=sequence, dtype=self.dtype, **options
        )

    def moe(self, **options: Any) -> nn.Module:
        """Four experts, of which a token visits two."""
        if self.plain:
            kept = {"gated": False, "softmax_over": "chosen", **options}
            return Mixture(kept, summed=False)
        return MoELayer(WIDTH, INNER, 4, 2, activation=F.gelu, dtype=self.dtype, **options)

    def layers(
        self, blocks: int = 2, *, drop: float = 0.0, sequence: bool = False, bias: bool = True
    ) -> OrderedDict[str, nn.Module]:
        """Blocks and a head, by the names that they have in the whole model."""
        made: OrderedDict[str, nn.Module] = OrderedDict(
            (f"block{i}", Block(self, drop, sequence, bias)) for i in range(blocks)
        )
        made["head"] = nn.Linear(WIDTH, OUT, dtype=self.dtype)
        return made

    def net(self, blocks: int = 2, **options: Any) -> Any:
        """The whole model, its weights filled."""
        return self.fill(nn.Sequential(self.layers(blocks, **options)))

    def stages(self, layers: OrderedDict[str, nn.Module], chunks: int = 1) -> Any:
        """This stage's chunks of the layers, filled; a single one is not in a list."""
        stages, named = self.size("pp"), list(layers.items())
        cut = partition_layers(len(named), stages * chunks)
        own = [cut[c * stages + self.at("pp")] for c in range(chunks)] if stages > 1 else [
            range(len(named))
        ]  # fmt: skip
        made = [self.fill(nn.Sequential(OrderedDict(named[i] for i in one))) for one in own]
        return made[0] if len(made) == 1 else nn.ModuleList(made)

    @torch.no_grad()
    def fill(self, model: Any) -> Any:
        """Set each parameter to its slice of numbers that its name determines."""
        for name, parameter, full in self._fulls(model):
            self.places[name] = full
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            drawn = torch.randn(full.shape, generator=generator, dtype=torch.float64) * 0.4
            parameter.copy_(full.cut(drawn + bool(NORM.search(name))))
        return model

    def _fulls(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Full]]:
        """Name, parameter, and its place in the full one."""
        if self.plain:
            for name, parameter in model.named_parameters():
                yield name, parameter, Full(tuple(parameter.shape), ())
            return
        for placed in placements(model):
            yield placed.name, placed.parameter, Full(placed.shape, placed.shards)

    # -- training -----------------------------------------------------------------------

    def batch(self, step: int, rows: int = ROWS, group: str = "dp") -> tuple[Tensor, Tensor]:
        """This data rank's rows of a batch, and their targets."""
        generator = torch.Generator().manual_seed(1000 + step)
        both = torch.randn(rows, WIDTH + OUT, generator=generator, dtype=torch.float64)
        own = both.to(self.dtype).chunk(self.size(group))[self.at(group)]
        return own[:, :WIDTH], own[:, WIDTH:]

    def loss(self, model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        """The mean square, and on the plain side the routers' own losses."""
        total = (model(x) - target).square().mean()
        for module in model.modules():
            if isinstance(module, Mixture):
                total = total + sum(module.losses)
                module.losses.clear()
        return total

    def reducer(self, model: nn.Module, **options: Any) -> Any:
        """A GradientReducer."""
        return Summed(model) if self.plain else GradientReducer(model, **options)

    def sharded(self, reducer: Any, kind: Any, groups: Any = None, **options: Any) -> Any:
        """A ShardedOptimizer."""
        if self.plain:
            kept = {name: options[name] for name in options if name != "element_wise"}
            return kind(groups or reducer.model.parameters(), **kept)
        return ShardedOptimizer(reducer, kind, groups=groups, **options)

    def pipeline(self, model: Any, schedule: str, count: int, reducer: Any, loss: Any) -> Any:
        """A Pipeline."""
        if self.plain:
            return WholePipeline(model, loss)
        return Pipeline(model, schedule, num_microbatches=count, loss=loss, reducer=reducer)

    def train(
        self,
        model: nn.Module,
        reducer: Any,
        optimizer: Any,
        edit: Callable[[int], Any] = lambda step: None,
        after: Callable[[int], Any] = lambda step: None,
        steps: int = 4,
    ) -> None:
        """The usual loop; `edit` runs before the optimizer's step, `after` behind it."""
        for step in range(steps):
            self.loss(model, *self.batch(step)).backward()
            if reducer is not None:
                reducer.finish()
            edit(step)
            optimizer.step()
            optimizer.zero_grad()
            after(step)

    def train_stages(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        edit: Callable[[int], Any] = lambda step: None,
        count: Callable[[Any], Any] = lambda pipeline: 2,
        schedule: str = "1f1b",
        reducer: Any = None,
        steps: int = 4,
    ) -> None:
        """The same for a pipeline of two microbatches."""
        reducer = reducer or self.reducer(model)
        pipeline = self.pipeline(model, schedule, 2, reducer, F.mse_loss)
        for step in range(steps):
            x, target = self.batch(step)
            pipeline.step(x.chunk(2), target.chunk(2))
            reducer.finish(count=count(pipeline) if not self.plain else 2)
            edit(step)
            optimizer.step()
            optimizer.zero_grad()


@dataclass(frozen=True)
class Full:
    """The full shape of a parameter, and where it is sliced."""

    shape: tuple[int, ...]
    shards: tuple[tuple[int, Any], ...]

    def cut(self, full: Tensor) -> Tensor:
        """This rank's slice."""
        for dim, group in self.shards:
            full = own_slice(full, dim, group, -(-full.shape[dim] // group.size))
        return full


# -- running them --------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """A program, its grid, and the expected result.

    Args:
        run: builds and trains; returns the model, or a number to compare beside it in a tuple.
        expected: RIGHT, REFUSED (by an error on all ranks) or EITHER.
        says: a pattern of that error.
        tolerance: relative, of each parameter.
    """

    run: Callable[[Side], Any]
    expected: str
    says: str = ""
    ranks: int = 2
    tolerance: float = 1e-9
    grid: dict[str, Any] = field(default_factory=dict)


class Table(dict[str, Program]):
    """Programs by name."""

    def program(self, expected: str, says: str = "", **options: Any) -> Any:
        """Add a function; options that are no Program's are the grid's."""
        own = {name: options.pop(name) for name in ("ranks", "tolerance") if name in options}

        def add(run: Callable[[Side], Any]) -> Callable[[Side], Any]:
            assert run.__name__ not in self
            self[run.__name__] = Program(run, expected, says, grid=options, **own)
            return run

        return add


@dataclass(frozen=True)
class Outcome:
    """Result of a program on one rank.

    Args:
        apart: the largest relative distance of any parameter, and its name; None: an error.
        error: kind and text.
        waited: whether the rank had waited for another that failed.
        ours: whether it is a CommGridError.
    """

    apart: tuple[float, str] | None = None
    error: str = ""
    waited: bool = False
    ours: bool = True


def outcomes(table: Table, names: Sequence[str]) -> dict[str, Outcome]:
    """Run programs one after the other on this rank, each on a grid of its own."""
    found = {}
    for name in names:
        found[name] = _outcome(table[name])
        gc.collect()
        dist.barrier()
    return found


def _outcome(program: Program) -> Outcome:
    try:
        torch.manual_seed(0)
        plain = Side(None)
        expected = _numbers(plain, program.run(plain))
        torch.manual_seed(0)
        side = Side(commgrid.initialize(timeout=20.0, **program.grid))
        made = _numbers(side, program.run(side), expected)
        return Outcome(apart=max((_distance(made[n], made[f"of {n}"]), n) for n in made if
                                 not n.startswith("of ")))  # fmt: skip
    except Exception as error:
        waited = isinstance(error, PeerFailedError | PeerTimeoutError) or (
            not isinstance(error, CommGridError) and bool(re.search("gloo|Timed out", str(error)))
        )
        text = f"{type(error).__name__}: {error}"
        return Outcome(error=text, waited=waited, ours=isinstance(error, CommGridError))
    finally:
        commgrid.shutdown()


def _distance(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    apart = (one.double() - other.double()).abs().max() / other.double().abs().max().clamp(1e-30)
    return float("inf") if apart.isnan() else float(apart)


@torch.no_grad()
def _numbers(
    side: Side, result: Any, expected: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Parameters, buffers and numbers; with `expected`, beside each this rank's slice of it."""
    model, *numbers = result if isinstance(result, tuple) else (result,)
    found: dict[str, Tensor] = {}  # without `placements`, which refuses some models by itself
    for part in model if isinstance(model, nn.ModuleList) else [model]:
        for name, parameter in part.named_parameters():
            full = side.places.get(name, Full(tuple(parameter.shape), ()))
            is_dtensor = isinstance(parameter, DTensor)
            found[name] = (parameter.full_tensor() if is_dtensor else parameter).detach().clone()
            if expected is not None:
                found[f"of {name}"] = full.cut(expected[name])
        found |= {name: b.clone() for name, b in part.named_buffers() if b.is_floating_point()}
    found |= {f"number {i}": torch.as_tensor(each) for i, each in enumerate(numbers)}
    if expected is not None:
        for name in [n for n in found if not n.startswith("of ") and f"of {n}" not in found]:
            found[f"of {name}"] = expected[name]
    return found


def judged(program: Program, ranks: Sequence[Outcome]) -> str:
    """Return the difference from the expected result, or an empty text."""
    if all(rank.apart is not None for rank in ranks):
        distance, name = max(rank.apart for rank in ranks if rank.apart is not None)
        if program.expected == REFUSED:
            return f"not refused: trained, {name} wrong by {distance:.2g}"
        if distance <= program.tolerance:
            return ""
        return f"wrong in silence: {name} by {distance:.2g}, expected {program.tolerance:.2g}"
    told = "\n".join(
        f"    rank {i}: {'trained' if rank.apart is not None else rank.error[:400]}"
        for i, rank in enumerate(ranks)
    )
    if program.expected == RIGHT:
        return f"refused though correct:\n{told}"
    if any(rank.apart is not None or rank.waited for rank in ranks):
        return f"refused on some ranks only:\n{told}"
    if any(not rank.ours for rank in ranks):
        return f"failed with an error that is no CommGridError:\n{told}"
    if not all(re.search(program.says, rank.error) for rank in ranks):
        return f"refused without the words {program.says!r}:\n{told}"
    return ""
