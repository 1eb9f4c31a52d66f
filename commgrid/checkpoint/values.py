"""Values beside tensors: named by rank, and states of random generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from commgrid.errors import CheckpointError
from commgrid.resharding.item import Item, Path, Value, whole
from commgrid.resharding.layouts import Form
from commgrid.runtime.grid import HyperCommGrid

OWN = "extra_per_rank"


def own_path(grid: HyperCommGrid) -> Path:
    """Return the name of a rank's own values, with its coordinates: `dp=1 tp=0`."""
    coordinate = grid.spec.layout("dense").coordinate(grid.rank)
    return OWN, " ".join(f"{axis}={place}" for axis, place in coordinate.items())


def extras_in(forms: Mapping[str, Form | None]) -> list[Item | Value]:
    """The job's own values; torch.distributed.checkpoint keeps tensors as such.

    Args:
        forms: of a checkpoint's tensors by key; None: a value.
    """
    found: list[Item | Value] = []
    for key, form in forms.items():
        first, _, rest = key.partition(".")
        if first == "extra" and form is not None:
            made = torch.empty(form.shape, dtype=form.torch_dtype)
            found.append(whole((first, rest), made))
        elif first == "extra":
            found.append(Value((first, rest)))
    return found


def offered(keys: Iterable[str], grid: HyperCommGrid) -> list[Path]:
    """Return the names of the old ranks' own values that this rank is offered.

    On an axis of n ranks, the rank at coordinate i is offered the values of old ranks at i, i + n,
    i + 2 n and so on. So each old rank's values are offered to exactly one new rank.

    Args:
        keys: of a checkpoint.
        grid: that loads.

    Returns:
        Paths, sorted by the old ranks' coordinates.
    """
    mine = grid.spec.layout("dense").coordinate(grid.rank)
    shape = grid.spec.layout("dense").shape
    found = []
    for key in keys:
        first, _, said = key.partition(".")
        if first != OWN:
            continue
        places = {axis: int(place) for axis, _, place in (p.partition("=") for p in said.split())}
        axes = {*mine, *places}
        if all(places.get(a, 0) % shape.get(a, 1) == mine.get(a, 0) for a in axes):
            found.append(([*places.values()], (OWN, said)))
    return [path for _, path in sorted(found)]


def is_same_layout(keys: Iterable[str], grid: HyperCommGrid) -> bool:
    """Return whether each rank of a grid had values of its own, and each of these has a rank."""
    had = {
        frozenset(place for place in key.removeprefix(f"{OWN}.").split() if place[-2:] != "=0")
        for key in keys if key.startswith(f"{OWN}.")
    }  # fmt: skip
    layout = grid.spec.layout("dense")
    coordinates = map(layout.coordinate, grid.spec.grid_ranks)
    return had == {
        frozenset(f"{axis}={place}" for axis, place in one.items() if place) for one in coordinates
    }


def random_states(generators: Mapping[str, torch.Generator] | None = None) -> dict[str, Any]:
    """Return the states of this process's generators, for `save(…, extra_per_rank=…)`.

    They are Python's, NumPy's if it was imported, torch's of the CPU and of the current
    accelerator if it is in use, and those given.

    Args:
        generators: further ones by name, such as a data loader's.

    Returns:
        Plain values and tensors on the CPU.

    Example:
        >>> import torch
        >>> from commgrid import checkpoint
        >>> states = checkpoint.random_states()
        >>> first = torch.rand(2)
        >>> checkpoint.set_random_states(states)
        >>> bool((torch.rand(2) == first).all())
        True
    """
    found: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    device = _device()
    if device is not None and _is_used(device):
        found[device] = torch.get_device_module(device).get_rng_state()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        found["numpy"] = _plain(numpy.random.get_state(legacy=False))
    for name, generator in (generators or {}).items():
        found[f"given {name}"] = generator.get_state()
    return found


def set_random_states(
    states: Mapping[str, Any], generators: Mapping[str, torch.Generator] | None = None
) -> None:
    """Set this process's generators to states that `random_states` has returned.

    NumPy's state is left out if NumPy is not imported, an accelerator's if there is none.

    Args:
        states: of all of them.
        generators: the further ones, by the same names.

    Raises:
        CheckpointError: the states are not `random_states`'s, or of generators of other names,
            kinds or versions; nothing is set.
    """
    if not isinstance(states, Mapping) or not {"python", "torch"} <= states.keys():
        raise CheckpointError(
            f"states={str(states)[:60]}: expected what random_states returned on some rank"
        )
    given = {f"given {name}": generator for name, generator in (generators or {}).items()}
    further = {name for name in states if name.startswith("given ")}
    if further != given.keys():
        had, has = (sorted(n.removeprefix("given ") for n in one) for one in (further, given))
        raise CheckpointError(
            f"the states are of generators {had}, and here are {has}; give both calls the same "
            "names"
        )
    device, numpy = _device(), sys.modules.get("numpy")
    known: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
        "python": (random.getstate, lambda state: random.setstate(_tuples(state))),
        "torch": (torch.get_rng_state, torch.set_rng_state),
        **{name: (generator.get_state, generator.set_state) for name, generator in given.items()},
    }
    if device is not None:
        module = torch.get_device_module(device)
        known[device] = module.get_rng_state, module.set_rng_state
    if numpy is not None:
        known["numpy"] = partial(numpy.random.get_state, legacy=False), numpy.random.set_state
    before: list[tuple[Callable[[Any], object], Any]] = []
    for name, (get, put) in known.items():
        if name not in states:
            continue
        now = get()
        try:
            put(states[name])
        except Exception as error:
            for undo, was in before:
                undo(was)
            raise CheckpointError(
                f"the state of generator {name.removeprefix('given ')} is of another kind or "
                f"version: {error}; nothing is set"
            ) from error
        before.append((put, now))


def _device() -> str | None:
    """The kind of accelerator that this machine has; None: none."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if kind is None else kind.type


def _is_used(device: str) -> bool:
    """Whether this process has used an accelerator; asking for its state would start to."""
    return bool(getattr(torch.get_device_module(device), "is_initialized", lambda: True)())


def _plain(value: Any) -> Any:
    """NumPy's arrays as lists, which load without running code."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def _tuples(value: Any) -> Any:
    """Lists as tuples, which Python's generator wants."""
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
