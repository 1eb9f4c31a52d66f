"""Random numbers by their place: element i of a tensor is a function of a seed and of i alone.

Three steps make them.

- Elements 2j and 2j + 1 share 64 bits: the output function of SplitMix (Steele, Lea and Flood,
  "Fast splittable pseudorandom number generators", OOPSLA 2014, with the constants of its
  reference implementation) of start + j · step, where start and the odd step come from the seed.
- Each uniform number is one half of these bits.
- Normal numbers are a pair by Box and Muller (Annals of Mathematical Statistics 29, 1958): the
  radius √(-2 ln u) times cosine and sine of a random angle, each function a polynomial.

All of it is integer arithmetic, +, × and ÷, one operation at a time, each of which IEEE 754 rounds
in one way only. That is why a CPU and a GPU, any chunk and any width of vectors agree in every
bit. Libraries' log and cos promise no such thing, and torch's √ on a CPU, which may be MKL's, is
one bit off for one number in 100.

Numbers are computed in fp32, and for fp64 tensors in fp64 with 53 random bits instead of 32. The
leading bits are the same, so a model in fp32 starts from the weights of its fp64 self, in units of
the standard deviation within 1e-6 but for one in 5,000, which is near zero, and that within 4e-4.
Normal numbers end at 6.7 standard deviations in fp32 and at 8.6 in fp64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
LAST_SHIFT = 31
WORD = 2**64 - 1


@dataclass(frozen=True)
class Uniform:
    """Evenly between two numbers, which rounding may reach."""

    low: float
    high: float


@dataclass(frozen=True)
class Normal:
    """Normal numbers; one outside `low` to `high` is drawn again until it is not."""

    mean: float
    std: float
    low: float = -math.inf
    high: float = math.inf

    @property
    def is_cut(self) -> bool:
        """Whether any number can lie outside."""
        reach = 9 * self.std
        return self.low > self.mean - reach or self.high < self.mean + reach


Law = Uniform | Normal


@dataclass(frozen=True)
class Format:
    """How numbers are computed in one precision.

    The polynomials interpolate at Chebyshev's nodes; their relative errors are below the rounding.

    Args:
        real, word: dtypes of floats and integers of one width.
        fraction: bits of a float's fraction.
        root_half: the bits of 2³¹ √½.
        guess: to be added to half of a number's bits for those of its root, within 4 %.
        steps: by Heron's rule from there to the last bit.
        log: -2 ln((1 + s) / (1 - s)) / s for s² up to 0.03, by powers of s².
        sine: sin(πx/2) / x by powers of x², for x² up to 1.
        cosine: cos(πx/2) / (x² - 1), likewise.
    """

    real: torch.dtype
    word: torch.dtype
    fraction: int
    root_half: int
    guess: int
    steps: int
    log: tuple[float, ...]
    sine: tuple[float, ...]
    cosine: tuple[float, ...]


SINGLE = Format(
    torch.float32, torch.int32, 23, 0x4EB504F3, 0x1FBD1DF5, 3,
    (-4.0, -1.333336353302002, -0.7994970083236694, -0.5984877943992615),
    (1.5707963705062866, -0.6459637880325317, 0.07968991994857788, -0.004674143623560667,
     0.00015167170204222202),
    (-1.0, 0.23370049893856049, -0.019968606531620026, 0.0008935354999266565,
     -2.3600689019076526e-05),
)  # fmt: skip
DOUBLE = Format(
    torch.float64, torch.int64, 52, 0x41D6A09E667F3BCD, 0x1FF7A3BEA91D9B1B, 4,
    (-4.0, -1.333333333333353, -0.7999999999860468, -0.5714285752128336, -0.44444394113452096,
     -0.36367263360458657, -0.3062505629672838, -0.2961942072131055),
    (1.5707963267948966, -0.6459640975062462, 0.07969262624616565, -0.004681754135304255,
     0.0001604411847130916, -3.5988430204672576e-06, 5.6921364280986254e-08,
     -6.684416831856085e-10, 5.87297574479995e-12),
    (-1.0, 0.23370055013616983, -0.019968957764878077, 0.0008945229984736444,
     -2.473727635883673e-05, 4.647659915952978e-07, -6.321440904258357e-09,
     6.510529156797684e-11, -5.10846968542241e-13),
)  # fmt: skip


class PairMaker:
    """Makes the numbers of pairs of elements, in memory that it keeps.

    Args:
        most: how many pairs at once.
        wide: in fp64 instead of fp32.
        device: where.
    """

    def __init__(self, most: int, wide: bool, device: torch.device) -> None:
        self.wide, self.format = wide, DOUBLE if wide else SINGLE
        self._hashed, self._more, self._spare = (
            torch.empty(size, dtype=torch.int64, device=device)
            for size in (most, wide * most, most)
        )
        self._floats = [torch.empty(most, dtype=self.format.real, device=device) for _ in range(6)]
        self._out = torch.empty(2 * most, dtype=self.format.real, device=device)
        self._tables: dict[int, Tensor] = {}

    def make(self, rows: Tensor, count: int, law: Law, seed: int) -> Tensor:
        """Both numbers of pairs p … p + count - 1 for every p of `rows`, in order.

        Args:
            rows: (rows, 1), int64.
            count: how many pairs each row has.
            law: their distribution; what is cut off a normal one is not, here.
            seed: of the tensor.

        Returns:
            (2 · rows · count,), overwritten by the next call.
        """
        bits = self._bits(self._hashed, rows, count, seed)
        more = self._bits(self._more, rows, count, ~seed) if self.wide else None
        if isinstance(law, Uniform):
            return self._uniform(bits, more, law)
        return self._normal(bits, more, law)

    def _bits(self, into: Tensor, rows: Tensor, count: int, seed: int) -> Tensor:
        """SplitMix's output function of start + pair · step."""
        start, step = stream(seed)
        size = rows.numel() * count
        z, spare = into[:size], self._spare[:size]
        firsts = (rows * step).add_(start)
        if count == 1:
            z.copy_(firsts.view(-1))
        else:
            torch.add(firsts, self._multiples(step)[:count], out=z.view(-1, count))
        for shift, factor in MIX:
            _xor_shifted_(z, shift, spare).mul_(signed(factor))
        return _xor_shifted_(z, LAST_SHIFT, spare)

    def _multiples(self, step: int) -> Tensor:
        if step not in self._tables:
            every = torch.arange(len(self._spare), dtype=torch.int64, device=self._spare.device)
            self._tables[step] = every.mul_(step)
        return self._tables[step]

    def _uniform(self, bits: Tensor, more: Tensor | None, law: Uniform) -> Tensor:
        out = self._out[: 2 * len(bits)]
        halves = bits.view(torch.int32)  # the lower one first, in the byte order of x86, ARM, CUDA
        if more is not None:
            out.copy_(_joined(halves.long(), more.view(torch.int32).long()))
        else:
            out.copy_(halves)
        out.mul_((law.high - law.low) * 2.0 ** (-53 if self.wide else -32))
        middle = (law.low + law.high) / 2
        return out.add_(middle) if middle else out

    def _normal(self, bits: Tensor, more: Tensor | None, law: Normal) -> Tensor:
        out = self._out[: 2 * len(bits)]
        cosine, sine, lower = self._half_circle(bits, more)
        cosine.copysign_(lower)  # which turns half of the points to the other side
        radius = self._radius(lower.abs_()).mul_(law.std)
        pairs = torch.view_as_complex(out.view(-1, 2))
        torch.complex(cosine.mul_(radius), sine.mul_(radius), out=pairs)
        return out.add_(law.mean) if law.mean else out

    def _half_circle(self, bits: Tensor, more: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Cosine and sine of an angle from -π/2 to π/2, and a number from -2³¹ to 2³¹.

        They come from the upper and the lower half of the bits.
        """
        x, square, sine, lower = (buffer[: len(bits)] for buffer in self._floats[:4])
        if more is None:
            ints = self._spare.view(torch.int32)[: len(bits)]
            x.copy_(ints.copy_(bits.view(torch.int32)[1::2])).mul_(2.0**-31)
            lower.copy_(ints.copy_(bits)).add_(0.5)
        else:
            x.copy_(_joined(bits >> 32, more >> 32)).add_(0.5).mul_(2.0**-52)
            lower.copy_(_joined(bits.to(torch.int32).long(), more)).add_(0.5).mul_(2.0**-21)
        torch.mul(x, x, out=square)
        _polynomial(self.format.sine, square, out=sine).mul_(x)
        cosine = _polynomial(self.format.cosine, square, out=x).mul_(square.sub_(1))
        return cosine, sine, lower

    def _radius(self, u: Tensor) -> Tensor:
        """√(-2 ln (u / 2³¹)) of u above 0 and up to 2³¹.

        With u = 2³¹ 2ᵉ f and f from √½ to √2, the logarithm is e ln 2 + ln f, and ln f a series in
        s = (f - 1) / (f + 1). Its root is the mean of a guess and what goes with it, a few times.
        """
        other, log, s = (self._floats[index][: len(u)] for index in (1, 4, 5))
        e = self._spare.view(self.format.word)[: len(u)]
        parts = u.view(self.format.word)
        torch.sub(parts, self.format.root_half, out=e).bitwise_and_(-1 << self.format.fraction)
        f = parts.sub_(e).view(self.format.real)  # 2³¹ times what it is above
        torch.sub(f, 2.0**31, out=s).div_(f.add_(2.0**31))
        torch.mul(s, s, out=other)
        _polynomial(self.format.log, other, out=log).mul_(s)
        u.copy_(e).mul_(-2 * math.log(2) * 2.0**-self.format.fraction)
        log.add_(u).abs_()  # for -0 has other bits than 0
        root = torch.bitwise_right_shift(log.view(self.format.word), 1, out=e)
        root = root.add_(self.format.guess).view(self.format.real)
        for _ in range(self.format.steps):
            root.add_(torch.div(log, root, out=other)).mul_(0.5)
        return root


def _joined(leading: Tensor, more: Tensor) -> Tensor:
    """The leading bits, and 21 more behind them."""
    return (leading << 21).bitwise_or_(more & (2**21 - 1))


def _xor_shifted_(z: Tensor, shift: int, spare: Tensor) -> Tensor:
    """z ^ (z >> shift), where zeros move in."""
    torch.bitwise_right_shift(z, shift, out=spare)
    return z.bitwise_xor_(spare.bitwise_and_(2 ** (64 - shift) - 1))


def _polynomial(factors: tuple[float, ...], x: Tensor, out: Tensor) -> Tensor:
    """By Horner's rule, in operations of their own: one that fuses × and + rounds otherwise."""
    torch.mul(x, factors[-1], out=out)
    for factor in factors[-2:0:-1]:
        out.add_(factor).mul_(x)
    return out.add_(factors[0])


# -- seeds --------------------------------------------------------------------------------


def stream(seed: int) -> tuple[int, int]:
    """Start and odd step of a seed's sequence, as int64."""
    start, step = mixed(seed + GOLDEN), mixed(seed + 2 * GOLDEN) | 1
    if (step ^ (step >> 1)).bit_count() < 24:  # too regular, as the paper says
        step ^= 0xAAAAAAAAAAAAAAAA
    return signed(start), signed(step)


def mixed(z: int) -> int:
    """SplitMix's output function of 64 bits."""
    z &= WORD
    for shift, factor in MIX:
        z = (z ^ (z >> shift)) * factor & WORD
    return z ^ (z >> LAST_SHIFT)


def signed(word: int) -> int:
    """The int64 of the same bits."""
    return word - 2**64 if word >> 63 else word
