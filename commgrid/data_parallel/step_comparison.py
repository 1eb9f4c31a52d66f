"""Comparison of training steps among ranks: each of the first 20, then every fifth.

A mismatch does not show in the loss: replicas diverge, or one model trains on mixed inputs.
`finish` compares, along the ranks that must have equal numbers:

| | along |
|---|---|
| inputs of sliced layers, and the number of their calls | the layer's group |
| batches that are sharded along the sequence | the group that shards them |
| whether an optimizer has stepped | the stage |
| the divisor of gradients | each axis of the model, pp included |
| gradients that are copies and are not summed: after `finish`, and as a step used them | the copies' axes |
| factors that gradients were scaled by before a step (`scaling`) | the stage, pp |
| options of the optimizer's group of each parameter | the stage; stages that share it |
| partial gradients before their sum, which must differ | their group |

Copies are compared by their norms and weighted sums: kernels that add in no fixed order differ in
the last bits.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from commgrid.collectives.group_ref import described, name_of
from commgrid.collectives.objects import gathered
from commgrid.collectives.plain import all_reduce
from commgrid.data_parallel.bucket import GradientPart
from commgrid.data_parallel.groups import ReductionGroups
from commgrid.data_parallel.scaling import Scaling
from commgrid.data_parallel.slot import KeptGradient, Slot
from commgrid.equality.comparison import ByRank, Fact, compare, ends_of, first_place
from commgrid.equality.digest import MANTISSA, device_for, digest
from commgrid.equality.inputs import InputRecord, norm_and_sum
from commgrid.equality.values import exact_number_of
from commgrid.errors import CommGridError, GridMismatchError
from commgrid.layout.rank_text import describe_ranks
from commgrid.parameters import Placement
from commgrid.planning.region import STANDARD

_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-2}
_HALF_TOLERANCE = 0.1  # bf16 has 8 bits, and a backward of many layers adds up their rounding
_NEGLIGIBLE = 1e-5  # of the largest norm: smaller ones may be nothing but rounding
_ROUNDING = 1e-9  # of divisors that are fractions, added up in another order
_FIRST_STEPS, _EVERY = 20, 5
_IMPLEMENTATION = ("capturable", "differentiable", "foreach", "fused")
"""Options of an optimizer that choose a kernel, and not its result."""


class StepComparison:
    """Compares a reducer's steps among ranks.

    Args:
        model: whose parameters are trained.
        pieces: of the reducer; ranks of a group may keep pieces of different parameters.
        slots: every parameter's, the same ones in the same order on all ranks of the stage.
        groups: of the reducer.
    """

    def __init__(
        self, model: nn.Module, pieces: Sequence[GradientPart], slots: Sequence[Slot],
        groups: ReductionGroups,
    ) -> None:  # fmt: skip
        self._pieces, self._slots = pieces, slots
        self._alike_stage = stage = groups.stage(groups.used)
        self._alike = _groups_alike(slots, groups, stage)
        trained = [slot.placement for slot in slots]
        self._scaling = Scaling(pieces, groups, stage)
        self._inputs = InputRecord()
        layers = (group for placement in trained for group in _layer_groups(placement))
        self._input_groups = list(dict.fromkeys(layers))
        self._groups, self._stage = groups, groups.stage()
        others = set(STANDARD) - {"cp", "tp"}  # along which ranks never share a sequence
        shape = groups.grid.shape
        self._shards_sequences = any(n > 1 and axis not in others for axis, n in shape.items())
        self._copies: dict[ProcessGroup, list[GradientPart]] = {}
        for piece in pieces:
            for group in groups.along(groups.unsummed(piece.slot.placement)):
                self._copies.setdefault(group, []).append(piece)
        self._largest: dict[ProcessGroup, float] = {}  # norm of any gradient so far
        self._partial = _partial_of_user(model, slots)
        self._reported = {slot for alike in self._partial.values() for slot in alike}
        self._has_slices_of_sequence = any(
            getattr(module, "sequence_parallel", False) is True for module in model.modules()
        )
        self._used: dict[ProcessGroup, Tensor] = {}
        self._options: dict[int, tuple[float, dict[str, str]]] = {}
        self._sent: dict[Slot, Tensor] = {}
        self._step, self._is_edited = 0, False

    @property
    def _is_due(self) -> bool:
        """Whether the next `finish` compares everything."""
        return self._step < _FIRST_STEPS or self._step % _EVERY == 0

    @property
    def _compares_edits(self) -> bool:
        """Whether it compares edits of gradients: also after a step in which a rank edited some."""
        return self._is_due or self._is_edited

    def close(self) -> None:
        """Compare and record no more."""
        self._inputs.close()

    # -- records --------------------------------------------------------------------------

    @torch.no_grad()
    def sent(self, slots: Sequence[Slot]) -> None:
        """Record partial gradients that are about to be summed."""
        for slot in self._reported.intersection(slots) if self._is_due else ():
            number = (digest(slot.view) & MANTISSA).double()
            self._sent[slot] = number * slot.view.any()

    def before_step(self, optimizer: Optimizer, *, is_first: bool) -> None:
        """Record the gradients and options that an optimizer is about to use.

        Args:
            optimizer: about to step.
            is_first: whether no other optimizer has stepped since `finish`.
        """
        if not self._compares_edits:
            return
        own = {id(slot.parameter) for slot in self._slots}
        for group in optimizer.param_groups:
            told = _options_of(optimizer, group)
            for parameter in group["params"]:
                if id(parameter) in own:
                    self._options[id(parameter)] = told
        if is_first:
            self._scaling.before_step()
        if is_first and self._is_due:
            self._used = {g: _fingerprints(pieces) for g, pieces in self._copies.items()}

    def rescaled(self) -> None:
        """Record gradients that were scaled by one factor, the same on all ranks."""
        if self._compares_edits:
            self._scaling.finished()

    # -- comparison -----------------------------------------------------------------------

    def compare(self, divisor: float) -> CommGridError | None:
        """Return the error of the last step, on all ranks that hold the model; collective.

        Args:
            divisor: by which `finish` has divided sums.
        """
        wrong, mark = None, self._scaling.is_edited
        if self._compares_edits:
            facts = self._facts(divisor) if self._is_due else self._facts_of_edits()
            wrong, mark = compare(facts, self._groups.everyone, mark)
        self._step, self._is_edited = self._step + 1, mark
        self._used, self._sent = {}, {}
        self._options.clear()
        if self._compares_edits:
            self._scaling.finished()
        if self._is_due:
            self._inputs.open()
        else:
            self._inputs.close()
        return wrong

    def _facts_of_edits(self) -> Iterator[Fact]:
        options = [self._options.get(id(p.slot.parameter), (torch.nan,))[0] for p in self._pieces]
        yield from self._scaling.facts(options)

    def _facts(self, divisor: float) -> Iterator[Fact]:
        yield from self._facts_of_edits()
        if self._step and self._alike_stage is not None:
            error = partial(_partly_stepped, self._alike_stage)
            yield Fact(self._alike_stage, [float(bool(self._options))], error)
        for group in self._input_groups:
            yield from self._inputs.facts(group)
        for group in self._sharded_over():
            yield self._inputs.fact_of_batches(group)
        for group, pieces in self._copies.items():
            yield from self._facts_of_copies(group, pieces)
        for group, slots in self._partial.items():
            none = slots[0].view.new_zeros((), dtype=torch.float64)
            numbers = torch.stack([self._sent.get(slot, none) for slot in slots]).cpu()
            error = partial(_not_partial, group, slots)
            yield Fact(group, numbers, error, partial(self._equal_partial, slots))
        for group, slots in self._alike.items():
            found = [self._options.get(id(slot.parameter), (torch.nan, {})) for slot in slots]
            error = partial(_other_options, group, slots, [each for _, each in found])
            yield Fact(group, [number for number, _ in found], error)
        groups = self._groups
        lines = groups.along(sorted(groups.used - groups.axes_of(groups.dense)))
        for group in (*lines, *([groups.stages] if groups.stages is not None else [])):
            yield Fact(group, [divisor], partial(_other_counts, group), _other_divisor)

    def _sharded_over(self) -> Iterator[ProcessGroup]:
        """The groups over which any rank has sharded a batch, by the grid's names; collective."""
        if self._stage is None or not self._shards_sequences:
            return
        own: dict[str, ProcessGroup] = {}
        names = self._groups.grid.group_names
        for name in names:
            with suppress(CommGridError):  # this rank is not in it, or it is suspended
                own[name] = self._groups.grid.get_group(name)
        noted = [name in own and self._inputs.has_batches(own[name]) for name in names]
        mine = torch.tensor(noted, device=device_for(self._stage)).long()
        found = zip(names, all_reduce(mine, self._stage, op="max").tolist(), strict=True)
        yield from dict.fromkeys(own[name] for name, noted in found if noted and name in own)

    def _facts_of_copies(
        self, group: ProcessGroup, pieces: Sequence[GradientPart]
    ) -> Iterator[Fact]:
        used = self._used.get(group, torch.full((2 * len(pieces),), torch.nan).double())
        for found, edited in ((used, True), (_fingerprints(pieces), False)):
            error = partial(_unequal, group, pieces, edited)
            yield Fact(group, found, error, partial(self._other_gradient, group, pieces))

    def _other_gradient(
        self, group: ProcessGroup, pieces: Sequence[GradientPart], largest: Tensor, smallest: Tensor
    ) -> int | None:
        """The first copy that differs and is neither negligible nor infinite on any rank."""
        high, low = largest.view(-1, 2), smallest.view(-1, 2)
        is_finite = (high.isfinite() & low.isfinite()).all(1)
        norms = torch.where(is_finite, high[:, 0], 0.0)
        self._largest[group] = max(self._largest.get(group, 0.0), float(norms.max()))
        kinds = (piece.slot.parameter.dtype for piece in pieces)
        tolerances = torch.tensor([_TOLERANCES.get(each, _HALF_TOLERANCE) for each in kinds])
        apart = ((high - low) > (tolerances * norms)[:, None]).any(1)
        return first_place(apart & (norms > _NEGLIGIBLE * self._largest[group]))

    def _equal_partial(
        self, slots: Sequence[Slot], largest: Tensor, smallest: Tensor
    ) -> int | None:
        """The first gradient, not a bias's, that is one on all ranks before their sum.

        If the gradients of all are equal, the sequence may be constant, and nothing is wrong.
        """
        is_weight = torch.tensor(
            ["bias" not in slot.placement.name.split(".")[-1] for slot in slots]
        )
        if self._has_slices_of_sequence and not bool((largest > smallest).any()):
            return None
        return first_place((largest == smallest) & (largest > 0) & is_weight)


