"""Initial weights, the same on any grid.

A full weight is made of tiles of up to 256 × 256 elements. torch fills each tile from a generator
of its own, which is seeded by a hash of the weight's seed and the tile's place. So a rank draws the
tiles that its slice touches and no others, and slices are equal to the full weight in every bit.

The weight's seed is one number from torch's global random state. It must not depend on how many
ranks share the weight, nor on which layers this rank builds. `initialize_parameters` therefore
gives each module a random stream of its own, seeded by the job's seed and the module's name.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from operator import sub
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from commgrid.collectives.group_ref import GroupRef
from commgrid.errors import ShapeError, SpecError
from commgrid.layout.box import common, slices
from commgrid.torch_compat.messages import version_of

__all__ = ["Init", "draw", "initialize_parameters", "other_random_state", "seed_of"]

Init = Callable[[Tensor], object]
"""Fills a full weight in place from torch's global random state.

Of `nn.init`'s normal_, trunc_normal_, uniform_, xavier_*_, kaiming_*_, zeros_, ones_ and constant_,
bare or as `functools.partial` with keywords, a rank makes its own slice. Any other function gets
the full weight on the CPU, on every rank, which for large ones takes as long and as much memory as
if the layer were not sharded.
"""

TILE = 256
"""Elements along each dim of a tile. A change gives every seed other weights."""

CONSTANT = (nn.init.zeros_, nn.init.ones_, nn.init.constant_)
ELEMENT_WISE = (nn.init.normal_, nn.init.uniform_, nn.init.trunc_normal_)
XAVIER = (nn.init.xavier_uniform_, nn.init.xavier_normal_)
KAIMING = (nn.init.kaiming_uniform_, nn.init.kaiming_normal_)


def draw(
    parameter: Tensor, full_shape: Sequence[int], init: Init, dim: int | None, group: GroupRef
) -> None:
    """Fill a parameter with its slice of the full tensor that `init` fills.

    A known init (see `Init`) draws the slice alone: in fp32, then rounded to the parameter's dtype.
    It takes one number from torch's random state, a constant none. Any other init fills the full
    tensor in the parameter's dtype. Both run on the CPU, so the numbers do not depend on the
    device. Padding past the end of the full shape is zero. A meta tensor is left alone.

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
    target, starts = parameter.detach(), [0] * len(full_shape)
    if dim is not None:
        starts[dim] = min(group.rank * target.shape[dim], full_shape[dim])
        size = min(target.shape[dim], full_shape[dim] - starts[dim])
        target.narrow(dim, size, target.shape[dim] - size).zero_()
        target = target.narrow(dim, 0, size)
    fill_tile = _tile_init(init, full_shape) if target.is_floating_point() else None
    if getattr(init, "func", init) in CONSTANT:
        init(target)
    elif fill_tile is not None:
        seed = int(torch.randint(2**63 - 1, (), device="cpu"))
        _fill(target, full_shape, starts, fill_tile, seed)
    else:
        full = torch.empty(tuple(full_shape), dtype=target.dtype, device="cpu")
        made: object = init(full)
        if isinstance(made, Tensor) and made.data_ptr() != full.data_ptr():
            raise SpecError(
                f"init={getattr(init, '__name__', init)!r} returned another tensor; expected a "
                "function that fills the one it is given, such as torch.nn.init.normal_"
            )
        own = zip(starts, target.shape, strict=True)
        target.copy_(full[tuple(slice(start, start + size) for start, size in own)])


def _check_slice(
    parameter: Tensor, full_shape: Sequence[int], dim: int | None, group: GroupRef
) -> None:
    """Check that a parameter can be its rank's slice; the last ones may be padded."""
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


# -- tiles --------------------------------------------------------------------------------


def _tile_init(init: Init, full_shape: Sequence[int]) -> Callable[..., object] | None:
    """`init` as a function of any tile and `generator=`; None: it needs the full weight.

    xavier and kaiming go by the full shape's fans, so theirs is uniform_ or normal_.
    """
    given: dict[str, Any] = {}
    if isinstance(init, partial):
        if init.args:  # they would stand where the weight belongs
            return None
        given, init = init.keywords, init.func
    if given.get("generator") is not None:  # the caller's own, to be drawn from in one order
        return None
    if init in ELEMENT_WISE:
        return partial(init, **given)
    if init not in XAVIER + KAIMING:
        return None
    try:
        bound = inspect.signature(init).bind(None, **given)
        bound.apply_defaults()
        std = _std(full_shape, **bound.arguments)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None  # torch says what is wrong, when it is given the full weight
    if init in (nn.init.xavier_normal_, nn.init.kaiming_normal_):
        return partial(nn.init.normal_, std=std)
    return partial(nn.init.uniform_, a=-math.sqrt(3) * std, b=math.sqrt(3) * std)


