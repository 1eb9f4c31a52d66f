"""`initialize`: what a program asks for becomes a spec, and the spec a grid of the registry."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from inspect import signature
from pathlib import Path
from typing import Any, cast

from commgrid.errors import NotInGridError, SpecError
from commgrid.layout.axis_names import nearest
from commgrid.layout.ranks import as_ranks
from commgrid.planning.audited import VARIABLE, audit_sizes, audited_grid, spec_over
from commgrid.planning.region import HSDP
from commgrid.planning.spec import GridSpec
from commgrid.planning.yaml_keys import BY_RANK, DEFAULT_ORDER, DEFAULT_SHARE
from commgrid.recording import order_check
from commgrid.rendezvous.timeouts import Seconds, Timeouts, as_seconds, use_timeouts
from commgrid.rendezvous.timeouts import timeouts as current_timeouts
from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.registry import Made, _registry
from commgrid.store.launch import Launch
from commgrid.torch_compat import nccl as torch_nccl
from commgrid.torch_compat import world as torch_world


def initialize(
    *,
    dp: int = -1,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    order: str = DEFAULT_ORDER,
    create: str | Sequence[str] = "all",
    connect: str | Sequence[str] = "axes",
    share: str = DEFAULT_SHARE,
    groups: Mapping[str, Any] | None = None,
    ranks: range | Sequence[int] | str | None = None,
    within: Mapping[str, str] | None = None,
    place: str = BY_RANK,
    backend: str | None = None,
    timeout: Seconds | None = None,
    startup_timeout: Seconds = 600.0,
    trace: bool = False,
    watch: bool | None = None,
    verify: str | None = None,
    timeouts: Timeouts | None = None,
    preset: str | None = None,
    config: str | Path | Mapping[str, Any] | GridSpec | None = None,
    name: str = "default",
    **axes: int,
) -> HyperCommGrid:
    """Create a grid on all its ranks and register it; start torch.distributed if it is not up.

    Every rank of the grid calls it with the same arguments; it returns when all of them
    have all their communicators.

    Args:
        dp, tp, pp, cp: sizes of the dense axes; one -1 is filled from the number of ranks.
        ep, etp: expert and expert tensor parallel sizes; they make the expert region.
        order: axes fastest-varying first, as Megatron spells it.
        create: `"all"` combinations of axes, or a list of names.
        connect: which communicators connect now: `"axes"` (single axes and the groups
            table), `"all"`, `"none"` or a list of names; the rest do at first use.
        share: which names with equal ranks are one communicator: `"aliases"` (declared aliases, and
            groups of one rank), `"region"` (also names that differ by axes of size 1) or `"all"`.
            The last two save memory; all members must then issue the collectives of names that
            share a communicator in one order, asynchronous ones too.
        groups: the groups table, as in YAML.
        ranks: the global ranks this grid covers, in any order: the place in the list is the
            place in the grid. None: all of WORLD. Where commgrid starts torch.distributed, every
            rank of WORLD calls initialize or `join`.
        within: groups that may not leave a host, as `{"tp": "node"}`; where the hosts of the ranks
            break it, it is an error on all of them.
        place: `"by_host"` gives the ranks of one host neighbouring places in the grid, even if
            their numbers are not neighbours, and logs any change of places.
        backend: None takes WORLD's; where commgrid starts torch.distributed, `nccl` with CUDA,
            else `gloo`. The current CUDA device becomes that of LOCAL_RANK or SLURM_LOCALID, unless
            one other than 0 is current.
        timeout: of collectives, seconds or timedelta; None: torch's default. On NCCL also of the
            wait for all members before a communicator's first call.
        startup_timeout: how long this call may take, likewise; ten minutes, since the processes
            of a large job come minutes apart.
        trace: whether this process records its collectives, for `commgrid.trace`; it also does
            where COMMGRID_TRACE is set in the environment.
        watch: whether a thread of each rank, linked with some others', sees that ranks are gone,
            stopped or late, tells all, and ends what waits for them. None: where something runs on
            NCCL, which leaves its errors to it then; gloo tells of most failures by itself.
        verify: `"order"` on all ranks compares what the members of each communicator issue, call by
            call, and raises GridMismatchError at the first difference, with both lines.
        timeouts: durations of the protocols within, such as how long a rank may be silent, for all
            grids of this process from now on. None: those in use; at first the defaults, with the
            changes of COMMGRID_TIMEOUTS.
        preset: a grid that others use, by name, as `commgrid presets` lists them; what is given of
            dp to place, other than by its default, is laid over it.
        config: a YAML path, dict or GridSpec, instead of all from dp to place but ranks.
        name: the name to register the grid under.
        **axes: sizes of further axes, named in `order`; `dp_replicate` and `dp_shard`
            stand in for dp.

    Returns:
        The grid, which `get_grid(name)` returns from now on. Where commgrid has started
        torch.distributed, None on a rank that `ranks` leaves out.

    Raises:
        GridExistsError: a grid of this name is alive.
        SpecError, NotInGridError, GridMismatchError, PeerTimeoutError, PeerFailedError:
            see `HyperCommGrid`.

    Example:
        >>> import commgrid
        >>> grid = commgrid.initialize(name="docs")     # in a bare process: a world of one
        >>> grid.get_ranks("dp_cp")
        (0,)
        >>> commgrid.shutdown()
    """
    deadline = time.monotonic() + as_seconds("startup_timeout", startup_timeout)
    limit = None if timeout is None else as_seconds("timeout", timeout)
    order_check.check_argument(verify)
    if not isinstance(timeouts, Timeouts | None):
        raise SpecError(f"timeouts={timeouts!r}: expected a commgrid.Timeouts")
    use_timeouts(timeouts or current_timeouts())
    sizes = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp, **axes}
    rest = {"order": order, "create": create, "connect": connect, "share": share, "groups": groups,
            "within": within, "place": place}  # fmt: skip
    known = {*str(order).split("-"), *HSDP}
    for axis in axes.keys() - known if preset is None else ():
        raise SpecError(
            f"{axis}={axes[axis]!r}: neither an argument of initialize nor an axis of "
            f"order={order!r}{nearest(axis, [*signature(initialize).parameters, *HSDP])}"
        )
    audited = audited_grid() if name == "default" else None
    if preset is not None:
        spec = _from_preset(preset, config, sizes, rest, ranks)
    elif config is None:
        sizes = sizes if audited is None else _audited(sizes)
        spec = GridSpec.build(**{**sizes, **rest}, ranks=ranks)  # type: ignore[arg-type]
    else:
        spec = _from_config(config, {**sizes, **rest}, ranks)
    if audited is not None and (preset is not None or config is not None):
        spec = spec_over(audited, spec)
    with _registry.reserved(name):
        given = spec
        if not torch_world.is_initialized():
            spec = _resolved(spec)
        started = _registry.ensure_world(backend, limit, deadline, watch is not False)
        try:
            left = deadline - time.monotonic()
            grid = HyperCommGrid(
                spec, name=name, backend=backend, timeout=timeout, startup_timeout=max(left, 1e-3),
                watch=watch, before_ready=partial(order_check.observe, trace, verify),
            )  # fmt: skip
        except NotInGridError as error:
            if _registry.started_world:
                # A rank without a part in the grid; its None is not in the annotation, which is
                # for the many who give no ranks.
                return cast("HyperCommGrid", None)
            error.args = (
                f"{error}; a program that starts torch.distributed itself calls initialize on the "
                "grid's ranks alone: initialize(…) if rank in ranks else None",
            )
            raise
        except BaseException:
            if started:
                _registry.stop_unused_world(name)
            raise
        if grid.watch is not None and grid.on_nccl:
            for text in torch_nccl.what_disables_the_watch(_registry.started_world):
                _warn_once(text)
        _registry.add(grid)
        _registry.made[name] = Made(
            given, dict(grid.shape), grid.spec, grid.identity, backend, limit, trace, watch, verify,
            grid.watch,
        )  # fmt: skip
    return grid


@cache
def _warn_once(text: str) -> None:
    """Log a text once in a process."""
    logging.getLogger("commgrid").warning("%s", text)


def _audited(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """An audit's sizes in place of a program's; dp's two parts make up its dp."""
    for axis, size in (audited_grid() or {}).items():
        if axis not in sizes and axis != "edp" and size != 1:
            raise SpecError(
                f"{VARIABLE}: the audit's grid has {axis}={size}, but the program gives "
                f"initialize no {axis}; it has {', '.join(sizes)}{nearest(axis, sizes)}"
            )
    found = audit_sizes(**sizes)
    if "dp_shard" in sizes or "dp_replicate" in sizes:
        found.update(dp=-1, dp_shard=-1, dp_replicate=sizes.get("dp_replicate", 1))
    return found


