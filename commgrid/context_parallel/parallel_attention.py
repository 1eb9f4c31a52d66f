"""Attention over a sequence whose positions lie on the ranks of a group: one call, four ways.

| way | Megatron's | talks | suits |
|---|---|---|---|
| `ring` | `p2p` | keys and values, step by step beside compute | long shards; memory flat in cp |
| `allgather` | `all_gather` | keys and values, all at once | short shards, few heads of keys |
| `ulysses` | `a2a` | an all-to-all, heads for positions | as many heads as ranks or more |
| `2d` | `a2a+p2p` | Ulysses inside, ring across | more ranks than heads, several nodes |
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from commgrid.collectives.group_ref import GroupRef
from commgrid.collectives.plain import Group, resolve
from commgrid.context_parallel.agreement import agree, connect, named_peers
from commgrid.context_parallel.balance import Mask
from commgrid.context_parallel.choice import choose, way_named
from commgrid.context_parallel.heads import two_level_attention, two_levels
from commgrid.context_parallel.kernels import no_autocast, readable
from commgrid.context_parallel.plans import heads_complaint
from commgrid.context_parallel.sharding import SequenceSharding
from commgrid.errors import CommGridError, ShapeError, SpecError, UnknownGroupError
from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.registry import get_grid


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sharding: SequenceSharding,
    group: Group = "cp",
    way: str = "auto",
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    levels: tuple[Group, Group] | None = None,
    grid: HyperCommGrid | None = None,
) -> Tensor:
    """Softmax attention of this rank's queries to the keys and values of the whole sequence.

    Equal to `F.scaled_dot_product_attention(…, enable_gqa=True)` over the whole sequence, with a
    mask that keeps documents apart, under autocast too. Collective over the group: all ranks call
    it alike, forward and backward; it begins with a small all-gather that makes sure they do.

    Args:
        q: (batch, heads, own positions, head_size).
        k, v: (batch, kv_heads, own positions, head_size); kv_heads divides heads.
        sharding: which positions a rank's rows are.
        group: whose ranks hold the sequence, in the order of the sharding.
        way: "ring", "allgather", "ulysses", "2d", or Megatron's `cp_comm_type` for them, "p2p",
            "all_gather", "a2a", "a2a+p2p"; or "auto", which is what `choose` says.
        causal: a position attends itself and what comes before it in its document; else all of it.
        window: of those at most so many, itself included; needs causal.
        scale: of the products of queries and keys; None: 1 / √head_size.
        dropout: 0; attention over shards has none.
        levels: of "2d", the ring across and the ranks inside, parts of a split of the group, the
            ring's first. None: `cp_ring` and `cp_a2a` of group `cp`.
        grid: where names are looked up; None: the default one.

    Returns:
        (batch, heads, own positions, head_size), of q's dtype, or of autocast's where it is on.

    Raises:
        SpecError: another way, a window without causal, dropout, levels that do not multiply out,
            or ranks that were given different things.
        ShapeError: tensors of another sharding, or heads that the way cannot share; on all ranks.
        GoneError: a rank is gone, or does not answer.

    Example:
        >>> import commgrid, torch
        >>> grid = commgrid.initialize()
        >>> sharding = SequenceSharding.packed([3, 5], parts=1)
        >>> q, k, v = torch.randn(3, 1, 4, 8, 16).unbind()
        >>> attention(q, k[:, :2], v[:, :2], sharding=sharding).shape
        torch.Size([1, 4, 8, 16])
        >>> commgrid.shutdown()
    """
    if dropout:
        raise SpecError(f"dropout={dropout}: attention over shards of a sequence has none; use 0")
    if not isinstance(sharding, SequenceSharding):
        raise SpecError(
            f"sharding={sharding!r}: expected a SequenceSharding, which says what each rank holds, "
            "such as SequenceSharding.zigzag(length, parts)"
        )
    made: Tensor = _opaque(
        q, k, v, sharding=sharding, group=group, way=way, causal=causal, window=window,
        scale=scale, levels=levels, grid=grid,
    )  # fmt: skip
    return made


def _autocast(x: Tensor) -> Tensor:
    """The tensor as autocast gives it to `scaled_dot_product_attention`."""
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return x
    casts = x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(kind)) if casts else x


def _attend(
    q: Tensor, k: Tensor, v: Tensor, *, sharding: SequenceSharding, group: Group, way: str,
    causal: bool, window: int | None, scale: float | None, levels: tuple[Group, Group] | None,
    grid: HyperCommGrid | None,
) -> Tensor:  # fmt: skip
    members = resolve(group, grid)
    rank = members.rank()
    about = f"attention over group {members.group_desc!r} of {members.size()} ranks"
    q, k, v = (readable(_autocast(x)) for x in (q, k, v))
    with named_peers(members), no_autocast(q):
        try:
            mask, way = Mask(causal, window), way_named(way)
            pair = _level_groups(group, members, levels, grid, way)
        except CommGridError as error:
            with suppress(ShapeError):
                agree(members, about, (), str(error))  # which the others wait for
            raise
        inner = pair.inside.size() if pair is not None else None
        if sharding.parts == members.size():
            complaint = _complaint(q, k, v, sharding, rank, way, inner)
        else:
            complaint = (
                f"the sharding is over {sharding.parts} ranks; expected as many as the group has"
            )
        facts = (
            ("shardings", sharding.described),
            ("options", f"way={way!r}, causal={causal}, window={window}, scale={scale}, {inner=}"),
            ("tensors", _shapes(q, k)),
        )
        agree(members, about, facts, complaint)
        if way == "auto":
            way = choose(
                sharding, heads=q.shape[1], kv_heads=k.shape[1], causal=causal, window=window,
                inner=inner, device=q.device.type,
            ).way  # fmt: skip
        scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
        if members.size() == 1 or way in ("ring", "allgather"):
            inside, across = None, members
        elif way == "ulysses":
            inside, across = members, None
        else:
            assert pair is not None
            connect(pair.across)
            inside, across = pair.inside if pair.inside.size() > 1 else None, pair.across
        plan = two_levels(sharding, rank, mask, 1 if inside is None else inside.size())
        ahead = members.size() if way == "allgather" else 1
        with named_peers(inside):
            return two_level_attention(
                q, k, v, levels=plan, inside=inside, across=across, scale=scale, ahead=ahead
            )


# torch.compile knows no messages between two ranks, and looks no plan up; so it leaves this alone.
_opaque = torch.compiler.disable(_attend)  # type: ignore[no-untyped-call]


# -- two levels ---------------------------------------------------------------------------


class _Pair(NamedTuple):
    across: ProcessGroup
    inside: ProcessGroup


def _level_groups(
    group: Group,
    members: ProcessGroup,
    levels: tuple[Group, Group] | None,
    grid: HyperCommGrid | None,
    way: str,
) -> _Pair | None:
    """The groups of both levels, or None where none are meant.

    Raises:
        UnknownGroupError: way "2d" without levels, and no split with their names.
        SpecError: they are not a split of the group, the ring's part first.
    """
    if way not in ("auto", "2d"):
        return None
    if levels is None:
        name, named = _named(group, grid)
        if named is None or not {f"{name}_ring", f"{name}_a2a"} <= set(named.group_names):
            if way == "auto":
                return None
            raise UnknownGroupError(
                f"way='2d' needs two levels of group {members.group_desc!r}: a row "
                f"`{name}_levels: {{of: {name}, split: {{{name}_ring: -1, {name}_a2a: 2}}}}` of "
                "the groups table makes them; or give levels=(ring, inside)"
            )
        levels, grid = (f"{name}_ring", f"{name}_a2a"), named
    pair = _Pair(resolve(levels[0], grid), resolve(levels[1], grid))
    _check_split(members, pair)
    return pair


def _named(group: Group, grid: HyperCommGrid | None) -> tuple[str, HyperCommGrid | None]:
    """A group's name and the grid it is looked up in; None: it is a bare one."""
    if isinstance(group, str):
        return group, grid or get_grid()
    if isinstance(group, GroupRef) and group.grid_name:
        return group.name, get_grid(group.grid_name)
    return "cp", None