def _std(
    shape: Sequence[int], gain: float | None = None, a: float = 0, mode: str = "",
    nonlinearity: str = "", **_: object,
) -> float:  # fmt: skip
    """The standard deviation of xavier, which has a gain, or kaiming."""
    outputs, inputs, *field = shape
    fans = {"fan_in": inputs * math.prod(field), "fan_out": outputs * math.prod(field)}
    if gain is not None:
        return gain * math.sqrt(2 / sum(fans.values()))
    return nn.init.calculate_gain(nonlinearity, a) / math.sqrt(fans[mode.lower()])  # type: ignore[arg-type]


def _fill(
    target: Tensor,
    full_shape: Sequence[int],
    starts: Sequence[int],
    fill_tile: Callable[..., object],
    seed: int,
) -> None:
    """Fill the part of a full tensor that begins at `starts`, tile by tile."""
    generator = torch.Generator(device="cpu")
    own, sides = (tuple(starts), tuple(target.shape)), tile_shape(full_shape)
    corners = (
        range(start - start % side, start + size, side)
        for start, size, side in zip(*own, sides, strict=True)
    )
    for corner in product(*corners):
        size = tuple(map(min, sides, map(sub, full_shape, corner)))  # the last ones are shorter
        tile = torch.empty(size, device="cpu", dtype=torch.float32)
        # torch's CPU generator keeps 32 bits of a seed: of 100,000 tiles about one pair is equal.
        fill_tile(tile, generator=generator.manual_seed(seed_of(f"{seed}/{list(corner)}")))
        both = common(own, (corner, size))
        if both is not None:  # there is, unless the slice is empty
            target[slices(both, starts)] = tile[slices(both, corner)]


def tile_shape(full_shape: Sequence[int]) -> list[int]:
    """Sides of a tile: up to 256 each, from the last dim on until it has 65,536 elements.

    Example:
        >>> tile_shape((8, 1024, 512)), tile_shape((64, 64, 3, 3))
        ([1, 256, 256], [64, 64, 3, 3])
    """
    sides, room = [], TILE * TILE
    for size in reversed(full_shape):
        sides.append(max(1, min(size, TILE, room)))
        room //= sides[-1]
    return sides[::-1]


# -- models -------------------------------------------------------------------------------


def initialize_parameters(model: nn.Module, seed: int) -> None:
    """Draw every parameter anew, the same full weights on any grid.

    Calls each module's `reset_parameters()`, or torch's own substitute in MultiheadAttention, with
    torch's random state seeded by `seed` and the module's name. Afterwards the state is restored.
    A model built on the meta device is drawn after `model.to_empty(device=…)`.

    Args:
        model: built on every rank with the same module names.
        seed: the same on every rank.

    Raises:
        SpecError: no module writes some parameter. It would keep its constructor's numbers, or
            after `to_empty` uninitialized memory.
    """
    before = {name: (p, version_of(p)) for name, p in model.named_parameters()}
    for name, module in model.named_modules():
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            with other_random_state(seed_of(f"{seed}/{name}")):
                reset()
    for name, module in model.named_modules():  # after their output layers, whose bias they zero
        if isinstance(module, nn.MultiheadAttention) and not hasattr(module, "reset_parameters"):
            with other_random_state(seed_of(f"{seed}/{name}")):
                _reset_attention(module)
    kept = []
    for name, p in model.named_parameters():
        old, version = before.get(name, (None, None))
        is_written = p is not old or version is None or version != version_of(p)
        if nn.parameter.is_lazy(p) or not (is_written or p.numel() == 0 or not has_numbers(p)):
            owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
            kept.append(f"{name} of {owner}")
    if kept:
        more = f" and {len(kept) - 3} more" if len(kept) > 3 else ""
        raise SpecError(
            f"initialize_parameters: no reset_parameters() writes {', '.join(kept[:3])}{more}; "
            "expected each parameter to be filled by its own module or an enclosing one. Give the "
            "module a reset_parameters() that fills it in place, not through .data"
        )


def _reset_attention(module: nn.MultiheadAttention) -> None:
    """Fill the parameters that torch's own constructor fills."""
    for name, parameter in module.named_parameters(recurse=False):
        if name == "in_proj_bias":
            nn.init.zeros_(parameter)
            nn.init.zeros_(module.out_proj.bias)
        elif name.startswith("bias_"):
            nn.init.xavier_normal_(parameter)
        else:
            nn.init.xavier_uniform_(parameter)


@contextmanager
def other_random_state(seed: int) -> Iterator[None]:
    """Seed torch's random state for the block, and restore it afterwards."""
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        torch.manual_seed(seed)
        yield


def seed_of(text: str) -> int:
    """A 63-bit seed from the text's hash."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
