"""Checks that the ranks of a reducer have the same model: parameters, marks and values.

Summing gradients is only meaningful between copies of the same parameters. Ranks first compare
names, shapes and marks, since with other ones the collectives of further checks would not match;
then the values of all replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from commgrid.collectives.objects import gathered
from commgrid.collectives.plain import broadcast
from commgrid.data_parallel.bucket import Lane
from commgrid.data_parallel.groups import ReductionGroups
from commgrid.data_parallel.slot import Slot, State, slot_of
from commgrid.equality.comparison import ByRank, Fact, compare
from commgrid.equality.digest import digest
from commgrid.equality.values import exact_number_of
from commgrid.errors import CommGridError, GridMismatchError, SpecError
from commgrid.layout.rank_text import describe_ranks
from commgrid.parameters import Placement, foreign_slice
from commgrid.parameters.placement import buffer_placements
from commgrid.replicas import Copy, differing
from commgrid.runtime.grid import HyperCommGrid
from commgrid.torch_compat.world import FAKE


def check_free(trained: Iterable[Placement]) -> None:
    """Refuses parameters whose gradients FSDP2 or another reducer averages.

    Raises:
        SpecError: names the parameter.
    """
    for placement in trained:
        if isinstance(placement.parameter, DTensor):
            raise SpecError(
                f"{placement} is a DTensor, whose gradients FSDP2 averages itself; leave the "
                "GradientReducer out, and take data_parallel.clip_gradients for the norm"
            )
        slot = slot_of(placement.parameter)
        if slot is not None and not _is_let_go(slot):
            raise SpecError(
                f"{placement} has another GradientReducer already; call its close() first"
            )


def _is_let_go(slot: Slot) -> bool:
    """Whether only modules kept a slot's reducer; it ends with this look, as at its close()."""
    reducer = slot.reducer
    if reducer is not None:
        reducer.keep(False)
    del reducer
    kept = slot.reducer
    if kept is not None:
        kept.keep()
    return kept is None


_FUSING = ("gradient_accumulation_fusion", "fuse_wgrad_accumulation")
"""Attributes of megatron-core's and Transformer Engine's layers that add to `weight.main_grad`."""


ParameterGroup = Iterable[Tensor] | Mapping[str, Any]
"""Parameters of a model, or an optimizer's group of them."""


def check_known(group: ParameterGroup, known: set[int]) -> set[int]:
    """Return the ids of a group's parameters, all of which must be known.

    Raises:
        SpecError: names the shape of the first that is not.
    """
    given = group["params"] if isinstance(group, Mapping) else group
    given = [given] if isinstance(given, Tensor) else list(given)
    for each in given:
        if id(each) not in known:
            shape = tuple(each.shape) if isinstance(each, Tensor) else each
            raise SpecError(
                f"a parameter of shape {shape} is not among those that this GradientReducer's "
                "model trains; give some of model.parameters(), or a group of its optimizer"
            )
    return {id(each) for each in given}


def check_own(model: nn.Module, grid: HyperCommGrid) -> None:
    """Refuses parameters that look whole and were sliced by another library, or bypass autograd.

    Raises:
        SpecError: names the parameter and the library.
    """
    for prefix, module in model.named_modules():
        fuses = [flag for flag in _FUSING if getattr(module, flag, False) is True]
        for key, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{key}" if prefix else key
            if fuses and parameter.requires_grad:
                raise SpecError(
                    f"{name} of shape {tuple(parameter.shape)} is of a layer with {fuses[0]}=True, "
                    "which adds gradients to main_grad, where no GradientReducer looks; build the "
                    f"layer with {fuses[0]}=False"
                )
            told = foreign_slice(module, parameter, grid)
            if told is not None:
                raise SpecError(
                    f"{name} of shape {tuple(parameter.shape)} {told.what}; a GradientReducer "
                    "would take the slices for copies of one parameter; use commgrid's layers, or "
                    f"{told.instead_of_reducing}"
                )


