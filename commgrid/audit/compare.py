"""Compare the records of one grid with those of a reference, step by step."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import Any

from commgrid.audit.assemble import GridRanks, Joined, join, ratio, relative
from commgrid.audit.finding import Comparison, Divergence
from commgrid.audit.forward import ForwardStep
from commgrid.audit.gradients import Case
from commgrid.audit.names import ambiguous, lacking
from commgrid.audit.records import (
    Chunks,
    Records,
    StepRecord,
    read_about,
    read_step,
    thin_shape,
)

TOLERANCES = {"float64": 1e-9, "float32": 1e-4}
"""By the dtype of most weights, relative."""
_ROUGH = 2e-2
_FLOOR = {"float64": 1e-6}  # of an element's usual size: what is smaller is rounding
_ROUGH_FLOOR = 1e-2


class Seen:
    """The records of one grid.

    Args:
        grid: the text that the user gave.
        folder: where.
    """

    def __init__(self, grid: str, folder: Path) -> None:
        self.grid, self.folder = grid, folder
        self.about = read_about(folder)
        self.ranks = GridRanks(self.about)
        self.parameters: dict[str, Any] = {}
        for each in self.about:
            self.parameters |= each.parameters
        self.steps = min(each.steps for each in self.about)
        self.dtype = self.about[0].dtype  # of most weights


def compare(reference: Seen, other: Seen, tolerance: float | None = None) -> Comparison:
    """Where one grid parts from another, or from itself.

    Args:
        reference: what is taken for right.
        other: the grid that is looked at; the reference itself, for its copies alone.
        tolerance: relative; None: `TOLERANCES` by dtype.
    """
    limit = tolerance or TOLERANCES.get(other.dtype, _ROUGH)
    work = _Work(reference, other, limit)
    steps, step = min(reference.steps, other.steps), 0
    findings: list[Divergence] = []
    if missing := lacking(reference.about, other.about):
        have = missing[0] in reference.parameters
        grids = (other.grid, reference.grid) if have else (reference.grid, other.grid)
        work.unknown[""] = (
            f"nothing is compared: {missing[0]} is a parameter on {grids[1]} and on no rank of "
            f"{grids[0]}; give parameters the names of the whole model on every grid"
        )
        steps = 0
    else:
        findings += work.begins()
    while not findings and step < steps:
        step += 1
        findings += work.step(step)
    notes = [*work.unknown.values(), *(note for each in other.about for note in each.notes)]
    return Comparison(
        other.grid, step, dict(work.compared), tuple(findings), work.largest,
        tuple(dict.fromkeys(notes)), limit, not work.unknown,
    )  # fmt: skip


class _Work:
    """One grid beside the reference, at one step after the other."""

    def __init__(self, reference: Seen, other: Seen, tolerance: float) -> None:
        self.reference, self.other, self.tolerance = reference, other, tolerance
        self._loose = max(10 * tolerance, 1e-6)  # of classifications: above rounding, below chance
        self.compared: Counter[str] = Counter()
        self.largest = 0.0
        self._share = _FLOOR.get(other.dtype, _ROUGH_FLOOR)
        self._noisy: dict[str, Any] = {}  # elements whose gradients were rounding alone
        self.unknown = ambiguous(reference.about, other.about)
        """Why names are not compared."""

    def _read(self, step: int) -> None:
        self._step = step
        self._theirs = read_step(self.reference.folder, step)
        self._mine = read_step(self.other.folder, step)

    def begins(self) -> Iterator[Divergence]:
        """Weights and buffers before the first step."""
        self._read(0)
        yield from self._weights()
        yield from self._buffers()

    def step(self, step: int) -> Iterator[Divergence]:
        """Return the findings of one step, the first difference with its likely cause."""
        self._read(step)
        losses: list[Divergence] = []
        hard: list[Divergence] = []
        if not self.unknown:  # else nothing says that all weights began alike
            losses += self._losses()
            hard += [*losses, *self._gradients()]
        hard = hard or [*self._weights()]
        hard = hard or [*self._buffers()]
        forward = ForwardStep(
            self._finding, self.other.ranks, self._theirs, self._mine, self.tolerance
        )
        soft = [*forward.drops(has_parted=bool(hard))]
        if hard:
            soft = soft or [*forward.inputs()]
            has_losses = "losses" in self.compared
            soft = soft or ([*forward.modules()] if losses or not has_losses else [])
        yield from [*soft, *hard]

    # -- tensors ------------------------------------------------------------------------

    def _weights(self) -> Iterator[Divergence]:
        wanted, found = self._joined("weights")
        floor = self._share * _usual(each.full for each in wanted.values())
        kind = "update" if self._step else "seed"
        for name, joined in found.items():
            if name not in wanted:
                continue
            self.compared["weights"] += 1
            region = self.other.parameters[name][1]
            if self._is_of_stages(name, wanted[name]):
                continue
            if joined.apart:
                axes = self.other.ranks.axes_between(joined.apart, region)
                yield self._finding(
                    "weight", name, "copies" if self._step else kind, axes,
                    max(joined.apart.values()), f"ranks {_pairs(joined)} have different copies",
                )  # fmt: skip
                continue
            if name in self._noisy:  # an optimizer such as Adam makes whole updates of them
                joined.full[self._noisy[name]] = wanted[name].full[self._noisy[name]]
            if self._step and self.unknown:
                continue
            lacking = int((wanted[name].has & ~joined.has).sum())
            difference = relative(joined.full, wanted[name].full, floor)
            if lacking:
                said = f"{lacking} of {joined.full.numel()} elements are on no rank"
                yield self._finding("weight", name, "missing", (), 1.0, said)
            elif difference > self.tolerance:
                said = f"differs from {self.reference.grid}'s by {difference:.2g}"
                axes = self.other.ranks.axes(region)
                yield self._finding("weight", name, kind, axes, difference, said)
            else:
                self.largest = max(self.largest, difference)

    def _is_of_stages(self, name: str, wanted: Joined) -> bool:
        """Whether stages of the reference may have different parameters of one name."""
        region = self.reference.parameters[name][1]
        axes = self.reference.ranks.axes_between(wanted.apart, region)
        if "pp" in axes:
            self.unknown[name] = (
                f"{name} is not compared: ranks {_pairs(wanted)} of {self.reference.grid} have "
                "different copies, or another parameter of this name on each stage; take a "
                "reference without pp"
            )
        return "pp" in axes

    def _gradients(self) -> Iterator[Divergence]:
        wanted, found = self._joined("after")
        floor = self._share * _usual(each.full for each in wanted.values())
        factors = {
            name: ratio(joined.full, wanted[name].full, self.tolerance)
            for name, joined in found.items()
            if name in wanted and not joined.apart and float(wanted[name].full.norm()) > floor
        }
        known = sorted(factor for factor in factors.values() if factor is not None)
        common = _clip_of(known, self._theirs, self._mine, self._loose)
        backward = [event for each in self._theirs.values() for event in each.backward]
        arrived = [name for operation, name, _ in backward if not operation]
        culprits: list[Divergence] = []
        right: set[str] = set()
        for name in dict.fromkeys((*arrived, *wanted)):
            if name not in wanted or self._is_of_stages(name, wanted[name]):
                continue
            if name not in found:
                said = "no rank's optimizer is given one"
                culprits.append(self._finding("gradient", name, "missing", (), 1.0, said))
                continue
            self.compared["gradients"] += 1
            joined = found[name]
            noisy = wanted[name].full.abs() <= floor
            self._noisy[name] = noisy | self._noisy.get(name, noisy)
            difference = relative(joined.full / common, wanted[name].full, floor)
            if not joined.apart and difference <= self.tolerance:
                self.largest = max(self.largest, difference)
                right.add(name)
                continue
            passed = [call for each in self._mine.values() for call in _between(each, right, name)]
            culprits.append(self._culprit(name, joined, wanted[name], common, floor, passed))
        yield from culprits
        if abs(common - 1) > self.tolerance and not culprits:  # else a clip's, of a wrong norm
            yield self._all_scaled(common)

    def _culprit(
        self, name: str, joined: Joined, wanted: Joined, common: float, floor: float,
        passed: list[list[str]],
    ) -> Divergence:  # fmt: skip
        region = self.other.parameters[name][1]
        reduced = {rank: each.reduced.get(name, []) for rank, each in self._mine.items()}
        before = {r: each.before[name] for r, each in self._mine.items() if name in each.before}
        case = Case(
            joined, before, wanted, self.other.ranks, region, self._loose, common, floor,
            reduced, _beside(name, self._mine), passed,
        )  # fmt: skip
        verdict = case.judge()
        difference = max([relative(joined.full, wanted.full, floor), *joined.apart.values()])
        calls = [call for seen in reduced.values() for call in seen]
        if verdict.kind in ("backward", "reduced twice"):  # what it was given was wrong already
            axes = set(verdict.axes)
            own = [call for call in passed if axes & set(call[1].replace(",", "_").split("_"))]
            calls = own or calls
        return self._finding(
            "gradient", name, verdict.kind, verdict.axes, difference, verdict.words, calls
        )

    def _all_scaled(self, common: float) -> Divergence:
        """Every gradient by one factor, which may be a group's size."""
        ranks, said = self.other.ranks, f"each is {common:.6g} times {self.reference.grid}'s"
        axes: tuple[str, ...] = ()
        for each in ranks.subsets()[1:]:
            size = ranks.size(each)
            if min(abs(common / size - 1), abs(common * size - 1)) < 1e-6 + 10 * self.tolerance:
                axes = each
                said += f", and {'_'.join(each)} has {size} ranks"
                break
        calls = [c for each in self._mine.values() for seen in each.reduced.values() for c in seen]
        kind = "not averaged" if axes else "scaled"
        return self._finding(
            "gradient", "of every parameter", kind, axes, abs(common - 1), said, calls
        )

    def _buffers(self) -> Iterator[Divergence]:
        wanted, found = _by_name("buffers", self._theirs), _by_name("buffers", self._mine)
        for name, held in found.items():
            shape = _whole_shape(held)
            if name not in wanted or shape != _whole_shape(wanted[name]) or self.unknown:
                continue  # of a layer that keeps a part of it on each rank
            self.compared["buffers"] += 1
            joined = join(held, shape, self.tolerance)
            reference = join(wanted[name], shape, self.tolerance)
            difference = relative(joined.full, reference.full)
            if joined.apart:
                axes = self.other.ranks.axes_between(joined.apart)
                worst, said = max(joined.apart.values()), f"ranks {_pairs(joined)} differ"
                yield self._finding("buffer", name, "copies", axes, worst, said)
            elif difference > self.tolerance:
                said = f"differs from {self.reference.grid}'s by {difference:.2g}"
                axes = self.other.ranks.axes()
                yield self._finding("buffer", name, "buffer", axes, difference, said)

    # -- losses -------------------------------------------------------------------------

    def _losses(self) -> Iterator[Divergence]:
        """The sum of the losses; means over parts add up to as many as there are."""
        wanted, _ = _losses_of(self._theirs, self.reference.ranks)
        found, apart = _losses_of(self._mine, self.other.ranks)
        if not wanted or not found:
            return
        self.compared["losses"] += 1
        for pair, difference in apart.items():
            if difference > self.tolerance:
                axes = self.other.ranks.axes_between([pair])
                said = f"ranks {pair[0]} and {pair[1]} have different losses of the same data"
                yield self._finding("loss", "", "copies", axes, difference, said)
                return
        share = sum(found) / sum(wanted) if sum(wanted) else 1.0
        sizes = {self.other.ranks.size(axes) for axes in self.other.ranks.subsets()}
        others = {self.reference.ranks.size(axes) for axes in self.reference.ranks.subsets()}
        nearest = min(abs(share * b / a - 1) for a in sizes for b in others)
        if nearest > self.tolerance:
            said = f"{sum(found):.12g}, and {sum(wanted):.12g} on {self.reference.grid}"
            yield self._finding("loss", "", "loss", self.other.ranks.axes(), nearest, said)

    # -- parts --------------------------------------------------------------------------

    def _joined(self, key: str) -> tuple[dict[str, Joined], dict[str, Joined]]:
        """The full tensors of the reference and of the grid, by name."""
        return self._of(key, self.reference, self._theirs), self._of(key, self.other, self._mine)

    def _of(self, key: str, seen: Seen, records: Records) -> dict[str, Joined]:
        held = _by_name(key, records)
        floor = self._share * _usual(
            part for each in held.values() for chunks in each.values() for _, part in chunks
        )
        return {
            name: join(each, thin_shape(tuple(seen.parameters[name][0])), self.tolerance, floor)
            for name, each in held.items()
            if name not in self.unknown
        }

    def _finding(
        self, what: str, name: str, kind: str, axes: tuple[str, ...], difference: float,
        words: str, calls: Iterable[Sequence[str]] = (),
    ) -> Divergence:  # fmt: skip
        seen = dict.fromkeys((call[0], call[1], call[2]) for call in calls)
        return Divergence(
            self.other.grid, self._step, what, name, kind, axes, difference, words, tuple(seen)
        )  # fmt: skip