def _resolved(spec: GridSpec) -> GridSpec:
    """Return the spec over the launched ranks; one that does not fit is refused before this rank
    meets others."""
    launch = Launch.from_environment(os.environ)
    try:
        return spec.resolve(launch.world_size)
    except SpecError as error:
        if launch.address is not None:
            raise
        raise SpecError(
            f"{error}; no launcher has started this process, so it is a world of one; run it under "
            "torchrun --nproc-per-node N, or srun"
        ) from error


def join(
    *, backend: str | None = None, timeout: Seconds | None = None, startup_timeout: Seconds = 600.0
) -> None:
    """Takes part in starting torch.distributed without being in a grid, as a spare rank does.

    Every rank of WORLD calls this or `initialize`; it returns when all of them have. Later calls,
    and those where torch.distributed is up, do nothing.

    Args:
        backend: of WORLD, as the other ranks give it.
        timeout: of collectives on WORLD, seconds or timedelta; None: torch's default.
        startup_timeout: how long this call may take, likewise.

    Raises:
        GridMismatchError, PeerTimeoutError, PeerFailedError: as in `initialize`.

    Example:
        >>> import commgrid
        >>> commgrid.join()    # in a bare process: a world of one
        >>> commgrid.shutdown()
    """
    deadline = time.monotonic() + as_seconds("startup_timeout", startup_timeout)
    limit = None if timeout is None else as_seconds("timeout", timeout)
    _registry.ensure_world(backend, limit, deadline)


