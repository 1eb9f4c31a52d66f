"""Column and row layers against the unsharded nn.Linear with the same full weight."""

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import commgrid
from commgrid import (
    CommGridError,
    GridNotInitializedError,
    NotInGroupError,
    ShapeError,
    SpecError,
)
from commgrid.collectives import gather_from_group, scatter_to_group
from commgrid.parameters import placements
from commgrid.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    initialize_parameters,
)
from commgrid.testing import run_on_ranks
from tests.sizes import nightly

# Sums in another order: fp64 is good to some ulps of 64 terms, fp32 to the same in its ulps. bf16
# has 8 bits: products are exact to 2^-9 each, and what n ranks round to bf16 before they are
# added is off by 2^-9 of the largest; 2^-5 of the scale covers both layers and their gradients.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-5}


@dataclass(frozen=True)
class Case:
    """One way to run a column layer and a row layer as one block."""

    dtype: torch.dtype = torch.float64
    bias: bool = True
    gathered: bool = False
    skip_bias_add: bool = False
    sequence_dim: int | None = None  # None: no sequence parallelism
    shape: tuple[int, ...] = (8, 3)  # leading dims of x


CASES = [
    *[Case(dtype, bias, gathered, sequence_dim=dim)
      for dtype in TOLERANCE for bias in (True, False) for gathered in (True, False)
      for dim in (None, 0)],
    *[Case(shape=shape, sequence_dim=dim)
      for shape, dim in (
          ((8,), 0), ((2, 8, 3), 1), ((2, 3, 8), -2), ((), None), ((2, 2, 2), None))],
    *[Case(skip_bias_add=True, gathered=gathered, sequence_dim=dim)
      for gathered in (True, False) for dim in (None, 0)],
]  # fmt: skip


def reference_block(case: Case) -> nn.Sequential:
    model = nn.Sequential(
        nn.Linear(16, 32, bias=case.bias), nn.GELU(), nn.Linear(32, 16, bias=case.bias)
    ).to(case.dtype)  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return model


def close(ours: Tensor | None, theirs: Tensor | None, what: object = "") -> None:
    """Equal within the dtype's tolerance of the largest element."""
    assert ours is not None, what
    assert theirs is not None, what
    bound = TOLERANCE[theirs.dtype]
    scale = float(theirs.detach().abs().max())
    torch.testing.assert_close(
        ours, theirs, rtol=bound, atol=bound * scale, msg=lambda m: f"{what}: {m}"
    )


def block(case: Case, tp: int) -> None:
    me = commgrid.get_grid().get_local_rank("tp")
    reference = reference_block(case)
    options = {
        "bias": case.bias, "skip_bias_add": case.skip_bias_add, "dtype": case.dtype,
        "sequence_parallel": case.sequence_dim is not None, "sequence_dim": case.sequence_dim or 0,
    }  # fmt: skip
    column = ColumnParallelLinear(16, 32, gather_output=case.gathered, **options)
    row = RowParallelLinear(32, 16, input_is_parallel=not case.gathered, **options)
    pairs = [(column, reference[0]), (row, reference[2])]
    with torch.no_grad():
        for ours, theirs in pairs:
            assert isinstance(theirs, nn.Linear)
            ours.weight.copy_(theirs.weight.chunk(tp, ours.shard_dims["weight"])[me])
            if case.bias:
                ours.bias.copy_(theirs.bias.chunk(tp)[me] if ours is column else theirs.bias)
    generator = torch.Generator().manual_seed(1)
    x_full = torch.randn(*case.shape, 16, generator=generator).to(case.dtype).requires_grad_()
    upstream = torch.randn(*case.shape, 16, generator=generator).to(case.dtype)

    def mine(full: Tensor) -> Tensor:
        dim = case.sequence_dim
        return full if dim is None else full.chunk(tp, dim)[me]

    x = mine(x_full.detach()).clone().requires_grad_()
    if case.skip_bias_add:
        hidden, bias = column(x)
        y, row_bias = row(F.gelu(hidden + bias))
        y = y + row_bias
    else:
        y = row(F.gelu(column(x)))
    y_full = reference(x_full)
    y.backward(mine(upstream))
    y_full.backward(upstream)

    close(y, mine(y_full), (case, "y"))
    close(x.grad, mine(x_full.grad), (case, "x"))
    for ours, theirs in pairs:
        assert isinstance(theirs, nn.Linear)
        dim = ours.shard_dims["weight"]
        close(ours.weight.grad, theirs.weight.grad.chunk(tp, dim)[me], (case, "weight"))
        if case.bias:
            whole, found = theirs.bias.grad, ours.bias.grad
            if ours is row and case.sequence_dim is not None:  # a partial sum, as it says itself
                assert ours.partial == ("bias",)
                found = commgrid.collectives.all_reduce(found, "tp")
            close(found, whole.chunk(tp)[me] if ours is column else whole, (case, "bias"))