def _check_split(members: ProcessGroup, pair: _Pair) -> None:
    whole, across, inside = (
        dist.get_process_group_ranks(one) for one in (members, pair.across, pair.inside)
    )
    size, rank = len(inside), members.rank()
    block = rank // size * size
    if (
        len(across) * size != len(whole)
        or inside != whole[block : block + size]
        or across != whole[rank % size :: size]
    ):
        raise SpecError(
            f"levels: {pair.across.group_desc!r} of {len(across)} ranks and "
            f"{pair.inside.group_desc!r} of {size} are no split of group {members.group_desc!r} of "
            f"{len(whole)}; expected a ring's ranks times those inside, which follow each other: "
            "split: {ring: …, inside: …}, in this order"
        )


# -- checks -------------------------------------------------------------------------------


def _shapes(q: Tensor, k: Tensor) -> str:
    """Sizes, dtype and device that are equal on all ranks, as text."""
    sizes = (*q.shape[:2], k.shape[1], q.shape[3]) if q.dim() == k.dim() == 4 else ()
    return f"(batch, heads, kv_heads, head_size)={sizes}, {q.dtype}, {q.device.type}"


def _turned(q: Tensor, own: int) -> str:
    """How tensors that have the positions in another dim become as they should be."""
    for dim, how in ((0, "permute(1, 2, 0, 3)"), (1, "transpose(1, 2)")):
        if q.shape[dim] == own != q.shape[2]:
            return f"; positions are dim 2, and q has as many in dim {dim}: give q.{how}"
    return ""


def _complaint(
    q: Tensor, k: Tensor, v: Tensor, sharding: SequenceSharding, rank: int, way: str,
    inner: int | None,
) -> str | None:  # fmt: skip
    """The mistake in this rank's tensors, or None."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or q.shape[::3] != k.shape[::3]:
        return (
            f"{shapes}: expected q (batch, heads, positions, head_size), and k and v (batch, "
            "kv_heads, positions, head_size)"
        )
    own = sharding.local_lengths[rank]
    if q.shape[2] != own or k.shape[2] != own:
        return (
            f"{shapes}: its share of the sharding, {sharding}, is {own} positions; shard the "
            f"tensors with the sharding that attention is given{_turned(q, own)}"
        )
    if k.shape[1] < 1 or q.shape[1] % k.shape[1]:
        return f"{shapes}: {k.shape[1]} heads of keys do not divide {q.shape[1]} query heads"
    if len({q.dtype, k.dtype, v.dtype}) > 1 or not q.is_floating_point():
        return (
            f"q is {q.dtype}, k {k.dtype}, v {v.dtype}: expected one floating point dtype; cast "
            "them, or run under torch.autocast"
        )
    size = sharding.parts if way == "ulysses" else inner if way == "2d" else None
    return None if size is None else heads_complaint(q.shape[1], k.shape[1], size)
