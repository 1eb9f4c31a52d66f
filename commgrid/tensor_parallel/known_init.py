"""What torch's own `init` functions fill a weight with, said without filling it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from commgrid.tensor_parallel.counter_rng import Law, Normal, Uniform

Init = Callable[[Tensor], object]
"""Fills a full weight in place from torch's global random state.

`nn.init`'s normal_, trunc_normal_, uniform_, xavier_*_, kaiming_*_, zeros_, ones_ and constant_,
bare or as `functools.partial` with keywords, are known: a rank makes its own slice, and nothing
else. Any other gets the full weight on the CPU, on every rank, which for large ones takes as
long and as much memory as if the layer were not sharded.
"""


@dataclass(frozen=True)
class Constant:
    """One number everywhere."""

    value: float


def law_of(init: Init, shape: Sequence[int]) -> Law | Constant | None:
    """How the numbers that `init` draws are distributed.

    Args:
        init: as a layer is given it.
        shape: of the full weight.

    Returns:
        None where it is not one that is known, or torch would refuse what it is given.

    Example:
        >>> law_of(partial(nn.init.normal_, std=0.02), (4, 4))
        Normal(mean=0.0, std=0.02, low=-inf, high=inf)
        >>> law_of(lambda weight: weight.fill_(1), (4, 4)) is None
        True
    """
    given: dict[str, Any] = {}
    if isinstance(init, partial):
        if init.args:  # they would stand where the weight belongs
            return None
        given, init = init.keywords, init.func
    for known, law in KNOWN:
        if init is known:
            try:
                bound = inspect.signature(known).bind(None, **given)
                bound.apply_defaults()
                named = dict(bound.arguments)
                del named["tensor"]
                # A generator of the caller's own is to be drawn from.
                return law(shape, **named) if named.pop("generator", None) is None else None
            except (TypeError, ValueError, ZeroDivisionError):
                return None
    return None


# -- the known ones: each as nn.init says it -------------------------------------------------


def _uniform(shape: Sequence[int], a: float, b: float) -> Uniform | None:
    low, high = float(a), float(b)
    return Uniform(low, high) if low <= high and math.isfinite(high - low) else None


def _normal(shape: Sequence[int], mean: float, std: float) -> Normal | None:
    mean, std = float(mean), float(std)
    return Normal(mean, std) if 0 <= std < math.inf and math.isfinite(mean) else None


def _trunc_normal(
    shape: Sequence[int], mean: float, std: float, a: float, b: float
) -> Normal | None:
    """None where less than a quarter is kept: too much would be drawn again."""
    mean, std, low, high = float(mean), float(std), float(a), float(b)
    below, above = (math.erf((end - mean) / (std * math.sqrt(2))) / 2 for end in (low, high))
    return Normal(mean, std, low, high) if std > 0 and above - below > 0.25 else None


def _xavier_uniform(shape: Sequence[int], gain: float) -> Uniform | None:
    return _evenly(_xavier(shape, gain))


def _xavier_normal(shape: Sequence[int], gain: float) -> Normal | None:
    return _normal(shape, 0, _xavier(shape, gain))


def _kaiming_uniform(
    shape: Sequence[int], a: float, mode: str, nonlinearity: str
) -> Uniform | None:
    return _evenly(_kaiming(shape, a, mode, nonlinearity))


def _kaiming_normal(shape: Sequence[int], a: float, mode: str, nonlinearity: str) -> Normal | None:
    return _normal(shape, 0, _kaiming(shape, a, mode, nonlinearity))


def _constant(shape: Sequence[int], val: float) -> Constant:
    return Constant(float(val))


def _evenly(std: float) -> Uniform | None:
    return _uniform((), -math.sqrt(3) * std, math.sqrt(3) * std)


def _xavier(shape: Sequence[int], gain: float) -> float:
    return float(gain) * math.sqrt(2 / float(sum(_fans(shape))))


def _kaiming(shape: Sequence[int], a: float, mode: str, nonlinearity: str) -> float:
    fan = _fans(shape)[("fan_in", "fan_out").index(mode.lower())]
    gain = nn.init.calculate_gain(nonlinearity, a)  # type: ignore[arg-type]
    return gain / math.sqrt(fan)


def _fans(shape: Sequence[int]) -> tuple[int, int]:
    """How many inputs and outputs a weight has."""
    outputs, inputs, *field = shape
    return inputs * math.prod(field), outputs * math.prod(field)


KNOWN: tuple[tuple[Callable[..., Tensor], Callable[..., Law | Constant | None]], ...] = (
    (nn.init.normal_, _normal),
    (nn.init.uniform_, _uniform),
    (nn.init.trunc_normal_, _trunc_normal),
    (nn.init.xavier_uniform_, _xavier_uniform),
    (nn.init.xavier_normal_, _xavier_normal),
    (nn.init.kaiming_uniform_, _kaiming_uniform),
    (nn.init.kaiming_normal_, _kaiming_normal),
    (nn.init.constant_, _constant),
    (nn.init.zeros_, lambda shape: Constant(0)),
    (nn.init.ones_, lambda shape: Constant(1)),
)
