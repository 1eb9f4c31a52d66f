"""What each way sends and holds, what auto takes, what is refused, and torch's own beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import commgrid
from commgrid import CommGridError, ShapeError, SpecError, UnknownGroupError
from commgrid.context_parallel import SequenceSharding, attention, choose
from commgrid.context_parallel.agreement import named_peers
from commgrid.runtime.named_failures import GoneError
from commgrid.testing import run_on_ranks
from tests.context_parallel.plain import Case, allowed, inputs
from tests.memory import peak_bytes

LEVELS = {"cp_levels": {"of": "cp", "split": {"cp_ring": -1, "cp_a2a": 2}}}


# -- what is sent -------------------------------------------------------------------------


class Sent(TorchDispatchMode):
    """Counts the numbers that this rank gives to others, in torch's own collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(function)
        if "c10d" in name and "allgather" in name and args[1].dtype == torch.uint8:
            pass  # ranks agree
        elif "c10d" in name:
            rank = commgrid.get_local_rank("cp")
            if "send" in name:
                self.numbers += sum(tensor.numel() for tensor in args[0])
            elif "alltoall_base" in name:
                rows, sizes = args[1], args[4]
                parts = len(sizes) or commgrid.size("cp")  # none: equal ones
                own = sizes[rank % parts] if sizes else len(rows) // parts
                self.numbers += rows.numel() - own * rows[0].numel() if len(rows) else 0
            elif "allgather" in name:
                self.numbers += args[1].numel() * (commgrid.size("cp") - 1)
            elif "recv" not in name:
                raise AssertionError(f"{name} is not counted")
        return function(*args, **(kwargs or {}))


def volumes(case: Case) -> dict[str, tuple[int, int]]:
    """Numbers sent forward and backward, by way."""
    grid = commgrid.get_grid()
    found = {}
    q, k, v, gradient = (case.sharding.shard(x, dim=2).clone() for x in inputs(case, torch.float64))
    for x in (q, k, v):
        x.requires_grad_()
    for way in ("ring", "allgather", "ulysses", "2d"):

        def run(way: str = way) -> Tensor:
            return attention(
                q, k, v, sharding=case.sharding, way=way, causal=case.causal, window=case.window
            )

        run()  # the first time two levels connect
        with Sent() as forward:
            out = run()
        with Sent() as backward:
            out.backward(gradient)
        found[way] = (forward.numbers, backward.numbers)
    assert grid.get_local_rank("cp") == grid.rank
    return found


def of_keys(case: Case, sharding: SequenceSharding, rank: int, row: int) -> tuple[int, int]:
    """Numbers that a rank sends so that each gets the keys and values that it attends, counted in
    the mask; backward these again, and the gradients of those that it got."""
    mask, own = allowed(case), sharding.positions(rank)
    others = [sharding.positions(other) for other in range(sharding.parts) if other != rank]
    given = sum(int(mask[other][:, own].any(0).sum()) for other in others)
    got = sum(int(mask[own][:, other].any(0).sum()) for other in others)
    return 2 * row * given, 2 * row * (given + got)