def check_grid(placements: Iterable[Placement], grid: HyperCommGrid) -> None:
    """Refuses parameters whose layers look their groups up in another grid than the reducer.

    Raises:
        SpecError: names the parameter and both grids.
    """
    for placement in placements:
        groups = [group for _, group in placement.shards]
        groups += [g for g in (placement.partial, placement.shared) if g is not None]
        for group in groups:
            if group.grid_name not in ("", grid.name):
                raise SpecError(
                    f"{placement} is cut or summed over {group} of grid {group.grid_name!r}, and "
                    f"its gradients are to be reduced over grid {grid.name!r}, whose ranks may "
                    "hold other slices of it; give the layers and the GradientReducer one grid="
                )


def check_lanes(lanes: Iterable[Lane]) -> None:
    """Refuses sums over ranks that have different slices of a parameter.

    Raises:
        SpecError: names the first such parameter and the ranks.
    """
    for lane in lanes:
        ranks = dist.get_process_group_ranks(lane.group)
        for slot in lane.slots:
            for dim, group, both in slot.placement.within(ranks):
                raise SpecError(
                    f"gradients of {slot.placement} would be summed over group {lane.name!r}, in "
                    f"which {describe_ranks(both)} have different slices of it, cut along dim "
                    f"{dim} over {group.name!r}; give the GradientReducer the ranks that saw "
                    "different data, group='dp_cp', and layers the group of their slices"
                )


def compare_models(
    lanes: Sequence[Lane], options: tuple[object, ...], model: nn.Module, groups: ReductionGroups
) -> None:
    """Refuses a model that differs between ranks, since its collectives would not match.

    Raises:
        GridMismatchError: names the ranks.
    """
    mine = [
        (placement.name if placement.region == "dense" else "", tuple(slot.parameter.shape),
         str(slot.parameter.dtype), lane.name)
        for lane in lanes for slot in lane.slots for placement in [slot.placement]
    ]  # fmt: skip
    group = groups.stage()
    if group is None and lanes:
        group = lanes[0].group if lanes[0].group.size() > 1 else None
    if group is None:
        return
    options_of = dict(_options_of(model))
    facts = (
        Fact(group, [exact_number_of((mine, options))], partial(_other_model, len(mine))),
        Fact(group, [exact_number_of(options_of)], partial(_other_options, group, options_of)),
    )
    wrong, _ = compare(facts, ())
    if wrong is not None:
        raise wrong


def _other_model(count: int, _: int, by_rank: ByRank) -> GridMismatchError:
    found = [number for (number,) in by_rank.values()]
    usual = max(found, key=found.count)
    odd = [rank for rank, (number,) in by_rank.items() if number != usual]
    return GridMismatchError(
        f"ranks {odd} of {list(by_rank)} have other parameters than the rest, in names, shapes, "
        "dtypes, order or marks, or other arguments of GradientReducer; this rank has "
        f"{count} parameters"
    )


def _other_options(
    group: ProcessGroup, mine: dict[str, str], _: int, by_rank: ByRank
) -> GridMismatchError:
    """The error that names layer, option and ranks; collective over the group."""
    (first, some), *others = zip(by_rank, gathered(mine, group), strict=True)
    for option, value in some.items():
        for rank, theirs in others:
            if theirs.get(option) != value:
                return GridMismatchError(
                    f"{option} is {value} on rank {first} and {theirs.get(option)} on rank "
                    f"{rank}; give the layers of one model the same options on all ranks"
                )
    return GridMismatchError(
        f"layers of the model have other options on each of ranks {list(by_rank)}"
    )


