"""An encoder and a language model on two grids compute what one process computes, both ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commgrid
from commgrid.bridge import Bridge, Cut
from commgrid.context_parallel import SequenceSharding
from commgrid.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from commgrid.testing import run_on_ranks
from tests.sizes import some

BATCH, LENGTH, WIDTH, INNER = 11, 8, 6, 12
BOUND = 1e-12  # of sums of a few hundred products in fp64, in another order


@dataclass(frozen=True)
class Case:
    """Two grids over 8 ranks, how the tensor is cut on each, and the bridge's arguments."""

    name: str
    source: range
    target: range
    source_axes: dict[str, int] = field(default_factory=dict)
    target_axes: dict[str, int] = field(default_factory=dict)
    told: dict[str, Any] = field(default_factory=dict)
    source_parts: str = "torch.tensor_split"  # how the test itself cuts: or a list of rows
    uneven: tuple[int, ...] = ()
    target_order: tuple[tuple[int, ...], ...] = ()  # positions of each cp rank of the target
    source_order: tuple[tuple[int, ...], ...] = ()
    sequence_parallel: bool = False


ZIGZAG = ((0, 1, 6, 7), (2, 3, 4, 5))
PACKED = SequenceSharding.from_positions([[0, 3, 7], [1, 2, 4, 5, 6]])
HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))

CASES = [
    Case("4 to 2", range(4), range(4, 6)),
    Case("2 to 4", range(2), range(4, 8)),
    Case("3 to 2", range(3), range(3, 5)),
    Case("2 to 3", range(2), range(5, 8)),
    Case("1 to 7", range(1), range(1, 8)),
    Case("3 to 2, tp and pp", range(3), range(4, 8), {}, {"tp": 2, "pp": 2}),
    Case("5 to 3", range(5), range(5, 8), uneven=(4, 0, 1, 5, 1)),
    Case("2 to 2, tp on both", range(4), range(4, 8), {"tp": 2}, {"tp": 2}),
    Case("tp and pp on the source", range(4), range(4, 7), {"tp": 2, "pp": 2}, {}),
    Case("same ranks", range(8), range(8), {}, {"tp": 2, "pp": 2}),
    Case("same ranks and cuts", range(8), range(8)),
    Case("overlapping", range(6), range(2, 8), {}, {"tp": 3}),
    Case("overlapping, tp on the source", range(6), range(3, 8), {"tp": 2}, {}),
    Case(
        "zigzag over cp", range(3), range(4, 8), {}, {"cp": 2},
        {"target_sequence": Cut(1, "cp", "zigzag")}, target_order=ZIGZAG,
    ),
    Case(
        "contiguous to packed", range(4), range(4, 8), {"cp": 2}, {"cp": 2},
        {"source_sequence": Cut(1, "cp"), "target_sequence": Cut(-2, "cp", PACKED)},
        source_order=HALVES, target_order=((0, 3, 7), (1, 2, 4, 5, 6)),
    ),
    Case(
        "cp copies that shard it themselves", range(3), range(4, 8), {}, {"cp": 2},
        {"copies": ("tp", "cp")},
    ),
    Case(
        "sequence over dp_cp", range(4), range(8), {}, {"cp": 2, "dp": 2, "tp": 2},
        {"dim": 0, "group": ("dp", "dp_cp")},
    ),
    Case(
        "sequence parallel", range(3), range(4, 8), {}, {"tp": 2},
        {"target_sequence": Cut(1, "tp")}, target_order=HALVES, sequence_parallel=True,
    ),
]  # fmt: skip
CHOSEN = some(CASES, 4)


def drawn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def whole() -> dict[str, Tensor]:
    """Everything in one process: what crosses, its gradient, the weights and theirs."""
    weights = {
        name: (drawn(seed, *shape) / 3).requires_grad_()
        for seed, (name, shape) in enumerate(
            {"e1": (INNER, WIDTH), "e2": (WIDTH, INNER),
             "l1": (INNER, WIDTH), "l2": (WIDTH, INNER)}.items()
        )
    }  # fmt: skip
    x, wanted = drawn(10, BATCH, LENGTH, WIDTH), drawn(11, BATCH, LENGTH, WIDTH)
    crossed = torch.tanh(x @ weights["e1"].T) @ weights["e2"].T
    crossed.retain_grad()
    out = torch.tanh(crossed @ weights["l1"].T) @ weights["l2"].T
    (torch.sin(out) * wanted).sum().backward()
    return {"x": x, "wanted": wanted, "crossed": crossed.detach(), "gradient": crossed.grad,
            **weights, **{f"{name} gradient": w.grad for name, w in weights.items()}}  # fmt: skip


