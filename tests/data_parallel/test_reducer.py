"""Reduced gradients, their norm and what follows, against one process that sees all the data."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import commgrid
from commgrid import CommGridError, GridMismatchError, ShapeError, SpecError
from commgrid.collectives import all_gather
from commgrid.data_parallel import (
    GradientReducer,
    ShardedOptimizer,
    clip_gradients,
    gradient_norm,
)
from commgrid.data_parallel.slot import KeptGradient
from commgrid.parameters import mark_parameters, placements
from commgrid.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    initialize_parameters,
)
from commgrid.testing import run_on_ranks
from tests.sizes import nightly

WIDTH = 8


class Model(nn.Module):
    """A norm, a block, an embedding used twice, a parameter of two modules, and an unused one."""

    def __init__(self, sequence_parallel: bool, dtype: torch.dtype) -> None:
        super().__init__()
        options = {"sequence_parallel": sequence_parallel, "dtype": dtype}
        self.embedding = VocabParallelEmbedding(11, WIDTH, **options)
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.twin = nn.LayerNorm(WIDTH, dtype=dtype)
        self.twin.weight = self.norm.weight
        if sequence_parallel:
            mark_parameters(self.norm, partial="tp")
            mark_parameters(self.twin, partial="tp")
        self.up = ColumnParallelLinear(WIDTH, 2 * WIDTH, **options)
        self.down = RowParallelLinear(2 * WIDTH, WIDTH, **options)
        self.unused = nn.Linear(3, 3, dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.embedding(tokens.roll(1, 0))
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return F.softplus(3 * self.twin(x))


@dataclass(frozen=True)
class Way:
    """How a step is cut up; the numbers must not depend on it."""

    tp: int = 1
    sequence_parallel: bool = False
    shard: bool = False
    microbatches: int = 1
    bucket_bytes: int = 2**20
    overlap: bool = True


def steps(way: Way, count: int = 5, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Norms of `count` steps of AdamW, and the weights they end at, whole."""
    if not commgrid.is_initialized():
        commgrid.initialize(tp=way.tp)
    grid = commgrid.get_grid()
    model = Model(way.sequence_parallel, torch.float64)
    initialize_parameters(model, seed=3)
    model.to(dtype)  # drawn in bf16 the weights would be others
    reducer = GradientReducer(model, shard=way.shard, bucket_bytes=way.bucket_bytes)
    optimizer: torch.optim.Optimizer = (
        ShardedOptimizer(reducer, torch.optim.AdamW, lr=1e-2, overlap=way.overlap)
        if way.shard or dtype != torch.float64
        else torch.optim.AdamW(model.parameters(), lr=1e-2)
    )
    norms = []
    for step in range(count):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randint(11, (4, 16), generator=generator)  # (sequence, batch)
        mine = batch.chunk(grid.size("dp"), 1)[grid.get_local_rank("dp")]
        parts = mine.chunk(way.microbatches, 1)
        for i, tokens in enumerate(parts, 1):
            with reducer.no_sync() if i < len(parts) else nullcontext():
                model(tokens).sum().backward()
        reducer.finish(count=mine.shape[1])
        assert model.unused.weight.grad is None
        if not way.shard and dtype == torch.float64:
            assert model.norm.weight.grad is not None
            same = gradient_norm(model)
            torch.testing.assert_close(same, reducer.gradient_norm(), rtol=1e-12, atol=0)
        norms.append(reducer.clip_gradients(4.0).item())
        optimizer.step()
        optimizer.zero_grad()
    found: dict[str, Any] = {"norms": norms}
    state = model.state_dict()  # waits for what is still being gathered
    for placement in placements(model):
        whole = state[placement.name]
        for dim, group in placement.shards:
            whole = all_gather(whole, group, dim=dim)
        found[placement.name] = whole[:11] if placement.name == "embedding.weight" else whole
    reducer.close()
    return found


