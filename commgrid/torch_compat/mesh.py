"""Patches of torch's DeviceMesh, DTensor, DDP and GradScaler, and the torch change that ends the need for each.

| change | lasts | goes when torch |
|---|---|---|
| `answered_with` | while a root's names are flattened | lets `DeviceMesh._flatten` take a group that exists |
| `let_names_be_taken` | until `put_back` | asks who made a flattened axis before it refuses its name |
| `before_ddp` | while a module with slices exists | asks a module about the ranks that it is about to be copied to |
| `BeforeUnscaling` | while a module with slices or a reducer exists | has a hook before GradScaler reads gradients |
| `mend_uneven_gathers` | until `put_back` | gathers uneven pieces over a flattened axis in their own sizes, or axis by axis |

`shutdown` calls `put_back`. Patches that last until then are left out on versions of torch outside
`_CHECKED`. Every other change to torch is made by `replace` as well, so that all are undone in order.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

_CHECKED = ((2, 11), (2, 16))
"""The first torch on which these were checked, and the first on which they were not."""


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


@dataclass(frozen=True)
class Replaced:
    """An attribute of torch's that is replaced until `remove`.

    Args:
        owner: a class or module of torch's.
        name: the attribute.
        before, now: its values.
    """

    owner: Any
    name: str
    before: Any
    now: Any

    @property
    def is_in_place(self) -> bool:
        """Whether it was not undone; a later replacement may wrap it."""
        return self in _REPLACED

    @property
    def is_on_top(self) -> bool:
        """Whether it is the current value of the attribute."""
        return vars(self.owner)[self.name] is self.now

    def remove(self) -> None:
        """Put the former value back, unless this one was replaced since."""
        if self.is_on_top:
            setattr(self.owner, self.name, self.before)
            if self in _REPLACED:
                _REPLACED.remove(self)


def replace(owner: Any, name: str, now: Any) -> Replaced:
    """Replace an attribute of torch's, until `remove`, or `put_back` at the end of all grids."""
    # From `vars`: `getattr` would return a static method without its wrapper.
    made = Replaced(owner, name, vars(owner)[name], now)
    setattr(owner, name, now)
    _REPLACED.append(made)
    return made


_REPLACED: list[Replaced] = []
"""In the order in which they were made, so that they come off in the reverse one."""


def put_back() -> None:
    """Undo all replacements, except where another library has replaced ours since."""
    for each in reversed(_REPLACED[:]):
        each.remove()


@contextmanager
def answered_with(group: ProcessGroup) -> Iterator[None]:
    """Within it, torch is given this group where it would create one for a mesh."""
    answer = staticmethod(lambda *_, **__: group.group_name)
    replaced = replace(DeviceMesh, "_init_one_process_group", answer)
    try:
        yield
    finally:
        replaced.remove()


OFFERED = "_offered_by_commgrid"
"""Marks a flattened mesh that the program has not asked for yet; it is pickled with the mesh."""


def offer(root: DeviceMesh, name: str, flattened: DeviceMesh) -> None:
    """Register a flattened mesh with its root under a name that the program may still take."""
    offered = copy(flattened)
    offered._root_mesh, offered._flatten_mapping = root, {}
    setattr(offered, OFFERED, True)
    root._flatten_mapping[name] = offered


def let_names_be_taken() -> None:
    """Keeps torch from refusing names that were only offered, as if a user had flattened to them.

    Flattening what was offered under that name takes the offer; flattening anything else to it, or
    with another backend, cancels the offer, and torch makes a group as usual.
    """
    create = getattr(DeviceMesh, "_create_flatten_mesh", None)
    if not _CHECKED[0] <= _torch_version() < _CHECKED[1]:
        return
    if create is None or hasattr(create, "is_mended"):
        return

    def mended(mesh: DeviceMesh, mesh_dim_name: str | None = None, *more: Any, **named: Any) -> Any:
        name = mesh_dim_name or "_".join(mesh.mesh_dim_names or ())
        known = mesh._get_root_mesh()._flatten_mapping
        if not getattr(known.get(name), OFFERED, False):
            return create(mesh, name, *more, **named)
        setattr(known[name], OFFERED, False)
        if any(given not in (None, (None, None)) for given in (*more, *named.values())):
            del known[name]
            return create(mesh, name, *more, **named)
        try:
            return create(mesh, name, *more, **named)
        except ValueError:  # another layout than the offered one's
            del known[name]
            return create(mesh, name, *more, **named)

    mended.is_mended = True  # type: ignore[attr-defined]
    replace(DeviceMesh, "_create_flatten_mesh", mended)