def _clip_of(factors: list[float], theirs: Records, mine: Records, tolerance: float) -> float:
    """The factor that clipping by the norm gives to gradients that are right.

    It is that of the clips that were seen, if some gradient has it; else 1, if one has that; else
    the median, where a program clips by a function of its own.
    """
    ours, others = ({each.clip for each in records.values()} for records in (mine, theirs))
    seen = [ours.pop() / others.pop()] if len(ours) == len(others) == 1 else []
    for clip in (*seen, 1.0):
        nearest = min(factors, key=lambda factor: abs(factor - clip), default=1.0)
        if abs(nearest / clip - 1) <= tolerance:
            return nearest
    return median_low(factors)


def _between(record: StepRecord, right: set[str], name: str) -> list[list[str]]:
    """Collectives of modules that backward has run between a right gradient and the next one."""
    found: list[list[str]] = []
    for call in record.backward:
        if call[0]:
            found.append(call)
        elif call[1] == name:
            return found
        elif call[1] in right:
            found = []
    return found


def _beside(name: str, records: Records) -> dict[int, Chunks]:
    """Of a rank's i-th expert, the gradients of the i-th experts that others have."""
    alike = re.compile(re.sub(r"(?<=experts\\\.)\d+", r"(\\d+)", re.escape(name)) + "$")
    found: dict[int, Chunks] = {}
    lists = {
        rank: sorted(
            (each for each in record.before if alike.match(each)),
            key=lambda each: [int(n) for n in alike.match(each).groups()],  # type: ignore[union-attr]
        )
        for rank, record in records.items()
    }
    place = next((names.index(name) for names in lists.values() if name in names), None)
    for rank, names in lists.items():
        if place is not None and place < len(names):
            found[rank] = records[rank].before[names[place]]
    return found