class Mlp(nn.Module):
    """Two layers over a grid's tp, with the slices of given weights."""

    def __init__(self, grid: Any, up: Tensor, down: Tensor, sequence_parallel: bool) -> None:
        super().__init__()
        how: dict[str, Any] = {"bias": False, "grid": grid, "dtype": torch.float64}
        if sequence_parallel:
            how |= {"sequence_parallel": True, "sequence_dim": 1}
        self.up = ColumnParallelLinear(WIDTH, INNER, **how)
        self.down = RowParallelLinear(INNER, WIDTH, **how)
        at, n = grid.get_local_rank("tp"), grid.size("tp")
        with torch.no_grad():
            self.up.weight.copy_(up.chunk(n, 0)[at])
            self.down.weight.copy_(down.chunk(n, 1)[at])

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def rows_of(full: Tensor, parts: Sequence[int] | int, at: int) -> Tensor:
    cut = full.tensor_split(parts) if isinstance(parts, int) else full.split(list(parts))
    return cut[at]


def positions(tensor: Tensor, order: Sequence[Sequence[int]], at: int) -> Tensor:
    return tensor[:, list(order[at])] if order else tensor


def one(case: Case) -> dict[str, float]:
    """This rank's largest differences from one process, by kind of tensor."""
    rank, all_of = dist.get_rank(), whole()
    axes = {"source": case.source_axes, "target": case.target_axes}
    grids = {
        side: commgrid.initialize(
            ranks=list(ranks), name=f"{side} of {case.name}", timeout=30, **axes[side]
        )
        if rank in ranks
        else None
        for side, ranks in (("source", case.source), ("target", case.target))
    }
    if grids["source"] is None and grids["target"] is None:
        return {}
    groups = case.told.get("group", "dp")
    groups = (groups, groups) if isinstance(groups, str) else groups
    bridge = Bridge(grids["source"], grids["target"], **{"timeout": 30, **case.told})
    found: dict[str, float] = {}
    x = sent = None
    source, target = grids["source"], grids["target"]
    if source is not None and source.is_last("pp"):
        encoder = Mlp(source, all_of["e1"], all_of["e2"], False)
        parts = case.uneven or source.size(groups[0])
        at = source.get_local_rank(groups[0]), source.get_local_rank("cp")
        x = positions(rows_of(all_of["x"], parts, at[0]), case.source_order, at[1])
        sent = encoder(x)
        sent.retain_grad()
    y = bridge(sent)
    if target is not None and target.is_first("pp"):
        assert y is not None
        assert y.requires_grad
        at = (
            target.get_local_rank(groups[1]),
            target.get_local_rank("tp" if case.sequence_parallel else "cp"),
        )
        mine = positions(
            rows_of(all_of["crossed"], target.size(groups[1]), at[0]), case.target_order, at[1]
        )
        found["crossed"] = off(y, mine)
    loss = run_target(case, target, all_of, y)
    if loss is not None:
        loss.backward()
    if source is not None and source.is_last("pp"):
        gradient = rows_of(all_of["gradient"], parts, source.get_local_rank(groups[0]))
        cp = source.get_local_rank("cp")
        found["gradient"] = off(sent.grad, positions(gradient, case.source_order, cp))
        for name, weight, dim in (("e1", encoder.up.weight, 0), ("e2", encoder.down.weight, 1)):
            dist.all_reduce(weight.grad, group=source.get_group("dp_cp"))
            full = all_of[f"{name} gradient"].chunk(source.size("tp"), dim)
            found[name] = off(weight.grad, full[source.get_local_rank("tp")])
    bridge.finish()
    for grid in grids.values():
        if grid is not None:
            commgrid.destroy(grid.name)
    return found