def _groups_alike(
    slots: Sequence[Slot], groups: ReductionGroups, stage: ProcessGroup | None
) -> dict[ProcessGroup, list[Slot]]:
    """The parameters whose options must be equal along a group: slices and copies."""
    found: dict[ProcessGroup, list[Slot]] = {}
    for slot in slots:
        group = stage if slot.placement.region == "dense" else groups.of(slot.placement)[0]
        if group is not None and group.size() > 1:
            found.setdefault(group, []).append(slot)
    for slot in slots:
        sharers = slot.placement.sharers
        if sharers is not None:
            found.setdefault(sharers, []).append(slot)
    return found


def _layer_groups(placement: Placement) -> Iterator[ProcessGroup]:
    """The groups whose ranks compute one layer together on equal inputs."""
    groups = [group for _, group in placement.shards if placement.region == "dense"]
    if placement.partial is not None:
        groups.append(placement.partial)
    yield from (group.group for group in groups if group.size > 1)


def _partial_of_user(model: nn.Module, slots: Sequence[Slot]) -> dict[ProcessGroup, list[Slot]]:
    """Parameters whose gradients a user has marked as partial, by the group."""
    found: dict[ProcessGroup, list[Slot]] = {}
    for slot in slots:
        name, group = slot.placement.name, slot.placement.partial
        owner = type(model.get_submodule(name.rpartition(".")[0])).__module__
        if group is not None and group.size > 1 and not owner.startswith("commgrid."):
            found.setdefault(group.group, []).append(slot)
    return found