def _usual(tensors: Iterable[Any]) -> float:
    """The usual size of an element: the root of the mean square of all."""
    squares, count = 0.0, 0
    for each in tensors:
        squares += float(each.double().square().sum())
        count += each.numel()
    return math.sqrt(squares / max(count, 1))


def _pairs(joined: Joined) -> str:
    return ", ".join(f"{one} and {other}" for one, other in list(joined.apart)[:3])


def _by_name(key: str, records: Records) -> dict[str, dict[int, Chunks]]:
    """Every rank's chunks in one field of the records, by name."""
    found: dict[str, dict[int, Chunks]] = {}
    for rank, record in records.items():
        for name, chunks in getattr(record, key).items():
            found.setdefault(name, {})[rank] = chunks
    return found


def _whole_shape(held: Mapping[int, Chunks]) -> tuple[int, ...]:
    shapes = {tuple(part.shape) for chunks in held.values() for _, part in chunks}
    return thin_shape(next(iter(shapes))) if len(shapes) == 1 else ()


def _losses_of(
    records: Records, ranks: GridRanks
) -> tuple[list[float], dict[tuple[int, int], float]]:
    """A loss for each part of the data, and ranks that should have the same and have not."""
    first: dict[tuple[tuple[str, int], ...], tuple[int, float]] = {}
    apart: dict[tuple[int, int], float] = {}
    for rank, record in records.items():
        if not record.backwards or rank not in ranks.where:
            continue
        place = tuple(
            (axis, i) for axis, i in ranks.coordinate(rank).items() if axis not in ("tp", "pp")
        )
        other, loss = first.setdefault(place, (rank, record.loss))
        if record.loss != loss:
            apart[other, rank] = abs(record.loss - loss) / max(abs(loss), 1e-300)
    return [loss for _, loss in first.values()], apart