def same(ours: dict[str, Any], theirs: dict[str, Any], what: object) -> None:
    # fp64: sums of a few hundred terms in another order, through five steps of AdamW, which
    # divides gradients by their own size.
    assert set(ours) == set(theirs)
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-11), what
    for name in set(theirs) - {"norms"}:
        torch.testing.assert_close(
            ours[name],
            theirs[name],
            rtol=1e-9,
            atol=1e-10,
            msg=lambda m, n=name: f"{what} {n}: {m}",
        )


def every_way(tp: int) -> list[tuple[Way, dict[str, Any]]]:
    ways = [
        Way(tp, sequence_parallel, shard, microbatches, bucket_bytes, overlap)
        for sequence_parallel in (False, True)
        for shard, overlap in ((False, True), (True, True), (True, False))
        for microbatches, bucket_bytes in ((1, 1), (2, 600), (2, 2**20))
    ]
    return [(way, steps(way)) for way in ways]


@pytest.mark.full
def test_steps_do_not_depend_on_how_they_are_cut() -> None:
    reference = run_on_ranks(steps, 1, Way())[0]
    assert reference["norms"][0] > 4  # so that clipping clips
    for world, tp in ((1, 1), (2, 1), (4, 2), (8, 2)) if nightly() else ((2, 1), (4, 2)):
        for found in run_on_ranks(every_way, world, tp, timeout=300):
            for way, ours in found:
                same(ours, reference, (world, way))


def half() -> list[float]:
    return [
        steps(Way(2, sp, shard, 2), dtype=torch.bfloat16)["norms"][0]
        for sp in (False, True)
        for shard in (False, True)
    ]


def test_bf16_parameters_have_fp32_gradients() -> None:
    exact = run_on_ranks(steps, 1, Way())[0]["norms"][0]
    for found in run_on_ranks(half, 4):
        # Activations and weights are rounded to 8 bits, 2^-9 each; a norm averages over many.
        assert found == pytest.approx([exact] * len(found), rel=2**-6)
        # The first gradients are of the same weights: sharding adds them in another order, in fp32.
        assert found[0] == pytest.approx(found[1], rel=1e-5)


def buffers() -> None:
    grid = commgrid.initialize()
    model = nn.Linear(4, 4, dtype=torch.bfloat16)
    reducer = GradientReducer(model)
    tiny = 2.0**-12
    model.weight.data.zero_()
    for i in range(64):  # bf16 would lose 63 of these additions to 1
        with reducer.no_sync():
            (
                model(torch.full((1, 4), 1.0 if i == 0 else tiny, dtype=torch.bfloat16))
            ).sum().backward()
    reducer.finish(count=1)
    slot = next(s for lane in reducer.lanes for s in lane.slots if s.placement.name == "weight")
    assert slot.view.dtype == torch.float32
    assert torch.all(slot.view == (1 + 63 * tiny))
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == torch.bfloat16  # for a plain optimizer
    assert grid.size("dp") == 2


def test_many_small_gradients_add_up() -> None:
    run_on_ranks(buffers, 2)


