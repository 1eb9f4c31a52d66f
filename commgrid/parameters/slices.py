"""Slices of parameters, and checks that torch's wrappers and optimizers do not take them for
copies.

| over slices | |
|---|---|
| SGD, AdamW and others that update each element by itself | right |
| Muon, Adafactor, LBFGS and others of whole matrices | not the whole parameter's update |
| ZeroRedundancyOptimizer, FSDP2 over ranks with other slices | one rank's slice replaces others |
| torch.amp.GradScaler | ranks decide apart whether to skip a step |

All but the first raise before a step. torch's hook for that is registered while any layer with
slices exists.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from commgrid.collectives.group_ref import GroupRef
from commgrid.errors import SpecError
from commgrid.layout.rank_text import describe_ranks

if TYPE_CHECKING:
    from commgrid.parameters.sharded_module import ShardedModule

_OF_WHOLE_MATRICES = (
    "adafactor", "adalomo", "adam_mini", "adammini", "apollo", "came", "dadapt", "dion", "galore",
    "kron", "lamb", "lars", "lbfgs", "muon", "novograd", "prodigy", "psgd", "scion", "shampoo",
    "sm3", "soap",
)  # fmt: skip
"""Optimizers whose update of an element depends on others, by substrings of their names."""
_ELEMENT_WISE_ALGORITHMS = ("adamw", "lion")
_SCALERS = ("torch.amp.grad_scaler", "torch.cuda.amp.grad_scaler", "torch.cpu.amp.grad_scaler")
"""Modules of loss scalers that decide by one rank's gradients; FSDP's agrees over all ranks."""


@dataclass(frozen=True)
class Slice:
    """A parameter and the dims along which it is sliced; whole if there are none.

    Args:
        name: its first name in the model.
        parameter: this rank's tensor.
        shards: the dims of the full parameter that it is sliced along, each with its group.
    """

    name: str
    parameter: nn.Parameter
    shards: tuple[tuple[int, GroupRef], ...]

    @property
    def num_slices(self) -> int:
        """Number of slices that make up the full parameter."""
        slices = 1
        for _, group in self.shards:
            slices *= group.size
        return slices

    def within(self, ranks: Sequence[int]) -> Iterator[tuple[int, GroupRef, list[int]]]:
        """For each group it is sliced over: dim, group, and its ranks in `ranks`, if several."""
        for dim, group in self.shards:
            both = sorted(set(dist.get_process_group_ranks(group.group)) & set(ranks))
            if len(both) > 1:
                yield dim, group, both

    def __str__(self) -> str:
        return f"{self.name} of shape {tuple(self.parameter.shape)}"


def check_mesh(one: Slice) -> None:
    """Refuses a parameter that FSDP2 has sharded over ranks that hold different slices of it.

    Raises:
        SpecError: names parameter and ranks.
    """
    parameter: Any = one.parameter
    if not isinstance(parameter, DTensor):
        return
    ranks = parameter.device_mesh.mesh.flatten().tolist()
    for dim, group, both in one.within(ranks):
        raise SpecError(
            f"fully_shard over {describe_ranks(ranks)} has taken {one} for one parameter "
            f"of all of them, but {describe_ranks(both)} have different slices of it, cut "
            f"along dim {dim} over {group.name!r}; give it the ranks that have copies, "
            "mesh=grid.device_mesh('dp_cp'), for experts grid.device_mesh('edp')"
        )


def check_optimizer(optimizer: Optimizer, slices: Iterable[Slice]) -> None:
    """Refuses an optimizer whose step over slices would differ from that of the whole.

    Args:
        optimizer: about to step.
        slices: of its parameters.

    Raises:
        SpecError: names the first such parameter.
    """
    name, ranks, scaled = type(optimizer).__name__, zero_ranks(optimizer), is_scaled()
    of_matrices = _of_matrices(optimizer)
    for one in slices:
        if one.num_slices == 1:
            continue
        group = next(group for _, group in one.shards if group.size > 1)
        if id(one.parameter) in of_matrices:
            raise SpecError(
                f"{name} does not update elements one by one, and {one} is a slice over group "
                f"{group.name!r}, whose update would differ from that of the whole parameter; "
                "give it whole matrices only, and slices to an element-wise optimizer such as AdamW"
            )
        check_mesh(one)
        for dim, group, both in one.within(ranks):
            raise SpecError(
                f"{name} over {describe_ranks(ranks)} would send {one} to {describe_ranks(both)}, "
                f"which have different slices of it, cut along dim {dim} over {group.name!r}; give "
                "it the ranks that have copies, process_group=commgrid.get_group('dp_cp'), or use "
                "commgrid.data_parallel.ShardedOptimizer"
            )
        if scaled:
            refuse_scaler(f"{one} is a slice over group {group.name!r}")


def _of_matrices(optimizer: Optimizer) -> set[int]:
    """Ids of the parameters whose elements the optimizer does not update one by one.

    Muon and Dion with an element-wise optimizer beside them say which of both updates a parameter:
    `use_muon` of its group (MuonWithAuxAdam) or of its state (Moonlight's Muon), or `algorithm` of
    its group (Dion).
    """
    name = type(optimizer).__name__.lower()
    if not any(part in name for part in _OF_WHOLE_MATRICES):
        return set()
    return {
        id(parameter)
        for group in optimizer.param_groups
        if group.get("use_muon", True) and group.get("algorithm") not in _ELEMENT_WISE_ALGORITHMS
        for parameter in group["params"]
        if optimizer.state.get(parameter, {}).get("use_muon", True)
    }


def zero_ranks(optimizer: Optimizer) -> list[int]:
    """The ranks to which torch's ZeroRedundancyOptimizer sends parameters; empty for others."""
    group = getattr(optimizer, "process_group", None)
    if type(optimizer).__name__ != "ZeroRedundancyOptimizer" or not isinstance(group, ProcessGroup):
        return []
    return dist.get_process_group_ranks(group)


def is_scaled() -> bool:
    """Whether torch's GradScaler, which decides by one rank's gradients, has called the step."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is torch.amp.GradScaler.step.__code__:
            scaler = frame.f_locals["self"]
            return type(scaler).__module__ in _SCALERS and bool(scaler.is_enabled())
        frame = frame.f_back
    return False


def refuse_scaler(why: str) -> NoReturn:
    """Refuses a step under torch's GradScaler.

    Args:
        why: the clause on the parameter, for the message.

    Raises:
        SpecError: with `why`.
    """
    raise SpecError(
        "torch.amp.GradScaler decides by one rank's gradients whether to skip a step, and "
        f"{why}, so that after an overflow some ranks would step and others would not; use "
        "commgrid.data_parallel.GradScaler, which decides for all ranks"
    )


# -- torch's step hooks -----------------------------------------------------------------------


class StepHooks:
    """Hooks of all optimizers, registered with torch while they have a user.

    Args:
        register: calls torch's functions, and returns their handles.
    """

    def __init__(self, register: Callable[[], list[Any]]) -> None:
        self._register, self._users = register, 0
        self._handles: list[Any] = []

    def add_user(self) -> None:
        """Registers the hooks, if they are not."""
        self._users += 1
        if not self._handles:
            self._handles = self._register()

    def remove_user(self) -> None:
        """Removes the hooks with the last user."""
        self._users -= 1
        if not self._users:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()


_MODULES: weakref.WeakSet[ShardedModule] = weakref.WeakSet()
_SLICES: weakref.WeakKeyDictionary[Optimizer, tuple[list[tuple[int, bool]], list[Slice]]] = (
    weakref.WeakKeyDictionary()
)  # each optimizer's, with its parameters' ids and whether a reducer has them


def watch(module: ShardedModule) -> None:
    """Has optimizers checked before they step, while the module exists."""
    _MODULES.add(module)
    _HOOKS.add_user()
    weakref.finalize(module, _HOOKS.remove_user).atexit = False


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    key = [(id(p), hasattr(p, "grad_owner")) for p in updated]
    known = _SLICES.get(optimizer)
    if known is None or known[0] != key:
        known = _SLICES[optimizer] = key, list(_slices_in(optimizer))
    check_optimizer(optimizer, known[1])


def _slices_in(optimizer: Optimizer) -> Iterator[Slice]:
    """The slices that an optimizer updates; a reducer checks its own, whose full names it knows."""
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for module in _MODULES:
        for name, parameter in module.named_parameters(recurse=False):
            sliced = name in module.sliced_names and id(parameter) in updated
            if sliced and getattr(parameter, "grad_owner", None) is None:
                yield Slice(f"{type(module).__name__}.{name}", parameter, module.shards_of(name))


REGISTERED: list[Callable[[], Any]] = [lambda: register_optimizer_step_pre_hook(_before_step)]
"""Functions that hook into torch while a module with slices exists, and return handles."""
_HOOKS = StepHooks(lambda: [register() for register in REGISTERED])
