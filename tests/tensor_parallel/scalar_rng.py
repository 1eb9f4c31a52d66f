"""The numbers of counter_rng, one at a time in Python's own integers and floats."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from functools import partial

GOLDEN, WORD = 0x9E3779B97F4A7C15, 2**64 - 1


def splitmix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & WORD
    return z ^ (z >> 31)


def word(seed: int, pair: int) -> int:
    start = splitmix((seed + GOLDEN) & WORD)
    step = splitmix((seed + 2 * GOLDEN) & WORD) | 1
    if bin(step ^ (step >> 1)).count("1") < 24:
        step ^= 0xAAAAAAAAAAAAAAAA
    return splitmix((start + pair * step) & WORD)


def signed(half: int) -> int:
    return half - 2**32 if half >= 2**31 else half


def halves(seed: int, pair: int, wide: bool) -> tuple[int, int]:
    """Lower and upper random integer of a pair: 32 bits, or 53."""
    bits, more = word(seed, pair), word(~seed & WORD, pair)
    lower, upper = signed(bits & 0xFFFFFFFF), signed(bits >> 32)
    if not wide:
        return lower, upper
    return (lower << 21) + (more & 0x1FFFFF), (upper << 21) + (more >> 32 & 0x1FFFFF)


def single(x: float) -> float:
    """Rounded to fp32; of +, -, × and ÷ in fp64 the same as if done in fp32."""
    found: float = struct.unpack("<f", struct.pack("<f", x))[0]
    return found


def uniform(seed: int, place: int, low: float, high: float, wide: bool) -> float:
    """The element at a place of a uniform tensor."""
    to = float if wide else single
    number = to(halves(seed, place // 2, wide)[place % 2])
    number = to(number * to((high - low) * 2.0 ** (-53 if wide else -32)))
    return to(number + to((low + high) / 2))


def normal(
    seed: int,
    place: int,
    mean: float,
    std: float,
    wide: bool,
    tables: tuple[tuple[float, ...], ...],
) -> float:
    """The element at a place of a normal tensor, by the polynomials given."""
    to = float if wide else single
    lower, upper = halves(seed, place // 2, wide)
    if wide:
        x, lower_number = (upper + 0.5) * 2.0**-52, (lower + 0.5) * 2.0**-21
    else:
        x, lower_number = to(upper) * 2.0**-31, to(to(lower) + 0.5)
    log, sine, cosine = (partial(polynomial, table, to) for table in tables)
    square = to(x * x)
    if place % 2:
        direction = to(sine(square) * x)
    else:
        direction = math.copysign(to(cosine(square) * to(square - 1)), lower_number)
    fraction, exponent = math.frexp(abs(lower_number) * 2.0**-31)
    if fraction < to(math.sqrt(0.5)):
        fraction, exponent = 2 * fraction, exponent - 1
    s = to(to(fraction - 1) / to(fraction + 1))
    # In its own operations: -2 ln 2 is kept with the exponent's place in a float.
    both = to(to(log(to(s * s)) * s) + to(exponent * to(-2 * math.log(2))))
    radius = to(root(both, wide) * to(std))
    value = to(direction * radius)
    return to(value + to(mean)) if mean else value


def root(x: float, wide: bool) -> float:
    """Heron's rule from half of the bits."""
    to, code, guess = (float, "d", 0x1FF7A3BEA91D9B1B) if wide else (single, "f", 0x1FBD1DF5)
    whole = "q" if wide else "i"
    (bits,) = struct.unpack(whole, struct.pack(code, abs(x)))
    (y,) = struct.unpack(code, struct.pack(whole, (bits >> 1) + guess))
    for _ in range(4 if wide else 3):
        y = to(to(y + to(x / y)) * 0.5)
    return y


def polynomial(table: tuple[float, ...], to: Callable[[float], float], x: float) -> float:
    value = to(x * to(table[-1]))
    for factor in table[-2:0:-1]:
        value = to(to(value + to(factor)) * x)
    return to(value + to(table[0]))


def exact(seed: int, place: int) -> float:
    """A standard normal number of the 53-bit integers, by the C library."""
    lower, upper = halves(seed, place // 2, True)
    angle = math.pi / 2 * ((upper + 0.5) * 2.0**-52)
    u = abs((lower + 0.5) * 2.0**-52)
    radius = math.sqrt(-2 * math.log(u) if u < 0.7 else -2 * math.log1p(u - 1))
    if place % 2:
        return radius * math.sin(angle)
    return math.copysign(radius * math.cos(angle), lower + 0.5)