def of_heads(case: Case, block: range, rank: int) -> tuple[int, int]:
    """Numbers that a rank of n sends so that each has its H / n query heads, and K / n or 1 of keys
    and values, at all positions, and gives the outputs of H / n heads back."""
    n, size = len(block), case.size * case.batch
    own = case.sharding.local_lengths[rank]
    others = sum(case.sharding.local_lengths[i] for i in block) - own
    outputs = case.heads // n * size
    rows = outputs + 2 * max(case.kv_heads // n, 1) * size
    there, back = (n - 1) * own, others
    return there * rows + back * outputs, back * rows + there * outputs


def counted(all_cases: list[Case]) -> list[dict[str, tuple[int, int]]]:
    commgrid.initialize(cp=4, groups=LEVELS)
    return [volumes(case) for case in all_cases]


def test_what_is_sent_is_what_the_formulas_say() -> None:
    full = Case(SequenceSharding.contiguous(32, 4), 8, 4, causal=False)
    all_cases = [
        full,
        Case(SequenceSharding.zigzag(32, 4), 8, 4),
        Case(SequenceSharding.packed([3, 30, 1, 14], 4), 8, 2),
        Case(SequenceSharding.packed([3, 30, 1, 14], 4), 8, 8, window=4),
        Case(SequenceSharding.packed([8] * 4, 4), 8, 8),
    ]
    found = run_on_ranks(counted, 4, all_cases)
    for rank, by_case in enumerate(found):
        for case, numbers in zip(all_cases, by_case, strict=True):
            size = case.size * case.batch
            keys = of_keys(case, case.sharding, rank, case.kv_heads * size)
            assert numbers["ring"] == numbers["allgather"] == keys
            assert numbers["ulysses"] == of_heads(case, range(4), rank)
            block = range(rank // 2 * 2, rank // 2 * 2 + 2)
            inside = of_heads(case, block, rank)
            local = max(case.kv_heads // 2, 1) * size
            across = of_keys(case, case.sharding.merged(2), rank // 2, local)
            assert numbers["2d"] == (inside[0] + across[0], inside[1] + across[1])
        # And these are the closed forms of the docs: n = 4 ranks, s = 8 positions, 2 rows of 8.
        keys = 3 * 8 * 2 * 4 * 16
        assert by_case[0]["ring"] == by_case[0]["allgather"] == (keys, 2 * keys)
        heads_of_each = 3 * 8 * (8 + 2 * 4) // 4 * 16
        outputs = 3 * 8 * 8 // 4 * 16
        assert by_case[0]["ulysses"] == (heads_of_each + outputs, heads_of_each + outputs)
        inside = 8 * (8 + 2 * 4) // 2 * 16 + 8 * 8 // 2 * 16
        across = 16 * 2 * 2 * 16
        assert by_case[0]["2d"] == (inside + across, inside + 2 * across)
        assert by_case[4]["ring"] == by_case[4]["allgather"] == (0, 0)  # every document on a rank
    # Of a zig-zag the ranks after one need half of its keys: forward (n + 1) / 2n of them all less.
    total = sum(numbers[1]["ring"][0] for numbers in found)
    assert total == 4 * keys * 3 // 4


# -- what is held -------------------------------------------------------------------------


def peaks(length: int) -> dict[str, int]:
    """Bytes at the most, forward and backward, of as many positions a rank."""
    parts = dist.get_world_size()
    commgrid.initialize(cp=parts)
    sharding = SequenceSharding.contiguous(length * parts, parts)
    q, k, v = (torch.randn(1, 2, length, 64, requires_grad=True) for _ in range(3))
    found = {}
    for way in ("ring", "allgather"):

        def run(way: str = way) -> None:
            attention(q, k, v, sharding=sharding, way=way, causal=False).sum().backward()

        run()
        found[way] = peak_bytes(run)
    return found


@pytest.mark.full
def test_a_rings_memory_does_not_grow_with_its_ranks() -> None:
    few, more = (run_on_ranks(peaks, parts, 128) for parts in (4, 8))
    # The least of all ranks: a block that is freed a moment later adds to a rank's peak, at most
    # half of it here, and a gathered sequence of 8 ranks is larger than that.
    peak = [{way: min(rank[way] for rank in found) for way in found[0]} for found in (few, more)]
    assert peak[1]["ring"] <= 1.01 * peak[0]["ring"]
    assert peak[1]["allgather"] >= 1.2 * peak[0]["allgather"]  # so what comes is counted


# -- what is chosen -----------------------------------------------------------------------


def test_auto_takes_what_hides_or_sends_least_and_says_so() -> None:
    short, middle, long = (SequenceSharding.zigzag(n, 8) for n in (4096, 32_768, 65_536))
    hidden = choose(long, heads=32)
    assert hidden.way == "ring"
    assert "8192 positions a rank hide its transfers (8192 do); ulysses sends less" in str(hidden)
    assert choose(middle, heads=32, kv_heads=32, device="cpu").way == "ring"
    many = choose(middle, heads=32)
    assert many.way == "ulysses"
    assert str(many) == "ulysses: sends least: 112 heads a position, ring and allgather 336"
    assert choose(long, heads=32, kv_heads=2, window=512).way == "ring"
    assert choose(long, heads=30, kv_heads=1).way == "ring"
    assert choose(short, heads=30, kv_heads=1).way == "ring"  # few keys to hide
    assert choose(short, heads=30, kv_heads=15).way == "allgather"
    assert "512 positions a rank are too few to hide" in choose(short, heads=30, kv_heads=15).reason
    assert choose(short, heads=30, kv_heads=15, device="cpu").way == "ring"  # where steps are slow
    split = choose(middle, heads=4, kv_heads=4, inner=4)  # heads for 4 ranks, not for 8
    assert split.way == "2d"
    assert choose(SequenceSharding.packed([64] * 64, 8), heads=8).reason.startswith("no document")
    assert choose(SequenceSharding.contiguous(7, 1), heads=8).way == "ring"


def as_chosen(sharding: SequenceSharding) -> None:
    commgrid.initialize(cp=4, groups=LEVELS)
    case = Case(sharding, 2, 2)
    q, k, v = (sharding.shard(x, dim=2) for x in inputs(case, torch.float64)[:3])
    way = choose(sharding, heads=2, kv_heads=2, inner=2, device="cpu").way
    assert way == "2d"
    made = attention(q, k, v, sharding=sharding)
    assert torch.equal(made, attention(q, k, v, sharding=sharding, way=way))


@pytest.mark.full
def test_auto_is_what_was_chosen() -> None:
    run_on_ranks(as_chosen, 4, SequenceSharding.zigzag(32, 4))


# -- what is refused ----------------------------------------------------------------------


def refused() -> None:
    grid = commgrid.initialize(
        cp=4,
        groups={
            "other": {"of": "cp", "split": {"cp_inside": 2, "cp_across": 2}},
            "one": {"of": "cp", "split": {"_": -1, "cp_two": 2}},
        },
    )
    rank = grid.get_local_rank("cp")
    sharding = SequenceSharding.packed([9, 5, 4], 4)
    own = sharding.local_lengths[rank]
    q, k = torch.zeros(1, 4, own, 8), torch.zeros(1, 2, own, 8)

    def no(kind: type[CommGridError], said: str, *tensors: Tensor, **options: Any) -> None:
        tensors = tensors or (q, k, k)
        options = {"sharding": sharding, **options}
        with pytest.raises(kind, match=said):
            attention(*tensors, **options)

    no(SpecError, "sharding=None: expected a SequenceSharding, which says", sharding=None)
    no(SpecError, "window=3.0: expected a whole number of keys", window=3.0)
    no(SpecError, "dropout=0.1: attention over shards of a sequence has none", dropout=0.1)
    no(SpecError, "window=3 with causal=False", causal=False, window=3)
    no(SpecError, "way='rnig': expected one of auto, ring.*did you mean 'ring'", way="rnig")
    no(
        UnknownGroupError,
        r"way='2d' needs two levels of group 'cp': a row `cp_levels: \{of: cp, split: \{cp_ring: ",
        way="2d",
    )
    for levels in (("cp_inside", "cp_across"), ("cp_two", "cp_two"), ("cp", "cp_two")):
        if levels == ("cp_inside", "cp_across"):
            attention(q, k, k, sharding=sharding, way="2d", levels=levels)  # the names do not count
            levels = ("cp_across", "cp_inside")
        no(SpecError, "are no split of group 'cp'", way="2d", levels=levels)
    wide = [x.repeat(1, 3, 1, 1)[:, :6] for x in (q, k)]
    no(
        ShapeError,
        "attention over group 'cp' of 4 ranks.*: Ulysses shares heads among ranks: 6 query heads "
        "are no multiple of 4 ranks; use way='ring' or 'allgather', or '2d'",
        *wide, wide[1], way="ulysses",
    )  # fmt: skip
    of_three = torch.zeros(1, 12, own, 8), *[torch.zeros(1, 3, own, 8)] * 2
    no(ShapeError, "3 heads of keys neither are a multiple of 4", *of_three, way="ulysses")
    no(ShapeError, "3 heads of keys do not divide 4 query heads", q, *of_three[1:])
    no(ShapeError, "expected q .batch, heads, positions, head_size.", q, k, k[..., :4])
    no(ShapeError, "expected q", q[0], k[0], k[0])
    no(ShapeError, "one floating point dtype", q, k, k.double())
    no(
        ShapeError, "the sharding is over 2 ranks; expected as many",
        sharding=SequenceSharding.packed([9, 5], 2),
    )  # fmt: skip
    # Wrong on one rank only, and with a sharding nobody has seen: said on all of them.
    fresh = SequenceSharding.zigzag(16, 4)
    one_more = 1 if rank == 2 else 0
    bad = torch.zeros(1, 2, 4 + one_more, 8)
    no(
        ShapeError,
        r"rank 2 of the group: q \(1, 2, 5, 8\).*: its share of the sharding, 16 positions in 1 "
        "document over 4 ranks, is 4 positions; shard the tensors with the sharding",
        bad, bad, bad, sharding=fresh,
    )  # fmt: skip
    no(
        ShapeError, r"positions are dim 2, and q has as many in dim 0: give q.permute\(1, 2, 0",
        *[torch.zeros(5, 3, 2, 8)] * 3, sharding=SequenceSharding.contiguous(20, 4),
    )  # fmt: skip
    theirs = SequenceSharding.zigzag(24, 4) if rank == 1 else SequenceSharding.contiguous(24, 4)
    fits = torch.zeros(1, 2, 6, 8)
    no(SpecError, "ranks 0 and 1 of the group have other shardings", *[fits] * 3, sharding=theirs)
    other = SequenceSharding.contiguous(28, 4)
    fits = torch.zeros(1, 2, 7, 8)
    no(
        SpecError, "ranks 0 and 3 of the group have other options: way='auto', causal=True.* and "
        "way='auto', causal=False", *[fits] * 3, sharding=other, causal=rank != 3,
    )  # fmt: skip
    # After all that the group still works.
    assert attention(q, k, k, sharding=sharding).shape == q.shape


def test_what_cannot_be_is_one_error_on_all_ranks() -> None:
    run_on_ranks(refused, 4)


def one_does_not_come(way: str, where: str) -> str:
    """What the others say, which gloo does not know: rank 2 is awaited by both, and is gone."""
    grid = commgrid.initialize(cp=3, timeout=4.0)
    sharding = SequenceSharding.contiguous(12, 3)
    x = torch.zeros(1, 3, 4, 8, requires_grad=True)
    y = attention(x, x, x, sharding=sharding, way=way)
    if grid.rank == 2:
        return ""
    with pytest.raises(GoneError) as error:
        attention(x, x, x, sharding=sharding, way=way) if where == "later" else y.sum().backward()
    return str(error.value)


@pytest.mark.nightly("allgather-*", "ring-*", "ulysses-later")
@pytest.mark.full("ulysses-backward")
@pytest.mark.parametrize("where", ["later", "backward"])
@pytest.mark.parametrize("way", ["ulysses", "allgather", "ring"])
def test_who_does_not_come_to_an_exchange_is_named(way: str, where: str) -> None:
    # A grid that failed leaves keys in the store.
    said = run_on_ranks(one_does_not_come, 3, way, where, check=False)
    for one in said[:2]:
        assert one.startswith(
            "attention over group 'cp' of 3 ranks: rank 2 did not come to the call, to which "
            "others have come ("
        )
        assert one.endswith("with tensors of one sharding, and its backward")


def one_leaves_its_neighbours(way: str) -> str:
    """Rank 2 does not come to a backward that ranks 0 and 3 have no message of it in.

    Documents lie on ranks 0 and 1, and on ranks 1 and 2; rank 3 has its own.
    """
    grid = commgrid.initialize(cp=4, timeout=4.0)
    sharding = SequenceSharding.contiguous(16, 4, documents=[0, 6, 12, 16])
    x = torch.ones(1, 3, 4, 8, requires_grad=True)
    y = attention(x, x, x, sharding=sharding, way=way)
    if grid.rank == 2:
        return ""
    try:
        y.sum().backward()
    except GoneError as error:
        return str(error)
    return "finished"


@pytest.mark.nightly("ring")
@pytest.mark.parametrize("way", ["allgather", "ring"])
def test_a_rank_without_a_part_in_a_failure_is_not_blamed(way: str) -> None:
    said = run_on_ranks(one_leaves_its_neighbours, 4, way, check=False)
    assert ": rank 2 did not come to the call" in said[1]
    assert ": rank 2 did not come to the call" in said[0] or said[0] == "finished"
    assert said[3] == "finished"


def two_failures() -> list[str]:
    """A call that fails on all ranks, and the next one, to which rank 1 does not come."""
    grid = commgrid.initialize(cp=2)
    group, x = grid.get_group("cp"), torch.zeros(1, 2, 4, 8)
    said = []
    for come in (True, grid.rank == 0):
        attention(x, x, x, sharding=SequenceSharding.contiguous(8, 2))
        if come:
            with pytest.raises(GoneError) as error, named_peers(group):
                raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer")
            said.append(str(error.value))
    return said


@pytest.mark.full
def test_who_does_not_come_is_named_after_an_earlier_failure() -> None:
    first, second = run_on_ranks(two_failures, 2, check=False)[0]
    assert "a rank is gone or did not answer in the call" in first
    assert "rank 1 did not come to the call, to which this rank has come" in second


# -- torch's own --------------------------------------------------------------------------


def torchs_ring(method: str) -> float:
    """How far torch's ring attention on the grid's mesh is from ours on its group."""
    from torch.distributed.tensor.experimental import _attention as experimental
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    grid = commgrid.initialize(cp=4)
    mesh = grid.device_mesh("cp")
    experimental.set_rotate_method(method)
    sharding = SequenceSharding.zigzag(64, 4)
    case = Case(sharding, 4, 4)
    q, k, v = (sharding.shard(x, dim=2).contiguous() for x in inputs(case, torch.float32)[:3])
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out = theirs._templated_ring_attention(mesh.get_group(), 2, kernel, q, k, v, is_causal=True)[0]
    return float((out - attention(q, k, v, sharding=sharding)).abs().max())


@pytest.mark.full("alltoall")
@pytest.mark.parametrize("method", ["allgather", "alltoall"])
def test_torchs_ring_runs_on_a_grids_mesh(method: str) -> None:
    """What its `context_parallel` calls, which itself knows kernels of CUDA only."""
    assert max(run_on_ranks(torchs_ring, 4, method)) <= 2e-5


# -- shards through a group ---------------------------------------------------------------


def through_the_group() -> None:
    commgrid.initialize(cp=3)
    sharding = SequenceSharding.packed([4, 9, 1], 3)
    whole = torch.arange(28.0).view(2, 14).requires_grad_()
    shard = sharding.shard(whole, dim=1)
    joined = sharding.unshard(shard, dim=1)
    assert torch.equal(joined, whole)
    (joined * torch.arange(14)).sum().backward()
    wanted = torch.zeros(2, 14)
    positions = sharding.positions(commgrid.get_local_rank("cp"))
    wanted[:, positions] = positions.float()
    assert whole.grad is not None
    assert torch.equal(whole.grad, wanted)
    with pytest.raises(ShapeError, match="a sharding over 2 ranks, but group 'cp' has 3"):
        SequenceSharding.packed([9], 2).shard(torch.ones(9))
    commgrid.destroy()  # a bare process group needs no grid
    x = torch.ones(1, 2, len(positions), 4)
    world = dist.group.WORLD
    torch.testing.assert_close(attention(x, x, x, sharding=sharding, group=world), x)
    with pytest.raises(UnknownGroupError, match="needs two levels of group"):
        attention(x, x, x, sharding=sharding, group=world, way="2d")


def test_shards_of_this_rank_and_back() -> None:
    run_on_ranks(through_the_group, 3)


def test_the_oracle_is_torchs_attention() -> None:
    """Of one document, without a window, plain softmax is what torch computes."""
    from tests.context_parallel.plain import plain

    made: Callable[..., Tensor] = F.scaled_dot_product_attention
    case = Case(SequenceSharding.contiguous(12, 1))
    tensors = inputs(case, torch.float64)
    found = made(*tensors[:3], is_causal=True, enable_gqa=True)
    torch.testing.assert_close(plain(case, tensors)[0], found, rtol=1e-12, atol=1e-12)