def uneven() -> None:
    """Rank 0 has 3 microbatches, rank 1 has 1 longer one, rank 2 has none at all."""
    grid = commgrid.initialize()
    data = torch.randn(10, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mine = [[data[0:1], data[1:3], data[3:4]], [data[4:10]], []][grid.rank]
    for shard in (False, True):
        model = nn.Linear(4, 2, dtype=torch.float64)
        initialize_parameters(model, seed=0)
        reducer = GradientReducer(model, shard=shard)
        keeper = ShardedOptimizer(reducer, torch.optim.SGD) if shard else None
        for i, part in enumerate(mine, 1):
            with reducer.no_sync() if i < len(mine) else nullcontext():
                model(part).square().sum().backward()
        count = sum(len(part) for part in mine)  # or a tensor, which the host need not know
        reducer.finish(count=torch.tensor(float(count)) if shard else count)
        norm = reducer.gradient_norm()
        whole = nn.Linear(4, 2, dtype=torch.float64)
        initialize_parameters(whole, seed=0)
        (whole(data).square().sum() / 10).backward()
        torch.testing.assert_close(norm, gradient_norm(whole), rtol=1e-12, atol=0)
        assert (keeper is not None) == isinstance(model.weight.grad, KeptGradient)
        reducer.close()


def test_average_is_right_with_uneven_microbatches() -> None:
    run_on_ranks(uneven, 3)


def marked() -> None:
    commgrid.initialize()
    module = mark_parameters(nn.Linear(2, 2), region="expert")
    mark_parameters(module, partial="tp")
    for placement in placements(module):
        assert placement.region == "expert"
        assert placement.partial is not None


def test_a_second_mark_keeps_what_the_first_one_says() -> None:
    run_on_ranks(marked, 1)


def idle() -> None:
    """Rank 1 takes part in the first step only; a parameter in the first step only, on both."""
    grid = commgrid.initialize()
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "once": nn.Linear(2, 1)}).double()
    reducer = GradientReducer(model)
    x = torch.ones(1, 2, dtype=torch.float64)
    (model["used"](x) + model["once"](x)).sum().backward()
    reducer.finish(count=1)
    model.zero_grad()
    if grid.rank == 0:
        (3 * model["used"](x)).sum().backward()
    reducer.finish(count=1 - grid.rank)
    assert torch.equal(model["used"].weight.grad, 3 * x)
    assert model["once"].weight.grad is None
    # Weight and bias: what is left of the first step would add 3 to it.
    assert reducer.gradient_norm().square().item() == pytest.approx(27.0, rel=1e-12)
    reducer.close()


def test_nothing_of_the_step_before_is_added_where_there_is_no_gradient() -> None:
    run_on_ranks(idle, 2)


def lopsided() -> str:
    grid = commgrid.initialize()
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "sometimes": nn.Linear(2, 3)})
    reducer = GradientReducer(model)
    loss = model["used"](torch.ones(1, 2)).sum()
    if grid.rank != 1:
        loss = loss + model["sometimes"](torch.ones(1, 2)).sum()
    loss.backward()
    with pytest.raises(GridMismatchError) as caught:
        reducer.finish()
    model.zero_grad()  # the next step is not harmed by it
    (model["used"](torch.ones(1, 2)).sum() + model["sometimes"](torch.ones(1, 2)).sum()).backward()
    reducer.finish()
    assert model["sometimes"].weight.grad is not None
    assert torch.equal(model["sometimes"].weight.grad, torch.ones(3, 2))
    return str(caught.value)


def test_a_gradient_on_some_ranks_only_is_named() -> None:
    for rank, said in enumerate(run_on_ranks(lopsided, 3)):
        assert said.startswith(
            "sometimes.bias of shape (3,): 2 of the 3 ranks of group 'dp_cp' ([0, 1, 2]) have a "
        )
        assert f"this rank has {'none' if rank == 1 else 'one'}" in said


def other_model() -> None:
    grid = commgrid.initialize()
    with pytest.raises(GridMismatchError, match=r"ranks \[2\] of \[0, 1, 2\] have other param"):
        GradientReducer(nn.Linear(2, 4 if grid.rank == 2 else 3))


def test_another_model_on_one_rank_is_named() -> None:
    run_on_ranks(other_model, 3)


