"""Assertions about a training function: equal results on every grid, and that all ranks finish.

They do in a test what `commgrid audit` and `commgrid verify` do with a script.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from commgrid.audit.auditing import compare_grids
from commgrid.audit.dry import dry
from commgrid.call_analysis.program import crossed_group, from_traces, whole
from commgrid.call_analysis.rules import RULES
from commgrid.call_analysis.standing import Standings
from commgrid.call_analysis.verification import check
from commgrid.call_records import files as trace_files
from commgrid.errors import CommGridError, SpecError
from commgrid.planning.audited import AuditedGrid
from commgrid.torch_compat import world as torch_world


class GridsDiffer(AssertionError):
    """A program's results on a grid differ from those on the first grid."""


class RanksWait(AssertionError):
    """Ranks of a grid would never finish."""


def same_on_grids(
    train: Callable[..., Any],
    grids: Sequence[str],
    steps: int = 3,
    *,
    args: Sequence[Any] = (),
    tolerance: float | None = None,
    same_weights: bool = False,
    timeout: float = 100.0,
) -> None:
    """Assert that a training function has the same results on every grid.

    Each grid runs the function in its own processes, over gloo, and ends it after `steps` steps.
    Losses, inputs, weights, gradients and buffers are compared with the first grid's at each step.

    Args:
        train: calls `commgrid.initialize`, which takes each grid's sizes instead of its own, and
            trains with an optimizer of `torch.optim`. It takes the same batches on every grid,
            sharded over dp.
        grids: sizes such as `dp=1`, `tp=2`, `dp=2 cp=2`; the first is the reference.
        steps: number of optimizer steps.
        args: arguments of `train`.
        tolerance: relative, of norms; None: 1e-9 for fp64 weights, 1e-4 for fp32 ones.
        same_weights: begin with the first grid's weights, if `train` draws others on other grids.
        timeout: seconds for each grid.

    Raises:
        GridsDiffer: names the grid, the step and the first difference.
        RanksFailed: `train` failed on a grid, or took too long.
        SpecError: fewer than two grids, or an impossible one.

    Example:
        >>> import torch, commgrid
        >>> from commgrid.tensor_parallel import ColumnParallelLinear
        >>> from commgrid.testing import same_on_grids
        >>> def train():
        ...     grid = commgrid.initialize()
        ...     layer = ColumnParallelLinear(4, 8, gather_output=True, dtype=torch.float64)
        ...     optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        ...     for step in range(3):
        ...         layer(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...     commgrid.shutdown()
        >>> same_on_grids(train, ["tp=1", "tp=2"])
    """
    if len(grids) < 2:
        raise SpecError(f"grids={list(grids)}: expected two or more, the first as the reference")
    if steps < 1:
        raise SpecError(f"steps={steps}: expected 1 or more")
    parsed = [_parsed(text) for text in grids]

    with tempfile.TemporaryDirectory(prefix="commgrid-same-") as folder:
        audit = compare_grids(
            _name(train), lambda _: partial(train, *args), parsed, Path(folder),
            lambda _, ranks: ranks.results(), steps=steps, tolerance=tolerance, timeout=timeout,
            same_weights=same_weights,
        )  # fmt: skip
    if audit.parts:
        raise GridsDiffer(audit.text)


def _parsed(text: str, world_size: int | None = None) -> AuditedGrid:
    grid = AuditedGrid.parse(text, world_size)
    if grid.flags:
        raise SpecError(
            f"grid {text!r}: a function has no flags; expected sizes alone, and args= for the rest"
        )
    return grid


def _name(train: Callable[..., Any]) -> str:
    """The name of a function, also of a `functools.partial`."""
    return str(getattr(getattr(train, "func", train), "__name__", train))


def grids(
    max_ranks: int = 8,
    axes: Sequence[str] = ("dp", "tp", "pp"),
    sizes: Sequence[int] = (1, 2, 4, 8),
) -> list[str]:
    """Return every grid of some axes up to a number of ranks, that of one rank first.

    Args:
        max_ranks: number of ranks of a grid at most.
        axes: names of the axes.
        sizes: allowed sizes of an axis besides 1.

    Raises:
        SpecError: a number below 1, no axis, or an axis given twice.

    Example:
        >>> grids(4, axes=("dp", "tp"))
        ['dp=1', 'tp=2', 'dp=2', 'tp=4', 'dp=2 tp=2', 'dp=4']
    """
    if max_ranks < 1 or not axes or any(size < 1 for size in sizes):
        raise SpecError(
            f"grids(max_ranks={max_ranks}, axes={tuple(axes)}, sizes={tuple(sizes)}): expected "
            "numbers of 1 or more, and an axis"
        )
    twice = [axis for place, axis in enumerate(axes) if axis in axes[:place]]
    if twice:
        raise SpecError(
            f"grids(axes={tuple(axes)}): {twice[0]!r} is given twice; expected each axis once"
        )
    every = itertools.product(sorted({1, *sizes}), repeat=len(axes))
    fitting = (each for each in every if math.prod(each) <= max_ranks)
    return [
        " ".join(f"{axis}={n}" for axis, n in zip(axes, each, strict=True) if n > 1)
        or f"{axes[0]}=1"
        for each in sorted(fitting, key=lambda e: (math.prod(e), e))
    ]


def finishes(
    train: Callable[..., Any],
    grid: str,
    world_size: int | None = None,
    backend: str = "nccl",
    *,
    args: Sequence[Any] = (),
    ranks: Sequence[int] | None = None,
    timeout: float = 600.0,
) -> None:
    """Assert that every rank of a grid can finish the calls that one training step issues.

    Each rank is a process in torch's fake world: nothing is sent, and no other rank is needed.

    Args:
        train: as for `same_on_grids`.
        grid: sizes such as `tp=4 pp=2`.
        world_size: number of ranks, from which dp is derived. None: the product of the sizes.
        backend: "nccl" or "gloo", whose rules apply; or "strict": every call blocks.
        args: arguments of `train`.
        ranks: ranks to check; None: all. Calls that involve another rank are ignored.
        timeout: seconds for all ranks together.

    Raises:
        RanksWait: names the calls that wait for each other, or that a rank never issues; or a
            group that ranks create in different orders.
        CommGridError: `train` failed on a rank, or took too long; or a grid is up in this process.
        SpecError: an impossible grid, or an unknown backend.

    Example:
        >>> import torch, commgrid
        >>> from commgrid.collectives import all_reduce
        >>> from commgrid.testing import finishes
        >>> def train():
        ...     grid = commgrid.initialize()
        ...     all_reduce(torch.ones(4), "tp")
        ...     all_reduce(torch.ones(4), "dp")
        >>> finishes(train, "tp=2", world_size=8)
    """
    if torch_world.is_initialized():
        raise CommGridError(
            "finishes() starts ranks in a fake world, and torch.distributed is up in this process; "
            "call it before initialize, or after shutdown"
        )
    made = _parsed(grid, world_size)
    if backend not in RULES:
        raise SpecError(f"backend={backend!r}: expected one of {', '.join(RULES)}")
    with tempfile.TemporaryDirectory(prefix="commgrid-finishes-") as folder:
        dry(partial(train, *args), _name(train), made, Path(folder), ranks=ranks, timeout=timeout)
        traces = trace_files.read(Path(folder))
    crossed = crossed_group(traces)
    if crossed is not None:
        raise RanksWait(crossed.text)
    verdict = check(from_traces(traces if ranks is None else whole(Standings(traces))), backend)
    if not verdict.finishes:
        raise RanksWait(f"{made.text!r} of {made.world_size} ranks: {verdict}\n\n{verdict.draw()}")