@pytest.mark.full("8")
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_block_equals_the_unsharded_one(tp: int) -> None:
    def every() -> None:
        commgrid.initialize(tp=tp)
        for case in CASES:
            block(case, tp)

    run_on_ranks(every, tp)


def lockstep() -> None:
    """The whole block as a function of replicated tensors, all ranks nudging the same element."""
    commgrid.initialize(tp=2)
    for sequence_parallel in (False, True):
        options = {"sequence_parallel": sequence_parallel, "dtype": torch.float64}
        column, row = ColumnParallelLinear(4, 6, **options), RowParallelLinear(6, 4, **options)
        block = nn.Sequential(column, nn.GELU(), row)
        initialize_parameters(block, seed=0)

        def sharded(x: Tensor, block: nn.Module = block) -> Tensor:
            y = block(scatter_to_group(x, "tp", dim=0))
            return gather_from_group(y, "tp", dim=0)

        x = torch.randn(4, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        whole = sharded if sequence_parallel else block
        assert torch.autograd.gradcheck(whole, (x.requires_grad_(),))


def test_gradcheck() -> None:
    run_on_ranks(lockstep, 2)


def tied() -> None:
    grid = commgrid.initialize(tp=2)
    owner = ColumnParallelLinear(4, 8, bias=False)
    sharing = ColumnParallelLinear(4, 8, bias=False, weight=owner.weight)
    bare = ColumnParallelLinear(4, 8, bias=False, weight=False)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    assert sharing.weight is owner.weight
    assert [name for name, _ in bare.named_parameters()] == []
    assert torch.equal(bare(x, owner.weight), owner(x))
    before = owner.weight.clone()
    sharing.reset_parameters()  # the owner draws it, and nobody else
    assert torch.equal(owner.weight, before)
    (owner(x) + sharing(x) + bare(x, weight=owner.weight)).sum().backward()
    together = owner.weight.grad.clone()
    owner.zero_grad()
    owner(x).sum().backward()
    close(together, 3 * owner.weight.grad)
    names = [placement.name for placement in placements(nn.ModuleList([owner, sharing]))]
    assert names == ["0.weight"]
    with pytest.raises(ShapeError, match=r"made without a weight .* of shape \(4, 4\)"):
        bare(x)
    with pytest.raises(ShapeError, match=r"a weight of shape \(8, 4\), expected \(4, 4\)"):
        bare(x, torch.ones(8, 4))
    with pytest.raises(ShapeError, match=r"a weight of shape \(8, 4\), expected \(4, 4\) on each"):
        ColumnParallelLinear(4, 8, weight=nn.Parameter(torch.ones(8, 4)))
    assert grid.size("tp") == 2


def test_tied_and_external_weights() -> None:
    run_on_ranks(tied, 2)


def from_meta() -> None:
    commgrid.initialize(tp=2)

    def make(device: str | None) -> nn.Module:
        return nn.Sequential(
            VocabParallelEmbedding(7, 8, device=device),
            ColumnParallelLinear(8, 16, device=device),
            RowParallelLinear(16, 8, device=device),
        )

    real, meta = make(None), make("meta")
    with torch.device("meta"):
        also_meta = make(None)
    for model in (meta, also_meta):
        assert all(parameter.is_meta for parameter in model.parameters())
        initialize_parameters(model, seed=5)  # nothing to draw yet
        model.to_empty(device="cpu")
        initialize_parameters(model, seed=5)
    initialize_parameters(real, seed=5)
    head = VocabParallelHead(8, 7, weight=meta[0].weight)
    tied = nn.ModuleList([VocabParallelEmbedding(7, 8, device="meta")])
    tied.append(VocabParallelHead(8, 7, weight=tied[0].weight))
    tied.to_empty(device="cpu")  # which gives each module a parameter of its own
    with pytest.raises(SpecError, match="its weight is no longer the one it was tied to"):
        initialize_parameters(tied, seed=5)
    tied[1].tie_weight(tied[0].weight)
    initialize_parameters(tied, seed=5)
    assert tied[1].weight is tied[0].weight
    assert copy.deepcopy(head).weight is not head.weight
    for name, parameter in real.named_parameters():
        assert torch.equal(parameter, meta.get_parameter(name))
        assert torch.equal(parameter, also_meta.get_parameter(name))


def test_made_on_the_meta_device() -> None:
    run_on_ranks(from_meta, 2)


def under_autocast() -> None:
    commgrid.initialize(tp=2)
    column, row = ColumnParallelLinear(8, 16), RowParallelLinear(16, 8)
    model = nn.ModuleList([column, row])
    initialize_parameters(model, seed=0)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y = row(F.gelu(column(x)))
    y.sum().backward()
    exact = column.weight.grad.clone()
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        y = row(F.gelu(column(x)))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert column.weight.grad.dtype == x.grad.dtype == torch.float32
    bound = TOLERANCE[torch.bfloat16] * float(exact.abs().max())
    torch.testing.assert_close(column.weight.grad, exact, rtol=0, atol=bound)


def test_autocast() -> None:
    run_on_ranks(under_autocast, 2)


def compiled() -> None:
    grid = commgrid.initialize(tp=2)
    for sequence_parallel in (False, True):
        # The other way inductor compiles it in a whole model, in test_compile.
        backend = "inductor" if nightly() and not sequence_parallel else "aot_eager"
        torch._dynamo.reset()
        column = ColumnParallelLinear(8, 16, sequence_parallel=sequence_parallel)
        row = RowParallelLinear(16, 8, sequence_parallel=sequence_parallel)
        model = nn.ModuleList([column, row])
        initialize_parameters(model, seed=0)

        def run(x: Tensor, column: nn.Module = column, row: nn.Module = row) -> Tensor:
            return row(F.gelu(column(x)))

        found = []
        for function in (run, torch.compile(run, fullgraph=True, backend=backend)):
            model.zero_grad()
            seed = grid.rank if sequence_parallel else 0
            x = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(seed))
            y = function(x.requires_grad_())
            y.square().sum().backward()
            found.append([y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())])
        for eager, fused in zip(*found, strict=True):
            close(fused, eager)