def wrong() -> None:
    commgrid.initialize()
    model = nn.Linear(2, 2)
    reducer = GradientReducer(model)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(
        CommGridError, match=r"reached (weight|bias) of shape .* again before finish"
    ):
        model(torch.ones(1, 2)).sum().backward()
    reducer.finish()
    with pytest.raises(ShapeError, match=r"finish\(count=0\): the counts of the 1 ranks of group"):
        reducer.finish(count=0)
    with pytest.raises(ShapeError, match=r"max_norm=0\): expected above 0"):
        reducer.clip_gradients(0)
    with pytest.raises(SpecError, match=r"weight of shape \(2, 2\) has another GradientReducer"):
        GradientReducer(model)
    reducer.close()
    again = GradientReducer(model, shard=True)
    with pytest.raises(SpecError, match="LBFGS does not update elements one by one"):
        ShardedOptimizer(again, torch.optim.LBFGS)
    with pytest.raises(SpecError, match=r"a parameter of shape \(5,\) in groups is not one"):
        ShardedOptimizer(again, torch.optim.SGD, groups=[{"params": nn.Parameter(torch.ones(5))}])
    del again, reducer  # which the model keeps, and a new one ends
    GradientReducer(model).close()
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None
    with pytest.raises(SpecError, match=r"region='sparse': expected one of dense, expert"):
        mark_parameters(model, region="sparse")
    assert clip_gradients(model, 1e-3) > 1e-3
    assert gradient_norm(model) <= 1e-3
    assert gradient_norm(nn.Linear(2, 2)) == 0


def test_bad_input_is_named() -> None:
    run_on_ranks(wrong, 1, backend=None)


def changed() -> None:
    commgrid.initialize()
    ones = torch.ones(1, 2)
    for change in (
        lambda model: model.double(),
        lambda model: model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()},
                                            assign=True),
        lambda model: setattr(model, "extra", nn.Parameter(torch.ones(3))),
    ):  # fmt: skip
        model = nn.Linear(2, 2)
        reducer = GradientReducer(model)
        change(model)
        model(ones.to(model.weight.dtype)).sum().backward()
        with pytest.raises(CommGridError, match=r"(moved or replaced|added or unfrozen) after"):
            reducer.finish()
    # A step that is given up leaves nothing behind; nor does a gradient asked for by itself.
    model = ColumnParallelLinear(2, 2)
    reducer = GradientReducer(model)
    with reducer.no_sync():
        model(ones * 100).sum().backward()
    reducer.zero_grad()
    x = ones.clone().requires_grad_()
    torch.autograd.grad(model(x).sum(), x)
    asked = torch.autograd.grad(model(x).sum(), model.weight)[0]
    assert torch.equal(asked, torch.ones(2, 2))
    model(x).sum().backward(inputs=[x])
    model(x).sum().backward()
    reducer.finish()
    assert torch.equal(model.weight.grad, torch.ones(2, 2))
    # A norm that cannot see the gradients says so.
    reducer.close()
    model.zero_grad()
    reducer = GradientReducer(model, shard=True)
    optimizer = ShardedOptimizer(reducer, torch.optim.SGD, lr=1.0)
    model(x).sum().backward()
    reducer.finish()
    with pytest.raises(CommGridError, match="is kept by its GradientReducer"):
        gradient_norm(model)
    with pytest.raises(ShapeError, match=r"max_norm=-1\): expected above 0"):
        clip_gradients(model, -1)
    optimizer.step()


def test_what_would_go_unnoticed_is_an_error() -> None:
    run_on_ranks(changed, 1, backend=None)


def marks() -> None:
    commgrid.initialize(tp=2, groups={"ends": {"of": "pp", "pick": ["first", "last"]}})
    norm = mark_parameters(nn.LayerNorm(2), partial="tp")
    expert = mark_parameters(nn.Sequential(norm, nn.Linear(2, 2)), region="expert")
    found = [(p.partial and p.partial.name, p.region) for p in placements(expert)]
    assert found == [("tp", "expert")] * 2 + [(None, "expert")] * 2
    with pytest.raises(SpecError, match=r"partial over 'tp' .* now to be partial over 'dp'"):
        mark_parameters(expert, partial="dp")
    tied = mark_parameters(nn.Linear(2, 2), shared="pp")
    assert {p.shared and p.shared.name for p in placements(tied)} == {"pp"}
    with pytest.raises(SpecError, match=r"shared with 'pp' .* now to be shared with 'ends'"):
        mark_parameters(tied, shared="ends")
    with pytest.raises(SpecError, match=r"shared='tp': a group of axes tp; .* expected one of pp"):
        mark_parameters(tied, shared="tp")
    # Marked on one rank only: the model is another one there.
    model = nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 2))
    if commgrid.get_grid().rank == 1:
        mark_parameters(model[0], partial="tp")
    with pytest.raises(GridMismatchError, match="have other parameters than the rest"):
        GradientReducer(model)