def _from_preset(
    preset: str,
    config: object,
    sizes: Mapping[str, Any],
    rest: Mapping[str, Any],
    ranks: range | Sequence[int] | str | None,
) -> GridSpec:
    """Return the preset's spec, changed by the arguments that differ from their defaults."""
    if config is not None:
        raise SpecError(f"preset={preset!r} beside config=: give one of them")
    given, changes = _other_than_default(sizes), _other_than_default(rest)
    rows = changes.pop("groups", None) or {}
    changes.update({f"groups.{name}": row for name, row in rows.items()})
    return GridSpec.from_preset(preset, ranks=ranks, changes=changes, **given)


def _other_than_default(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments whose value is not the default of `GridSpec.build`."""
    known = signature(GridSpec.build).parameters
    return {k: v for k, v in given.items() if k not in known or v != known[k].default}


def started_ranks() -> int:
    """Return the number of ranks, as torch or the launcher says; 1 without a launcher."""
    if torch_world.is_initialized():
        return torch_world.world_size()
    return Launch.from_environment(os.environ).world_size


def _from_config(
    config: str | Path | Mapping[str, Any] | GridSpec,
    given: Mapping[str, Any],
    ranks: range | Sequence[int] | str | None,
) -> GridSpec:
    """The config's spec; anything else that describes a grid beside it is an error."""
    if beside := _other_than_default(given):
        raise SpecError(
            f"{', '.join(f'{key}={value!r}' for key, value in beside.items())} beside config=: the "
            "config describes the whole grid; put these into it, or leave config out"
        )
    spec = GridSpec.from_config(config)
    return spec if ranks is None else replace(spec, ranks=as_ranks(ranks))
