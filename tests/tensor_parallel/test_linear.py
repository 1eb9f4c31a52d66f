"""Column and row layers against the unsharded nn.Linear with the same full weight."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commgrid
from commgrid import CommGridError, GridNotInitializedError, NotInGroupError, ShapeError
from commgrid.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    initialize_parameters,
    sharded_parameters,
)
from tests.ranks import run_on_ranks

# Sums in another order: fp64 is good to some ulps of 64 terms, fp32 to the same in its ulps.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def full_model(bias: bool, dtype: torch.dtype) -> nn.Sequential:
    model = nn.Sequential(
        nn.Linear(16, 32, bias=bias), nn.GELU(), nn.Linear(32, 16, bias=bias)
    ).to(dtype)  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    return model


def block(tp: int, bias: bool, dtype: torch.dtype, gathered: bool) -> None:
    grid = commgrid.initialize(tp=tp)
    reference = full_model(bias, dtype)
    column = ColumnParallelLinear(16, 32, bias=bias, gather_output=gathered, dtype=dtype)
    row = RowParallelLinear(32, 16, bias=bias, input_is_parallel=not gathered, dtype=dtype)
    me = grid.get_local_rank("tp")
    with torch.no_grad():
        for ours, theirs in ((column, reference[0]), (row, reference[2])):
            assert isinstance(theirs, nn.Linear)
            ours.weight.copy_(theirs.weight.chunk(tp, ours.shard_dims["weight"])[me])
            if ours.bias is not None:
                whole = theirs.bias
                ours.bias.copy_(whole.chunk(tp)[me] if ours is column else whole)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(5, 3, 16, dtype=dtype, generator=generator)
    x, x_reference = (inputs.clone().requires_grad_() for _ in range(2))
    upstream = torch.randn(5, 3, 16, dtype=dtype, generator=generator)
    y = row(nn.functional.gelu(column(x)))
    y_reference = reference(x_reference)
    (y * upstream).sum().backward()
    (y_reference * upstream).sum().backward()

    def close(ours: Tensor | None, theirs: Tensor | None) -> None:
        assert ours is not None
        assert theirs is not None
        scale = float(theirs.detach().abs().max())
        bound = TOLERANCE[dtype]
        torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound * scale)

    close(y, y_reference)
    close(x.grad, x_reference.grad)
    for ours, theirs in ((column, reference[0]), (row, reference[2])):
        assert isinstance(theirs, nn.Linear)
        assert theirs.weight.grad is not None
        close(ours.weight.grad, theirs.weight.grad.chunk(tp, ours.shard_dims["weight"])[me])
        if ours.bias is not None:
            assert theirs.bias.grad is not None
            whole = theirs.bias.grad
            close(ours.bias.grad, whole.chunk(tp)[me] if ours is column else whole)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_block_equals_the_unsharded_one(tp: int) -> None:
    def every() -> None:
        for bias in (True, False):
            for dtype in TOLERANCE:
                for gathered in (True, False):
                    block(tp, bias, dtype, gathered)
                    commgrid.destroy()

    run_on_ranks(every, tp)


def weights(tp: int) -> dict[str, Tensor]:
    grid = commgrid.initialize(tp=tp)
    model = nn.Sequential(ColumnParallelLinear(8, 16), RowParallelLinear(16, 8), nn.LayerNorm(8))
    torch.manual_seed(grid.rank)  # whatever the global state is
    initialize_parameters(model, seed=7)
    assert torch.initial_seed() == grid.rank
    sharded = {s.name: s for s in sharded_parameters(model)}
    assert set(sharded) == {"0.weight", "0.bias", "1.weight"}
    return {
        name: commgrid.collectives.all_gather(p.detach(), "tp", dim=sharded[name].dim)
        if name in sharded else p.detach()
        for name, p in model.named_parameters()
    }  # fmt: skip


def test_initial_weights_do_not_depend_on_the_grid() -> None:

    reference = run_on_ranks(weights, 1, 1)[0]
    for tp in (2, 4):
        for found in run_on_ranks(weights, 4, tp):
            assert all(torch.equal(found[name], reference[name]) for name in reference)
    assert reference["0.weight"].abs().max() <= 1 / 8**0.5


def kept() -> None:
    grid = commgrid.initialize(tp=2)
    layer = ColumnParallelLinear(4, 8)
    x = torch.ones(2, 4)
    expected = layer(x)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x), expected)
        twin.load_state_dict(layer.state_dict())
        assert torch.equal(twin(x), expected)
    # Rebuilt: a layer finds its group again. Gone: it says so, and who it is.
    commgrid.destroy()
    with pytest.raises(GridNotInitializedError, match=r"ColumnParallelLinear\(4, 8\): its group"):
        layer(x)
    commgrid.initialize(tp=2)
    assert torch.equal(layer(x), expected)
    commgrid.destroy()
    commgrid.initialize(tp=4)
    with pytest.raises(ShapeError, match="made for group 'tp' of 2 ranks, but grid 'default' now"):
        layer(x)
    assert grid.is_destroyed
    grid = commgrid.get_grid()
    bare = RowParallelLinear(4, 8, group=grid.get_group("tp"))
    assert torch.equal(copy.deepcopy(bare)(x[:, :1]), bare(x[:, :1]))
    with pytest.raises(CommGridError, match=r"given a bare ProcessGroup .* cannot be"):
        pickle.dumps(bare)


def unregistered() -> None:
    grid = commgrid.HyperCommGrid(commgrid.GridSpec.build(tp=2))
    layer = ColumnParallelLinear(4, 8, grid=grid)
    assert copy.deepcopy(layer)(torch.ones(1, 4)).shape == (1, 4)
    with pytest.raises(CommGridError, match="a grid 'default' that is not in the registry"):
        pickle.dumps(layer)
    grid.destroy()


def test_a_layer_of_an_unregistered_grid_is_not_pickled() -> None:
    run_on_ranks(unregistered, 2)


def test_layers_copy_pickle_and_outlive_a_grid() -> None:
    run_on_ranks(kept, 4)


BAD: list[tuple[Any, str]] = [
    (lambda: ColumnParallelLinear(4, 6), r"ColumnParallelLinear\(4, 6\): out_features=6 cannot be"),
    (lambda: RowParallelLinear(6, 4), r"RowParallelLinear\(6, 4\): in_features=6 cannot be shared"),
    (lambda: ColumnParallelLinear(4, 8)(torch.ones(2, 5)), r"\(2, 5\) should have 4 features"),
    (lambda: RowParallelLinear(8, 4)(torch.ones(2, 8)), r"\(2, 8\) should have 2 features .*'tp'"),
]


def test_wrong_sizes_are_named() -> None:
    def wrong() -> None:
        commgrid.initialize(tp=4, groups={"half": {"of": "tp", "pick": [0, 1]}})
        for call, said in BAD:
            with pytest.raises(ShapeError, match=said):
                call()
        if commgrid.get_grid().rank > 1:
            with pytest.raises(NotInGroupError, match="is not in group 'half'"):
                ColumnParallelLinear(4, 8, group="half")

    run_on_ranks(wrong, 4)