def test_marks_add_up_and_are_compared() -> None:
    run_on_ranks(marks, 2)


def by_hand() -> None:
    """Gradients assigned to `.grad` without a backward, as by torch's zero-bubble schedules."""
    grid = commgrid.initialize()
    model = nn.Linear(2, 2)
    reducer = GradientReducer(model)
    for step in range(2):
        for p in model.parameters():
            p.grad = torch.full_like(p, float(grid.rank + step))
        reducer.finish()
        for p in model.parameters():
            assert p.grad is not None
            assert p.grad.eq(0.5 + step).all()


def test_gradients_put_there_by_hand_are_reduced() -> None:
    run_on_ranks(by_hand, 2)


def lanes() -> Tensor:
    """Rank 0's last microbatch skips the dense part, so its buckets fill in another order."""
    grid = commgrid.initialize(etp=1)
    parts = nn.ModuleDict({
        name: nn.ModuleList([nn.Linear(2, 2) for _ in range(4)]) for name in ("expert", "dense")
    })  # fmt: skip
    mark_parameters(parts["expert"], region="expert")
    initialize_parameters(parts, seed=0)
    reducer = GradientReducer(parts, shard=True, bucket_bytes=1)
    optimizer = ShardedOptimizer(reducer, torch.optim.SGD)

    def loss(*names: str) -> Tensor:
        layers = [layer for name in names for layer in parts[name]]
        return torch.stack([layer(torch.ones(1, 2)).square().sum() for layer in layers]).sum()

    with reducer.no_sync():
        loss("expert", "dense").backward()
    loss("expert", *(["dense"] if grid.rank else [])).backward()
    reducer.finish()
    assert reducer.optimizer is optimizer
    return reducer.gradient_norm()


def test_lanes_do_not_wait_for_each_other() -> None:
    first, second = run_on_ranks(lanes, 2, timeout=300)
    assert first == second > 0


def experts() -> tuple[float, Tensor]:
    """Two experts, ep of them apart, each seeing a fixed half of the tokens of every rank."""
    grid = commgrid.initialize(ep=2 if torch.distributed.get_world_size() > 1 else 1, etp=1)
    both = [nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(2)]
    dense = nn.Linear(4, 4, bias=False, dtype=torch.float64)
    for seed, layer in enumerate([*both, dense]):
        initialize_parameters(layer, seed)
    local = both if grid.size("ep") == 1 else [both[grid.get_local_rank("ep")]]
    model = nn.ModuleList([dense, mark_parameters(nn.ModuleList(local), region="expert")])
    reducer = GradientReducer(model)
    data = torch.randn(8, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    # Stands for dispatch: this rank's experts see the tokens of their whole ep group.
    own = data.chunk(grid.size("dp"))[grid.get_local_rank("dp")]
    group = all_gather(own, "ep") if grid.size("ep") > 1 else own
    loss = dense(own).square().sum()
    for layer in local:
        loss = loss + layer(group[:, both.index(layer)]).square().sum()
    loss.backward()
    reducer.finish(count=len(own))
    assert dense.weight.grad is not None
    return reducer.gradient_norm().item(), dense.weight.grad


def test_expert_gradients_go_over_edp_and_count_once() -> None:
    results = {world: run_on_ranks(experts, world) for world in (1, 2, 4)}
    norm, gradient = results[1][0]
    for world in (2, 4):
        for ours, dense in results[world]:
            assert ours == pytest.approx(norm, rel=1e-12)
            torch.testing.assert_close(dense, gradient, rtol=1e-12, atol=1e-14)