@pytest.mark.full
def test_torch_compile_of_a_whole_block() -> None:
    run_on_ranks(compiled, 2, timeout=300)


def weights(tp: int) -> dict[str, Tensor]:
    grid = commgrid.initialize(tp=tp)
    model = nn.Sequential(ColumnParallelLinear(8, 16), RowParallelLinear(16, 8), nn.LayerNorm(8))
    torch.manual_seed(grid.rank)  # whatever the global state is
    initialize_parameters(model, seed=7)
    assert torch.initial_seed() == grid.rank
    sharded = {p.name: p.shards[0] for p in placements(model) if p.shards}
    assert set(sharded) == {"0.weight", "0.bias", "1.weight"}
    return {
        name: commgrid.collectives.all_gather(p.detach(), "tp", dim=sharded[name][0])
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
    (
        lambda: RowParallelLinear(8, 4, sequence_parallel=True)(torch.ones(6, 1, 2)),
        r"RowParallelLinear\(8, 4\): the sequence of 6 in dim 0 of shape \(6, 1, 2\) .* 'tp'",
    ),
    (
        lambda: ColumnParallelLinear(4, 8, sequence_parallel=True, sequence_dim=1)(
            torch.ones(6, 4)
        ),
        r"input of shape \(6, 4\) has no sequence in dim 1",
    ),
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