def _options_of(optimizer: Optimizer, group: Mapping[str, Any]) -> tuple[float, dict[str, str]]:
    """The options of a group that change numbers, and a number for them."""
    kinds = bool | int | float | str | tuple | list | None  # type: ignore[type-arg]
    read = {key: group[key] for key in sorted(optimizer.defaults) if key in group}
    read = {k: v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for k, v in read.items()}
    told = {
        key: repr(value) for key, value in read.items()
        if key not in _IMPLEMENTATION and isinstance(value, kinds)
    }  # fmt: skip
    told["class"] = type(optimizer).__name__
    return exact_number_of(told), told


def _fingerprints(pieces: Sequence[GradientPart]) -> Tensor:
    """Norm and weighted sum of each, (2 · pieces,) in fp64 on the CPU; 0: there is none."""
    found = torch.zeros(len(pieces), 2, dtype=torch.float64)
    own, rows = [], []
    for index, piece in enumerate(pieces):
        gradient = piece.held
        if gradient is not None and not isinstance(gradient, KeptGradient):
            own.append(index)
            rows.append(norm_and_sum(gradient.detach().reshape(-1)))
    if rows:
        found[own] = torch.stack(rows).cpu()
    return torch.where(found.isfinite(), found, torch.inf).view(-1)


# -- errors -------------------------------------------------------------------------------