def _options_of(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The public options of commgrid's own layers, by a name such as `moe.router.top_k`."""
    for name, module in model.named_modules():
        if not type(module).__module__.startswith("commgrid."):
            continue
        for key, value in vars(module).items():
            if key.startswith("_") or key == "training":
                continue
            if callable(value) and not isinstance(value, nn.Module):  # such as an activation
                value = getattr(value, "__qualname__", "")
            if isinstance(value, bool | int | float | str | None):
                yield f"{name or type(module).__name__}.{key}", repr(value)


def changed(model: nn.Module, slots: Iterable[Slot]) -> CommGridError | None:
    """The error if the model trains other parameters than the buckets were made for.

    Some of these may be frozen: they have no gradient meanwhile.
    """
    now = {id(p): p for p in model.parameters()}
    for slot in slots:
        parameter = now.pop(id(slot.parameter), None)
        if parameter is None or slot.kind != (parameter.dtype, parameter.device):
            return CommGridError(
                f"{slot.placement} was moved or replaced after its GradientReducer was made; "
                "close() that and make a new one, once the model is as it stays"
            )
    for parameter in now.values():
        if parameter.requires_grad:
            return CommGridError(
                f"a parameter of shape {tuple(parameter.shape)} was added or unfrozen after its "
                "GradientReducer was made; make that with frozen=True, which takes parameters "
                "that are unfrozen later, with the state of their optimizer, or close() it and "
                "make a new one"
            )
    return None


def changed_after_sending(slots: Iterable[Slot]) -> CommGridError | None:
    """The error for a `.grad` that was replaced while its sum was under way."""
    for slot in slots:
        gradient, is_sent = slot.parameter.grad, slot.state is State.SENT
        left = (slot.view, slot.placeholder) if is_sent else (None, slot.handed_out)
        if slot.is_in_flight and gradient is not left[0] and gradient is not left[1]:
            return CommGridError(
                f".grad of {slot.placement} was set after backward had begun to sum it "
                "with other ranks', and before finish(); change gradients after finish(), "
                "and give a step up with the reducer's zero_grad()"
            )
    return None


def copies_of(
    placements: Iterable[Placement], groups: ReductionGroups, group_of: dict[int, ProcessGroup]
) -> Iterator[Copy]:
    """Parameters and the groups along which their copies must stay equal.

    Args:
        placements: of all parameters, frozen ones too.
        groups: the reducer's.
        group_of: by the parameter's id, the group that its gradients are summed over.
    """
    num_shared: Counter[ProcessGroup] = Counter()
    for placement in placements:
        told, parameter = str(placement), placement.parameter
        if isinstance(parameter, DTensor):  # frozen, and FSDP2's
            continue
        yield Copy(told, parameter, groups.of_copies(placement, group_of.get(id(parameter))))
        sharers = placement.sharers
        if sharers is not None:  # under a name per stage
            key = f"shared parameter {num_shared[sharers]}"
            yield Copy(told, parameter, (sharers,), key)
            num_shared[sharers] += 1


def compare_values(copies: Iterable[Copy], stage: ProcessGroup | None) -> None:
    """Refuses replicas of a parameter that are not equal, since they would diverge.

    Raises:
        GridMismatchError: on all ranks of the stage; names parameter and ranks that differ.
    """
    found = differing(copies, stage)
    if found is not None:
        raise GridMismatchError(
            f"{found}; these should be copies of one parameter, and would train apart. Seed all "
            "ranks alike (initialize_parameters(model, seed)), load a checkpoint first, or make "
            "them equal with GradientReducer(broadcast=True); where ranks have slices, say so "
            "with a ShardedModule's shard_dims"
        )


@torch.no_grad()
def compare_slices(placements: Iterable[Placement]) -> None:
    """Refuses slices equal on several ranks, as after one rank's state_dict or a second seed.

    Constant slices may be equal, and copies made on purpose, which repeat within a slice as well:
    heads and experts that were copied. Two cases cannot be told from copies: a rank's only expert,
    if all its slices are equal, and output features that only some of the ranks have in common.

    Args:
        placements: of all parameters, frozen ones too, in an order equal on all ranks.

    Raises:
        GridMismatchError: on all ranks of the group; names the first such parameter and the ranks.
    """
    by_group: dict[ProcessGroup, list[tuple[int, Placement]]] = {}
    for placement in placements:
        for dim, cut in placement.shards:
            if cut.size > 1 and not isinstance(placement.parameter, DTensor):
                by_group.setdefault(cut.group, []).append((dim, placement))
    for group, held in by_group.items():
        marks = [torch.stack([digest(p.parameter.detach()), _varies(p).long()]) for _, p in held]
        mine = [
            (mark, -1 if varies else group.rank())  # constant slices are equal to no other
            for mark, varies in torch.stack([mark.cpu() for mark in marks]).tolist()
        ]
        alike = [
            tuple(map(theirs.index, theirs)) if min(theirs, key=itemgetter(1))[1] < 0 else ()
            for theirs in zip(*gathered(mine, group), strict=True)
        ]
        if dist.get_backend(group) == FAKE:  # where every rank's numbers are this one's
            continue
        suspects = [
            i for i, firsts in enumerate(alike)
            if len(set(firsts)) < len(firsts) and not _cannot_be_told(i, held, alike)
        ]  # fmt: skip
        if not suspects:
            continue
        repeating = gathered([_repeats(*held[i]) for i in suspects], group)
        for place, i in enumerate(suspects):
            first = max(alike[i], key=alike[i].count)
            if repeating[first][place]:
                continue
            ranks = dist.get_process_group_ranks(group)
            equal = [rank for rank, other in zip(ranks, alike[i], strict=True) if other == first]
            raise GridMismatchError(
                f"{held[i][1]} is a slice and has the same numbers on all of "
                f"{describe_ranks(equal)}, as after one rank's state_dict or an init under one "
                "seed on all of them; give the layers init=, or draw within "
                "commgrid.tensor_parallel.sharded_rng(). Load states with commgrid.checkpoint, "
                "which gives each rank its slice"
            )


def _varies(placement: Placement) -> Tensor:
    parameter = placement.parameter.detach()
    return (parameter != parameter.flatten()[:1]).any()


def _cannot_be_told(
    i: int, held: Sequence[tuple[int, Placement]], alike: Sequence[tuple[int, ...]]
) -> bool:
    """Whether equal slices can be copies although a slice has no room to repeat them.

    Args:
        i: the parameter.
        held: the dim along which each is cut, and its placement.
        alike: for each, the first rank that has each rank's numbers; of constant ones nothing.
    """
    dim, one = held[i]
    if one.region != "expert":
        return dim == 0 and len(set(alike[i])) > 1
    module = one.name.rpartition(".")[0]
    beside = {alike[j] for j, (_, p) in enumerate(held) if p.name.rpartition(".")[0] == module}
    return one.parameter.shape[dim] == 1 and len(beside - {()}) == 1


def _repeats(dim: int, placement: Placement) -> bool:
    """Whether the numbers of a slice repeat along the dim that is cut, judged by some of them."""
    parameter = placement.parameter.detach()
    rows = parameter.movedim(dim, 0).reshape(parameter.shape[dim], -1)
    some = rows[:, :: max(1, rows.shape[1] // 64)].cpu().double()
    distinct = len(torch.unique(some, dim=0))
    # Single numbers of a low precision are equal by chance.
    return 2 * distinct <= len(rows) if rows.shape[1] == 1 else distinct < len(rows)


@torch.no_grad()
def broadcast_values(model: nn.Module, copies: Iterable[Copy], data: ProcessGroup) -> None:
    """Makes copies equal to those of each group's first rank; buffers along the data group."""
    for copy in copies:
        for group in copy.groups:
            copy.tensor.copy_(broadcast(copy.tensor, group))
    for buffer in _copied(model.buffers(), model, data):
        buffer.copy_(broadcast(buffer, data))


@torch.no_grad()
def broadcast_statistics(model: nn.Module, group: ProcessGroup) -> None:
    """Make running statistics of batch norms those of the group's first rank, as DDP's are."""
    names = "running_mean", "running_var"  # of torch's, and others' by their example
    every = (module._buffers.get(name) for module in model.modules() for name in names)
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for buffer in _copied([each for each in every if each is not None], model, group):
        by_kind.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    for buffers in by_kind.values():
        flat = broadcast(torch.cat(buffers), group)
        torch._foreach_copy_(buffers, torch.split(flat, [len(buffer) for buffer in buffers]))


def _copied(buffers: Iterable[Tensor], model: nn.Module, group: ProcessGroup) -> Iterator[Tensor]:
    """Those of a model's buffers of which ranks of a group do not have slices, or their own."""
    found = list(buffers)
    if not found or group.size() == 1:
        return
    ranks = dist.get_process_group_ranks(group)
    apart = {id(one.buffer) for one in buffer_placements(model) if any(one.within(ranks))}
    yield from (buffer for buffer in found if id(buffer) not in apart)