def mend_uneven_gathers() -> None:
    """Keeps DTensor from gathering uneven pieces over a flattened axis, which mixes them up.

    Of 5 rows sharded over dp 2 and tp 2 ranks have 2, 1, 1, 1; where dp and tp are flattened, torch
    (2.11 to 2.15) gathers them at once and takes them for 2, 2, 1, 0. It is then told to gather
    axis by axis, as it does without flattened axes.
    """
    if not _CHECKED[0] <= _torch_version() < _CHECKED[1]:
        return
    planner: Any = import_module("torch.distributed.tensor._redistribute")  # takes a while
    optimize = planner._optimize_transform_infos
    if getattr(optimize, "is_mended", False):
        return

    def mended(infos: Any, *more: Any) -> Any:
        steps = optimize(infos, *more)
        return list(infos) if any(map(_is_uneven_gather, steps)) else steps

    mended.is_mended = True  # type: ignore[attr-defined]
    replace(planner, "_optimize_transform_infos", mended)


def _is_uneven_gather(step: Any) -> bool:
    source, target = step.src_dst_placements
    if not hasattr(step, "original_mesh_dims") or not (source.is_shard() and target.is_replicate()):
        return False
    uneven: bool = step.logical_shape[source.dim] % step.mesh.size() != 0
    return uneven


def forget_plans() -> None:
    """Clears DTensor's cached plans, which name the groups of a mesh that is gone.

    They are looked up by the mesh's ranks and axis names, so that the mesh of a later grid of the
    same shape found them, and with them groups that no longer exist.
    """
    for module, name in (
        ("torch.distributed.tensor.debug", "_clear_sharding_prop_cache"),
        ("torch.distributed.tensor._redistribute", "_gen_transform_infos"),
    ):
        found = getattr(import_module(module), name, None)
        clear = getattr(found, "cache_clear", found)
        if clear is not None:
            clear()


def before_ddp(check: Callable[[nn.Module, Sequence[int]], None]) -> Replaced:
    """Has DistributedDataParallel show a module, and the ranks it goes to, before it copies it.

    DDP broadcasts every parameter of the first rank to all others of its group.

    Args:
        check: raises where that is wrong.

    Returns:
        A handle, whose `remove` ends it.
    """
    start = DistributedDataParallel.__init__

    @wraps(start)
    def checked(ddp: DistributedDataParallel, module: nn.Module, *args: Any, **named: Any) -> None:
        given = signature(start).bind(ddp, module, *args, **named).arguments
        mesh, group = given.get("device_mesh"), given.get("process_group")
        if mesh is not None and mesh.ndim == 1:
            group = mesh.get_group()
        if dist.is_initialized() and isinstance(module, nn.Module):
            check(module, dist.get_process_group_ranks(group))
        start(ddp, module, *args, **named)

    made = Replaced(DistributedDataParallel, "__init__", start, checked)
    DistributedDataParallel.__init__ = checked  # type: ignore[method-assign, assignment]
    return made


Unscaled = Callable[[torch.amp.GradScaler, torch.optim.Optimizer], None]
_UNSCALED: list[Unscaled] = []


class BeforeUnscaling:
    """Has torch's GradScaler show itself and the optimizer before it reads gradients.

    All ranks come there, before any decides from its own gradients whether to step. The first check
    puts the change to torch in place, and `remove` of the last one ends it.

    Args:
        check: raises where that is wrong.
    """

    made: Replaced | None = None

    def __init__(self, check: Unscaled) -> None:
        self._check = check
        _UNSCALED.append(check)
        if BeforeUnscaling.made is None:
            unscale = torch.amp.GradScaler.unscale_

            @wraps(unscale)
            def checked(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
                for each in tuple(_UNSCALED) if scaler.is_enabled() else ():
                    each(scaler, optimizer)
                unscale(scaler, optimizer)

            BeforeUnscaling.made = Replaced(torch.amp.GradScaler, "unscale_", unscale, checked)
            torch.amp.GradScaler.unscale_ = checked  # type: ignore[method-assign, assignment]

    def remove(self) -> None:
        """Check no more."""
        _UNSCALED.remove(self._check)
        if not _UNSCALED and BeforeUnscaling.made is not None:
            BeforeUnscaling.made.remove()
            BeforeUnscaling.made = None
