"""The same initial weights on any grid.

A rank draws its slice of a weight and not the rest: element i of the full weight is a function of
a number that torch's global random state gives, and of i. That number must not depend on how many
ranks share the weight, nor on which layers this rank happens to build. Each module therefore gets
a random stream of its own, seeded by the job's seed and the module's name in the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from commgrid.collectives.group_ref import GroupRef
from commgrid.errors import ShapeError, SpecError
from commgrid.parameters import own_slice
from commgrid.tensor_parallel.counter_rng import Law
from commgrid.tensor_parallel.known_init import Constant, Init, law_of
from commgrid.tensor_parallel.slices import fill

__all__ = ["Init", "draw", "initialize_parameters", "other_random_state", "seed_of"]

PRECISIONS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def draw(
    parameter: nn.Parameter, full_shape: Sequence[int], init: Init, dim: int | None, group: GroupRef
) -> None:
    """Fills a parameter with its slice along `dim` of what `init` makes of the full shape.

    Of an init that is known (see `Init`) nothing but the slice is drawn, on the parameter's
    device, and torch's random state is asked for one number. Any other fills the full tensor, on
    the CPU, so that the numbers do not depend on the device. What lies past the end of the full
    shape is zero; on the meta device nothing is drawn.

    Args:
        parameter: this rank's slice, which is filled.
        full_shape: of the parameter on one process.
        init: fills the tensor that it is given in place, as those of torch.nn.init do.
        dim: along which the parameter is sliced; None: it is whole.
        group: whose ranks have a slice each.

    Raises:
        ShapeError: the parameter is no slice of that shape over that group.
        SpecError: `group` is no GroupRef, or `init` returns a tensor of its own.
    """
    _check_slice(parameter, full_shape, dim, group)
    if not has_numbers(parameter):
        return
    law = known_law(init, full_shape, parameter)
    with torch.no_grad():
        if law is not None:
            shards = () if dim is None else ((dim, group),)
            draw_slice(parameter, full_shape, law, shards)
            return
        full = torch.empty(tuple(full_shape), dtype=parameter.dtype, device="cpu")
        made: object = init(full)
        if isinstance(made, Tensor) and made.data_ptr() != full.data_ptr():
            raise SpecError(
                f"init={getattr(init, '__name__', init)!r} returned another tensor; expected a "
                "function that fills the one it is given, such as torch.nn.init.normal_"
            )
        if dim is not None:
            full = own_slice(full, dim, group, parameter.shape[dim])
        parameter.copy_(full)


def _check_slice(
    parameter: nn.Parameter, full_shape: Sequence[int], dim: int | None, group: GroupRef
) -> None:
    """That a parameter can be its rank's slice; one past the end may be padded."""
    if dim is not None and not isinstance(getattr(group, "size", None), int):
        raise SpecError(
            f"draw(…, group={group!r}): expected a GroupRef, which a layer keeps as self.group: "
            f"GroupRef({group if isinstance(group, str) else 'tp'!r})"
        )
    shape, expected = tuple(parameter.shape), list(full_shape)
    fits = len(shape) == len(expected) and (dim is None or -len(shape) <= dim < len(shape))
    if fits and dim is not None:
        least = -(-expected[dim] // group.size)
        expected[dim] = max(shape[dim], least)  # more is padding, as a vocabulary has it
    if not fits or shape != tuple(expected):
        ranks = f"over the {group.size} ranks of {group.name!r}"
        over = "" if dim is None else f" along dim {dim} {ranks}"
        raise ShapeError(
            f"a parameter of shape {shape} is no slice of {tuple(full_shape)}{over}; expected "
            f"{tuple(expected)}"
        )


def has_numbers(tensor: Tensor) -> bool:
    """Whether there is memory to fill, as there is none on the meta device and in fake tensors."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def known_law(init: Init, shape: Sequence[int], target: Tensor) -> Law | Constant | None:
    """How `init` would fill a tensor of this shape; None: only it knows."""
    return law_of(init, shape) if target.dtype in PRECISIONS else None


def draw_slice(
    target: Tensor,
    full_shape: Sequence[int],
    law: Law | Constant,
    shards: Sequence[tuple[int, GroupRef]],
) -> None:
    """Fills a tensor with its slice of a full one, of numbers that are distributed as `law` says.

    Args:
        target: this rank's slice; padded where the slices are more than the full tensor.
        full_shape: of the full tensor.
        law: a constant asks nothing of torch's random state, any other one number.
        shards: along which dims it is sliced, and over which group.
    """
    starts = [0] * len(full_shape)
    real = target.detach()
    for dim, group in shards:
        size = target.shape[dim]
        starts[dim] = min(group.rank * size, full_shape[dim])
        real = real.narrow(dim, 0, min(size, full_shape[dim] - starts[dim]))
    if real.numel() < target.numel():
        target.detach().zero_()
    if isinstance(law, Constant):
        real.fill_(law.value)
    else:
        seed = int(torch.randint(2**63 - 1, (), device="cpu"))
        fill(real, full_shape, starts, law, seed)


def initialize_parameters(model: nn.Module, seed: int) -> None:
    """Draws every parameter anew, the same full weights on any grid.

    Calls `reset_parameters()` of each module that has it, with torch's random state
    seeded by `seed` and the module's name; the state is left as it was. A model built on the
    meta device is drawn so after `model.to_empty(device=…)`.

    Args:
        model: built on every rank with the same module names.
        seed: the same on every rank.
    """
    for name, module in model.named_modules():
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            with other_random_state(seed_of(f"{seed}/{name}")):
                reset()


@contextmanager
def other_random_state(seed: int) -> Iterator[None]:
    """Within it, torch's random state is that of `seed`; after it, what it was before."""
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        torch.manual_seed(seed)
        yield


def seed_of(text: str) -> int:
    """A seed of 63 bits that depends on every character of the text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