def run_target(case: Case, target: Any, all_of: dict[str, Tensor], y: Any) -> Any:
    """The language model: what this rank calls backward of."""
    if target is None:
        return y
    groups = case.told.get("group", "dp")
    group = groups if isinstance(groups, str) else groups[1]
    wanted = rows_of(all_of["wanted"], target.size(group), target.get_local_rank(group))
    which = target.get_local_rank("tp" if case.sequence_parallel else "cp")
    wanted = positions(wanted, case.target_order, which)
    if target.is_first("pp"):
        if "cp" in case.told.get("copies", ()):  # each computes the loss of its own positions
            y, wanted = (one.chunk(target.size("cp"), 1)[which] for one in (y, wanted))
        model = Mlp(target, all_of["l1"], all_of["l2"], case.sequence_parallel)
        out = model(y)
    if target.size("pp") == 1:
        return (torch.sin(out) * wanted).sum()
    pp = target.get_group("pp")
    if target.is_first("pp"):  # the loss is computed on the last stage
        dist.send(out.detach().contiguous(), group=pp, group_dst=1)
        back = torch.empty_like(out)
        dist.recv(back, group=pp, group_src=1)
        return (out * back).sum()
    out = torch.empty_like(wanted).requires_grad_()
    dist.recv(out.data, group=pp, group_src=0)
    (torch.sin(out) * wanted).sum().backward()
    dist.send(out.grad, group=pp, group_dst=0)
    return y  # of a rank of the source's stage too, a zero


def off(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape, (found.shape, expected.shape)
    if not found.numel():
        return 0.0
    return float((found - expected).detach().abs().max() / expected.detach().abs().max())


def every(cases: Sequence[Case]) -> list[dict[str, float]]:
    found = []
    for case in cases:
        found.append(one(case))
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def differences() -> dict[str, list[dict[str, float]]]:
    """Of each case, what every rank found."""
    by_rank = run_on_ranks(every, 8, CHOSEN, timeout=300)
    return {case.name: [found[i] for found in by_rank] for i, case in enumerate(CHOSEN)}


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
def test_two_grids_equal_one_process(
    differences: dict[str, list[dict[str, float]]], case: Case
) -> None:
    for rank, found in enumerate(differences[case.name]):
        assert all(value <= BOUND for value in found.values()), (rank, found)
    held = [set(found) for found in differences[case.name]]
    assert sum("gradient" in what for what in held) == len(case.source) // case.source_axes.get(
        "pp", 1
    )
    assert sum("crossed" in what for what in held) == len(case.target) // case.target_axes.get(
        "pp", 1
    )


def copied() -> dict[str, float]:
    """The gradient of one rank's tensor whose copies on 4 others, of tp 2 and cp 2, have 1 and 2
    along cp, or 1 to 4."""
    rank = dist.get_rank()
    source = commgrid.initialize(name="source", ranks=[0]) if rank == 0 else None
    target = commgrid.initialize(name="target", ranks=range(1, 5), tp=2, cp=2) if rank else None
    told = {"default": {}, "tp too": {"partial": ("tp", "cp")}, "tp": {"partial": ("tp",)},
            "tp, a name alone": {"partial": "tp"}, "none": {"partial": ()}}  # fmt: skip
    found = {}
    for name, partial in told.items():
        bridge = Bridge(source, target, copies=("tp", "cp"), **partial)
        x = torch.ones(3, requires_grad=True) if source is not None else None
        y = bridge(x)
        if target is not None:
            at = target.coordinate
            y = y * (1.0 + at["cp"] + (2.0 * at["tp"] if "tp" in name else 0.0))
        y.sum().backward()
        if x is not None:
            assert x.grad.eq(x.grad[0]).all()
            found[name] = x.grad[0].item()
        bridge.destroy()
    return found


def test_gradients_of_copies_are_summed_where_they_are_parts() -> None:
    found = run_on_ranks(copied, 5)[0]
    assert found["default"] == 1.0 + 2.0  # one of tp's, both of cp's
    assert found["tp too"] == 1.0 + 2.0 + 3.0 + 4.0
    assert found["tp"] in (1.0 + 3.0, 2.0 + 4.0)  # of one place along cp
    assert found["tp, a name alone"] == found["tp"]
    assert found["none"] in (1.0, 2.0)
