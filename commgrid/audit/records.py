"""Records of an audit, a file for each step and rank, and their reading."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from commgrid.errors import CommGridError

Chunks = list[tuple[tuple[int, ...], Tensor]]
"""Boxes of a full tensor that a rank has: their offsets, and what lies there."""

LARGEST = 1 << 20
"""Elements of a full tensor that are kept, about; of a larger one every n-th row."""


@dataclass
class StepRecord:
    """The record of one step on one rank.

    Args:
        weights, buffers: after it; of step 0, as the program began.
        before: gradients as this rank's backward has found them.
        after: gradients as the optimizer is given them.
        reduced: for each gradient the collectives over its memory: operation, group, place.
        backward: what backward has come to, in order: for a gradient "", its name and "", for a
            collective of a module operation, group and place.
        loss: the sum of all losses.
        clip: the factor by which gradients were clipped.
        backwards: how often it began.
        modules: by name and output: calls, elements, sum, sum of squares.
        inputs: likewise, of the model's integer inputs.
        within: collectives by the module whose forward has run them.
        drawn: digests of each dropout's generator state and input.
    """

    weights: dict[str, Chunks] = field(default_factory=dict)
    buffers: dict[str, Chunks] = field(default_factory=dict)
    before: dict[str, Chunks] = field(default_factory=dict)
    after: dict[str, Chunks] = field(default_factory=dict)
    reduced: dict[str, list[list[str]]] = field(default_factory=dict)
    backward: list[list[str]] = field(default_factory=list)
    loss: float = 0.0
    clip: float = 1.0
    backwards: int = 0
    modules: dict[str, list[float]] = field(default_factory=dict)
    inputs: dict[str, list[float]] = field(default_factory=dict)
    within: dict[str, list[list[str]]] = field(default_factory=dict)
    drawn: dict[str, list[int]] = field(default_factory=dict)


Records = Mapping[int, StepRecord]
"""All ranks' records of a step, by rank."""


@dataclass
class About:
    """A rank's description of itself and of the model.

    Args:
        rank, world_size: of the process.
        coordinates: by region and axis, where it is.
        shapes: by region and axis, the grid's sizes.
        parameters: by name the full shape and the region.
        dtype: of most parameters.
        twice: names that two of its modules have.
        notes: what is not compared, and why.
        steps: how many it has taken part in.
    """

    rank: int = 0
    world_size: int = 1
    coordinates: dict[str, dict[str, int]] = field(default_factory=dict)
    shapes: dict[str, dict[str, int]] = field(default_factory=dict)
    parameters: dict[str, tuple[list[int], str]] = field(default_factory=dict)
    dtype: str = ""
    twice: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    steps: int = 0


def thinned(chunks: list[Any], shape: tuple[int, ...]) -> Chunks:
    """Copies of boxes; of a large tensor only every n-th row of the full one, on every grid alike.

    Example:
        >>> [(offset, len(part)) for offset, part in thinned([((3,), torch.ones(4))], (8,))]
        [((3,), 4)]
    """
    every = -(-torch.Size(shape).numel() // LARGEST)
    found: Chunks = []
    for offset, part in chunks:
        if every == 1 or not shape:
            found.append((offset, part.detach().to("cpu", copy=True)))
            continue
        first = -(-offset[0] // every)  # the first row kept, counted among the kept rows
        rows = range(first * every - offset[0], part.shape[0], every)
        if len(rows):
            kept = part.detach()[rows.start :: every].to("cpu", copy=True)
            found.append(((first, *offset[1:]), kept))
    return found


def thin_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the part that `thinned` keeps of a full tensor."""
    every = -(-torch.Size(shape).numel() // LARGEST)
    return shape if every == 1 or not shape else (-(-shape[0] // every), *shape[1:])


def slices_of(offset: Sequence[int], part: Tensor) -> tuple[slice, ...]:
    """Where a box lies in the full tensor."""
    return tuple(slice(b, b + n) for b, n in zip(offset, part.shape, strict=True))


def write_step(folder: Path, rank: int, step: int, record: StepRecord) -> None:
    """Leaves a rank's record, complete or absent."""
    path = folder / f"rank_{rank:05}_step_{step:04}.pt"
    torch.save(vars(record), path.with_suffix(".half"))
    path.with_suffix(".half").rename(path)


def write_about(folder: Path, about: About) -> None:
    """Leaves what a rank says of itself."""
    path = folder / f"rank_{about.rank:05}.json"
    path.with_suffix(".half").write_text(json.dumps(asdict(about)), encoding="utf-8")
    path.with_suffix(".half").rename(path)


def read_about(folder: Path) -> list[About]:
    """The descriptions of all ranks, by rank.

    Raises:
        CommGridError: none has said anything.
    """
    found = [
        About(**json.loads(path.read_text(encoding="utf-8")))
        for path in sorted(folder.glob("rank_[0-9]*.json"))
    ]
    if not found:
        raise CommGridError(
            f"{folder}: no rank has left anything: an audit sees programs that call an nn.Module "
            "and then the step() of a torch.optim optimizer, at least once"
        )
    return found


def read_step(folder: Path, step: int) -> dict[int, StepRecord]:
    """All ranks' records of a step, by rank; empty: there is none."""
    return {
        int(path.name.split("_")[1]): StepRecord(**torch.load(path, weights_only=True))
        for path in sorted(folder.glob(f"rank_*_step_{step:04}.pt"))
    }


def mark_done(folder: Path, rank: int) -> None:
    """This rank needs no other any more."""
    (folder / f"done_{rank:05}").touch()


def await_all(folder: Path, world_size: int) -> None:
    """Wait until every rank that the launcher has started is done."""
    while len(list(folder.glob("done_*"))) < world_size:
        time.sleep(0.01)


def first_weights(
    folder: Path, wanted: Iterable[Any]
) -> Iterator[tuple[Any, list[tuple[Tensor, Tensor]]]]:
    """The weights that another grid began with, where this rank's parameters lie.

    Args:
        folder: the other grid's.
        wanted: the parameters, `AuditedParameter`.

    Yields:
        Each that it has whole, and for each of its boxes this rank's tensor and the other's values.
    """
    whole: dict[str, Tensor] = {}
    found, about = read_step(folder, 0), read_about(folder)
    for held in wanted:
        chunks = [c for each in found.values() for c in each.weights.get(held.name, ())]
        shapes = {tuple(each.parameters.get(held.name, [held.shape])[0]) for each in about}
        is_twice = any(held.name.rpartition(".")[0] in each.twice for each in about)
        if not chunks or is_twice or shapes != {held.shape} or thin_shape(held.shape) != held.shape:
            continue
        full = whole.setdefault(held.name, chunks[0][1].new_zeros(held.shape))
        for offset, part in chunks:
            full[slices_of(offset, part)] = part
        yield held, [(mine, full[slices_of(o, mine)]) for o, mine in held.chunks(held.parameter)]