def _other_divisor(largest: Tensor, smallest: Tensor) -> int | None:
    return first_place(largest - smallest > _ROUNDING * largest)


def _other_counts(group: ProcessGroup, _: int, by_rank: ByRank) -> GridMismatchError:
    (least, low), (most, high) = ends_of(by_rank, 0)
    return GridMismatchError(
        f"finish(count=…) divides by {least:g} to {most:g} on ranks of {described(group)} (ranks "
        f"{low} and {high}), which have the same samples; pass the count of the whole batch on "
        "every rank and stage, not of a slice of the sequence, or pass none"
    )


def _partly_stepped(group: ProcessGroup, _: int, by_rank: ByRank) -> GridMismatchError:
    stepped = describe_ranks([rank for rank, row in by_rank.items() if row[0]])
    return GridMismatchError(
        f"an optimizer has stepped on some ranks of {described(group)} and not on others since "
        f"the last finish(): only {stepped} called optimizer.step(). Call it on all ranks or on "
        "none; commgrid.data_parallel.GradScaler decides for all"
    )


def _unequal(
    group: ProcessGroup, pieces: Sequence[GradientPart], edited: bool, place: int, _: ByRank
) -> GridMismatchError:
    if edited:
        cause = (
            "when the optimizer used it, though finish() had left equal ones; ranks edited it "
            "differently between the two, as torch's clip_grad_norm_ does where they have "
            "slices: use the reducer's clip_gradients()"
        )
    else:
        cause = (
            "after finish(), so that copies would train apart; where each rank sees a part of the "
            f"sequence, say so with mark_parameters(module, partial={name_of(group)!r}); where "
            "ranks have slices, with a ShardedModule's shard_dims; elsewhere give all ranks the "
            "same input and the same dropout"
        )
    return GridMismatchError(
        f"{pieces[place].slot.placement} has different gradients on the ranks of "
        f"{described(group)} {cause}"
    )


def _not_partial(
    group: ProcessGroup, slots: Sequence[Slot], place: int, _: ByRank
) -> GridMismatchError:
    return GridMismatchError(
        f"{slots[place].placement} is marked partial={name_of(group)!r}, and its gradient before "
        f"the sum is the same on all ranks of {described(group)}, so that the sum is "
        f"{group.size()} times the gradient; leave the mark out, or give each rank its slice of "
        "the sequence (sequence_parallel=True)"
    )


def _other_options(
    group: ProcessGroup, slots: Sequence[Slot], mine: Sequence[dict[str, str]], place: int,
    by_rank: ByRank,
) -> GridMismatchError:  # fmt: skip
    found = dict(
        zip(by_rank, gathered((slots[place].placement.name, mine[place]), group), strict=True)
    )
    known = {rank: each for rank, each in found.items() if each[1]}
    (low, (name, some)), *others = known.items()
    high, (other_name, other) = next(one for one in others if one[1][1] != some)
    keys = [key for key in {**some, **other} if some.get(key) != other.get(key)]
    told = ", ".join(f"{key}={some.get(key)} and {other.get(key)}" for key in keys)
    names = name if name == other_name else f"{name} and {other_name}, copies of one parameter,"
    return GridMismatchError(
        f"the optimizer has updated {names} with {told} on ranks {low} and {high} of "
        f"{described(group)}; a parameter needs the same options on all ranks that have it: "
        "choose groups by name, since types of modules differ between stages"
    )
