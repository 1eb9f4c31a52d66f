"""Region: one factorisation of a grid's ranks into axes, with its sizes and their order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from commgrid.errors import SpecError
from commgrid.layout.axis_names import nearest
from commgrid.layout.ranks import as_index, divisors
from commgrid.planning.yaml_keys import DEFAULT_ORDER, REGION_OPTIONS, refuse_unknown

AXES = {
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "expert parallel; above 1 it makes the expert region",
    "dp_shard": "HSDP's shards",
    "dp_replicate": "HSDP's replicas; stands in for dp together with dp_shard",
    "dp": "data parallel; the rest of the ranks, unless given",
    "pp": "pipeline parallel",
    "etp": "expert tensor parallel (default: tp)",
    "edp": "copies of experts, which fill the expert region",
}
"""The axes commgrid knows, in Megatron's default order; the expert-only ones last."""
OF_EXPERTS = ("ep", "etp", "edp")
"""Axes of the expert region, which has the dense one's ranks."""
STANDARD = tuple(axis for axis in AXES if axis not in OF_EXPERTS or axis == "ep")
"""Megatron's default order, with the parts that may stand in for dp."""
SIZED = tuple(axis for axis in AXES if axis != "edp")
"""Axes whose sizes a user gives."""
HSDP = ("dp_replicate", "dp_shard")
"""The two parts of dp, slower one first, where it has two."""

MOST_AXES = 16
"""Limit for one region: n axes make 2**n - 1 group names."""

Size = int | str


@dataclass(frozen=True)
class Region:
    """Axes that together factor the grid's ranks, fastest-varying first.

    Args:
        name: `dense`, `expert`, or the spec's own.
        sizes: axis and size: a number, -1 to be filled by `resolve`, or the name of a dense axis
            whose size is used.
        inherited: axis and the dense axis its size came from, for messages.
    """

    name: str
    sizes: tuple[tuple[str, Size], ...]
    inherited: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        """A line of a table.

        >>> print(Region("expert", (("ep", 4), ("edp", -1), ("pp", "pp"))))
        expert  ep 4 · edp -1 · pp as pp   (fastest first)
        """
        axes = " · ".join(f"{axis} {'as ' * isinstance(n, str)}{n}" for axis, n in self.sizes)
        return f"{self.name:7} {axes}   (fastest first)"

    @cached_property
    def axes(self) -> tuple[str, ...]:
        return tuple(axis for axis, _ in self.sizes)

    @cached_property
    def numbers(self) -> tuple[tuple[str, int], ...]:
        """Axis and size, with -1 for every size that is not known yet."""
        return tuple((axis, size if isinstance(size, int) else -1) for axis, size in self.sizes)

    @cached_property
    def is_resolved(self) -> bool:
        return all(size > 0 for _, size in self.numbers)

    @cached_property
    def product(self) -> int:
        return math.prod(size for _, size in self.numbers)

    def resolve(self, count: int, dense: Mapping[str, int]) -> Region:
        """The region over `count` ranks, its -1 filled and its borrowed sizes looked up.

        Raises:
            SpecError: the sizes do not make `count`; the message has the nearest ones that do.
        """
        borrowed = tuple((axis, size) for axis, size in self.sizes if isinstance(size, str))
        inherited = self.inherited + borrowed
        sizes = {axis: dense[s] if isinstance(s, str) else s for axis, s in self.sizes}
        known = math.prod(size for size in sizes.values() if size > 0)
        filled = next((axis for axis, size in sizes.items() if size < 0), None)
        if count % known if filled else count != known:
            raise SpecError(_misfit(self.name, sizes, dict(inherited), count, filled))
        if filled:
            sizes[filled] = count // known
        return Region(self.name, tuple(sizes.items()), inherited)


