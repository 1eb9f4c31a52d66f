"""ShardedModule: a module that declares which of its parameters are slices, each a `Slice`.

Modules declare it rather than parameters, because attributes of a parameter are lost when a model
is deep-copied.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from commgrid.collectives.group_ref import GroupRef
from commgrid.errors import SpecError
from commgrid.layout.rank_text import describe_ranks

_SLICES = "commgrid_slices"  # the key of a module's slices in a state_dict's metadata


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
        return math.prod(group.size for _, group in self.shards)

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


class StepHooks:
    """Hooks of all optimizers, registered with torch while they have a user.

    Args:
        register: calls torch's functions, and returns their handles.
    """

    def __init__(self, register: Callable[[], list[Any]]) -> None:
        self._register = register
        self._handles: list[Any] = []
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        """Those that exist and were not removed."""

    def add_user(self, user: object) -> None:
        """Registers the hooks, if they are not, until the last user is gone or removed."""
        if user not in self.users:
            self.users.add(user)
            weakref.finalize(user, self._end_unused).atexit = False
        if not self._handles:
            self._handles = self._register()

    def remove_user(self, user: object) -> None:
        """Removes the hooks with the last user."""
        self.users.discard(user)
        self._end_unused()

    def _end_unused(self) -> None:
        if self._handles and not any(True for _ in self.users):  # len counts some that are gone
            for handle in self._handles:
                handle.remove()
            self._handles.clear()


REGISTERED: list[Callable[[], Any]] = []
"""Functions that hook into torch while a module with slices exists, and return handles."""
_HOOKS = StepHooks(lambda: [register() for register in REGISTERED])
LIVE: weakref.WeakSet[ShardedModule] = _HOOKS.users
"""Every module with slices that exists."""


class ShardedModule(nn.Module):
    """A module that declares which of its parameters and buffers are slices.

    Subclasses set `group` and `shard_dims`, the name to the dim it is sliced along; parameters and
    buffers not in it are equal on all ranks of the group. `partial` names equal parameters
    whose gradient is this rank's part of a sum over the group. A module sliced over several
    groups overrides `shards_of`.
    """

    group: GroupRef
    shard_dims: ClassVar[Mapping[str, int]] = {}
    partial: tuple[str, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _HOOKS.add_user(self)  # optimizers are checked before they step, while the module exists
        self.register_state_dict_post_hook(_record_slices)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_check_slices)  # type: ignore[no-untyped-call]

    def __setstate__(self, state: dict[str, Any]) -> None:  # of a copied or unpickled module
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _HOOKS.add_user(self)

    def __setattr__(self, name: str, value: Any) -> None:
        """As nn.Module's; FSDP2 sets every parameter that it has sharded."""
        if isinstance(value, DTensor) and name in self.sliced_names:
            one: Any = value
            check_mesh(Slice(f"{type(self).__name__}.{name}", one, self.shards_of(name)))
        super().__setattr__(name, value)

    def shards_of(self, name: str) -> tuple[tuple[int, GroupRef], ...]:
        """The dims along which a parameter or buffer is sliced, each with its group."""
        return ((self.shard_dims[name], self.group),) if name in self.shard_dims else ()

    @property
    def sliced_names(self) -> tuple[str, ...]:
        """Names of the parameters that are slices; override it together with `shards_of`."""
        return tuple(self.shard_dims)

    def full_shape(self, name: str) -> tuple[int, ...]:
        """Shape of the unsharded parameter; override it for padded slices."""
        buffer = self._buffers.get(name)
        shape = list((self.get_parameter(name) if buffer is None else buffer).shape)
        for dim, group in self.shards_of(name):
            shape[dim] *= group.size
        return tuple(shape)


def _slices_of(module: ShardedModule) -> dict[str, list[tuple[int, str, int, int]]]:
    """Dim, group name, index and number of slices of each sliced parameter."""
    return {
        name: [(dim, g.name, g.rank, g.size) for dim, g in module.shards_of(name)]
        for name in module.sliced_names
    }


def _record_slices(
    module: ShardedModule, state_dict: Any, prefix: str, metadata: dict[str, Any]
) -> None:
    """Adds this rank's slices to the metadata of a state_dict."""
    metadata[_SLICES] = _slices_of(module)


def _check_slices(
    module: ShardedModule, state_dict: Any, prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    """Refuses a state_dict of another rank's slices.

    Raises:
        SpecError: names the first such parameter.
    """
    theirs, mine = metadata.get(_SLICES, {}), _slices_of(module)
    for name in (name for name in mine if name in theirs):
        for (dim, group, here, size), saved in zip(mine[name], theirs[name], strict=False):
            there, count = saved[2:]
            if there != here and count == size:
                raise SpecError(
                    f"{prefix}{name} of this state_dict is slice {there} of {size} along dim "
                    f"{dim}, and this rank has slice {here} of group {group!r}; load each rank's "
                    "own state_dict, or save and load with commgrid.checkpoint; if you have put "
                    "the right slices into it, give dict(state_dict)"
                )


def check_declared(prefix: str, module: ShardedModule) -> None:
    """Refuses declarations for parameters or dims that a layer does not have."""
    who = f"{f'{prefix}: ' if prefix else ''}{type(module).__name__}"
    if not isinstance(getattr(module, "group", None), GroupRef):
        raise SpecError(
            f"{who}.group is {getattr(module, 'group', None)!r}: a ShardedModule keeps the group "
            "that its parameters are cut over as self.group = GroupRef('tp')"
        )
    for what, names in (("shard_dims", module.sliced_names), ("partial", module.partial)):
        for name in names:
            if name not in module._parameters and not hasattr(module, name):
                has = ", ".join(module._parameters) or "none"
                raise SpecError(
                    f"{who}.{what} names {name!r}, which is no parameter of it; it has {has}"
                )
    for name in module.sliced_names:
        tensor = {**module._parameters, **module._buffers}.get(name)
        for dim, _ in module.shards_of(name) if tensor is not None else ():
            if not 0 <= dim < tensor.dim():  # type: ignore[union-attr]
                raise SpecError(
                    f"{who}.shard_dims says that {name!r} is cut along dim {dim}; it has shape "
                    f"{tuple(tensor.shape)}"  # type: ignore[union-attr]
                )


def check_unwrapped(prefix: str, module: ShardedModule) -> None:
    """Refuses a slice, or a partial parameter, that is now made of another parameter."""
    cut = [n for n in module.sliced_names if any(g.size > 1 for _, g in module.shards_of(n))]
    for name in (*cut, *(module.partial if module.group.size > 1 else ())):
        if {name} & {*module._parameters, *module._buffers} or not hasattr(module, name):
            continue
        made_of = [key for key in module._parameters if key.startswith(f"{name}_")]
        if parametrize.is_parametrized(module, name):
            made_of = [f"parametrizations.{name}.original"]
        if not made_of:
            continue
        raise SpecError(
            f"{f'{prefix}.' if prefix else ''}{name} of {type(module).__name__} is no parameter of "
            f"the layer any more, but computed from {', '.join(made_of)} (a parametrization, "
            "weight_norm or pruning), of which nothing says how ranks share it; take that off "
            "(torch.nn.utils.parametrize.remove_parametrizations), or put it into a ShardedModule "
            "of your own"
        )