def _misfit(
    name: str, sizes: dict[str, int], inherited: dict[str, str], count: int, filled: str | None
) -> str:
    """Why the sizes do not make `count`: the equation, the remainder, and what would fit."""
    fixed = {axis: size for axis, size in sizes.items() if size > 0}
    known = math.prod(fixed.values())
    terms = " · ".join(
        f"{axis}={size}" + (f" (inherited from {inherited[axis]})" if axis in inherited else "")
        for axis, size in fixed.items()
    )
    where = "axes" if name == "dense" else f"region {name}"
    text = f"{where}: {terms} = {known} "
    if filled:
        text += f"does not divide {count} ranks, so {filled}=-1 cannot be filled"
    else:
        text += f"is not the {count} ranks there are"
    text += f"; {count} = {count // known}·{known} + {count % known}"
    fits = []
    for axis, size in fixed.items():
        rest = known // size
        if filled:
            good = divisors(count // rest) if count % rest == 0 else []
        else:
            good = [count // rest] if count % rest == 0 else []
        below = [s for s in good if s < size][-1:]
        above = [s for s in good if s > size][:1]
        fits += [f"{inherited.get(axis, axis)}={s}" for s in below + above]
    ranks = sorted({max(1, count // known) * known, -(-count // known) * known})
    fits.append(f"{' or '.join(map(str, ranks if filled else [known]))} ranks")
    return f"{text}; nearest that fit: {', or '.join(fits)}"


def check_size(key: str, value: object, names: Iterable[str] = ()) -> Size:
    """The size itself, if it is one: a positive integer, -1, or one of `names`.

    An integer is anything with `__index__`, such as NumPy's.
    """
    number = as_index(value)
    if number is not None and (number > 0 or number == -1):
        return number
    if isinstance(value, str) and value in names:
        return value
    also = f", or one of {', '.join(names)}" if names else ""
    hint = ""
    if isinstance(value, float | str) and not isinstance(value, bool):
        digits = str(value).removesuffix(".0")
        hint = f"; write {digits}" if digits.isdecimal() and digits.strip("0") else ""
    raise SpecError(f"{key}={value!r}: expected a positive integer, or -1 to fill it{also}{hint}")


def parse_order(key: str, order: object, known: Iterable[str]) -> list[str]:
    """The axes of an order string such as `tp-cp-ep-dp-pp`, fastest-varying first.

    Raises:
        SpecError: not such a string, or an axis that is unknown or doubled.
    """
    example = "expected axes fastest first, dash-joined, such as tp-cp-ep-dp-pp"
    if not isinstance(order, str) or not order:
        raise SpecError(f"{key}={order!r}: {example}")
    axes, known = order.split("-"), list(known)
    for axis in axes:
        if axes.count(axis) > 1:
            raise SpecError(f"{key}={order!r}: axis {axis!r} is there twice; name it once")
        if axis not in known:
            raise SpecError(
                f"{key}={order!r}: unknown axis {axis!r}, the axes are "
                f"{', '.join(map(str, known))}{nearest(axis, map(str, known))}"
            )
    return axes


def make_region(
    name: str,
    sizes: Mapping[Any, object],
    order: Sequence[str] | None,
    *,
    prefix: str,
    order_key: str = "order",
    dense: Sequence[str] = (),
) -> Region:
    """Check the sizes, put the axes in order, and return the region.

    Args:
        sizes: axis to size, as given.
        order: axes fastest first; axes of size 1 may be missing. None: Megatron's order.
        prefix: what the sizes' keys begin with in messages (`axes.`).
        dense: axes whose name may stand for a size.

    Raises:
        SpecError: a name that is no identifier, an invalid size, two -1, too many axes, dp beside
            its parts, or an axis of a size other than 1 that order does not have.
    """
    checked: dict[str, Size] = {}
    for axis, size in sizes.items():
        if not isinstance(axis, str) or not axis.isidentifier():
            raise SpecError(f"{prefix}{axis}: an axis needs a name of letters, digits and _")
        checked[axis] = check_size(f"{prefix}{axis}", size, dense)
    if name == "dense":
        checked = _stand_in_for_dp(checked, prefix, order)
        if order is not None and {"dp", *HSDP} <= {*order} and "dp" not in checked:
            raise SpecError(
                f"{order_key}={'-'.join(order)!r}: dp stands for dp_shard and dp_replicate, which "
                "it has as well; leave dp out"
            )
    filled = [axis for axis, size in checked.items() if size == -1]
    if len(filled) > 1:
        both = " and ".join(f"{prefix}{axis}=-1" for axis in filled)
        raise SpecError(f"{both}: only one size can be filled; give numbers for the others")
    if len(checked) > MOST_AXES:
        raise SpecError(
            f"{prefix.rstrip('.') or 'axes'}: {len(checked)} axes, of which every combination has "
            f"a name; expected at most {MOST_AXES}"
        )
    places = _place(list(order) if order is not None else [], checked)
    for axis in places:
        if order is None and axis not in STANDARD:
            meant = nearest(axis, STANDARD)
            raise SpecError(f"{order_key}: missing; needed to place axis {axis!r}{meant}")
        if order is not None and checked[axis] != 1 and axis not in _expand(order, checked):
            given = "-".join(order)
            raise SpecError(
                f"{order_key}={given!r}: axis {axis!r} is missing, its size is {checked[axis]}; "
                f"add it, or give {prefix}{axis}=1"
            )
    return Region(name, tuple((axis, checked[axis]) for axis in places))


def _expand(order: Iterable[str], sizes: Mapping[str, Size]) -> list[str]:
    """The order with dp replaced by the parts that stand in for it, the shard fastest."""
    parts = [a for a in ("dp_shard", "dp_replicate") if a in sizes and a not in list(order)]
    return [a for axis in order for a in (parts if axis == "dp" and parts else [axis])]


def _place(order: list[str], sizes: Mapping[str, Size]) -> list[str]:
    """All axes in order; a missing one goes after the axes that precede it in Megatron's order."""
    places = _expand(order, sizes)
    for axis in [*STANDARD, *(a for a in sizes if a not in STANDARD)]:
        if axis in sizes and axis not in places:
            before = STANDARD[: STANDARD.index(axis)] if axis in STANDARD else tuple(places)
            places.insert(
                max((places.index(b) + 1 for b in before if b in places), default=0), axis
            )
    return places


def _stand_in_for_dp(
    sizes: dict[str, Size], prefix: str, order: Sequence[str] | None
) -> dict[str, Size]:
    """Sizes in which dp_replicate and dp_shard, where one is given, replace dp.

    If only one is given, the other is filled if the order has a place for it, else 1.
    """
    shard, replicate = sizes.get("dp_shard"), sizes.get("dp_replicate")
    if shard is None and replicate is None:
        return sizes
    whole = sizes.pop("dp", -1)
    has_place = order is None or "dp" in order or {*HSDP} <= {*order}
    other = -1 if has_place and -1 not in (shard, replicate) else 1
    parts: dict[str, Size] = {
        "dp_shard": other if shard is None else shard,
        "dp_replicate": other if replicate is None else replicate,
    }
    if isinstance(whole, int) and whole != -1:
        known = math.prod(s for s in parts.values() if isinstance(s, int) and s > 0)
        if whole % known or (-1 not in parts.values() and known != whole):
            given = " · ".join(f"{prefix}{axis}={size}" for axis, size in parts.items())
            raise SpecError(f"{given} does not make {prefix}dp={whole}; leave dp out, or fix one")
        parts = {a: whole // known if s == -1 else s for a, s in parts.items()}
    return {**sizes, **parts}


def expert_region(
    dense: Region, order: Sequence[str], ep: object, etp: object, prefix: str
) -> Region:
    """Megatron's expert region: tp becomes etp, dp becomes edp, the rest but pp folds into edp.

    Args:
        order: axes fastest first, with the place of ep.
        prefix: see `make_region`.

    Raises:
        SpecError: a size that is none or open, or an argument's order without ep.
    """
    inherited = "tp" if "tp" in dense.axes else 1
    sizes: dict[str, object] = {"etp": inherited if etp is None else etp, "ep": ep, "edp": -1}
    if "pp" in dense.axes:
        sizes["pp"] = "pp"
    check_size(f"{prefix}ep", ep)
    if etp is not None:
        check_size(f"{prefix}etp", etp)
    if "ep" not in order and ep != 1 and not prefix:  # a file's order may leave it out
        raise SpecError(
            f"order={'-'.join(order)!r}: axis 'ep' is missing, its size is {ep}; add it, as in "
            f"{DEFAULT_ORDER}"
        )
    if ep == -1 or etp == -1:
        raise SpecError(
            f"ep={ep}, etp={etp}: -1 cannot be filled here, edp already fills the expert region; "
            "give numbers"
        )
    renamed = {"tp": "etp", "dp": "edp", "dp_shard": "edp", "dp_replicate": "edp"}
    axes: list[str] = []
    for axis in _place(
        [a for a in order if a in (*STANDARD, *dense.axes)], {**dict(dense.sizes), "ep": 1}
    ):
        name = renamed.get(axis, axis)
        if name in sizes and name not in axes:
            axes.append(name)
    if "edp" not in axes:  # the dense region has no dp axis
        axes.insert(axes.index("pp") if "pp" in axes else len(axes), "edp")
    if "etp" not in axes:
        axes.insert(0, "etp")
    made = make_region("expert", sizes, axes, prefix="", dense=("tp", "pp"))
    return Region(made.name, made.sizes, (("etp", "tp"),) if sizes["etp"] == "tp" else ())


def without_experts(
    sizes: object, regions: Mapping[Any, Any], prefix: str
) -> tuple[object, tuple[object, object] | None]:
    """Split ep and etp, which make Megatron's expert region, off the dense axes.

    Args:
        regions: the other regions, as given.
        prefix: see `make_region`.

    Raises:
        SpecError: a region `expert` is given as well.
    """
    if not isinstance(sizes, Mapping) or not {"ep", "etp"} & set(sizes):
        return sizes, None
    key = "ep" if "ep" in sizes else "etp"
    if "expert" in regions:
        raise SpecError(
            f"{prefix}{key}={sizes[key]!r}: the region expert is given as well; give {key} there"
        )
    rest = {axis: size for axis, size in sizes.items() if axis not in ("ep", "etp")}
    ep, etp = check_size(f"{prefix}ep", sizes.get("ep", 1)), sizes.get("etp")
    experts = None if ep == 1 and etp is None else (ep, etp)
    return rest or {"dp": -1}, experts


def dense_from(sizes: object, order: object, prefix: str) -> Region:
    """The dense region of a mapping of sizes; any of Megatron's axes implies all of them."""
    if not isinstance(sizes, Mapping) or not sizes:
        raise SpecError(f"axes={sizes!r}: expected a mapping of axis names to sizes")
    given = dict(sizes)
    if set(given) & set(STANDARD):
        listed = order.split("-") if isinstance(order, str) else ["dp"]
        if not set(given) & {"dp", "dp_shard", "dp_replicate"}:
            given["dp"] = -1 if "dp" in listed and -1 not in given.values() else 1
        given = {"tp": 1, "cp": 1, **given, **({} if "pp" in given else {"pp": 1})}
    axes = (
        None if order is None
        else parse_order("order", order, list(dict.fromkeys([*given, "dp", "ep"])))
    )  # fmt: skip
    if axes is not None and "ep" not in given:
        axes = [axis for axis in axes if axis != "ep"]  # it only places the expert region
    return make_region("dense", given, axes, prefix=prefix)


def region_from(name: object, entry: object, dense: tuple[str, ...]) -> Region:
    """Build a region other than the dense one from its entry under `regions`."""
    where = f"regions.{name}"
    if name == "dense":
        raise SpecError(f"{where}: the dense region is given by `axes`; choose another name")
    if not isinstance(name, str) or not name.isidentifier():
        raise SpecError(f"{where}: a region needs a name of letters, digits and _")
    if not isinstance(entry, Mapping):
        raise SpecError(f"{where}={entry!r}: expected a mapping of axes and order")
    refuse_unknown(f"{where}.", entry, REGION_OPTIONS)
    sizes, order = entry.get("axes"), entry.get("order")
    if not isinstance(sizes, Mapping) or not sizes:
        raise SpecError(f"{where}.axes={sizes!r}: expected a mapping of axis names to sizes")
    key = f"{where}.order"
    axes = list(sizes) if order is None else parse_order(key, order, sizes)
    return make_region(name, sizes, axes, prefix=f"{where}.axes.", order_key=key, dense=dense)
