"""Initial weights: slices of one full weight on any grid, and the numbers of torch's own inits."""

from __future__ import annotations

import math
from copy import deepcopy
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import commgrid
from commgrid.collectives import all_gather
from commgrid.errors import SpecError
from commgrid.expert import GroupedExperts
from commgrid.parameters import placements
from commgrid.tensor_parallel import ColumnParallelLinear, QKVParallelLinear, initialize_parameters
from commgrid.tensor_parallel.init import Init, draw, other_random_state, seed_of, tile_shape
from commgrid.testing import run_on_ranks

KNOWN: dict[str, Init] = {
    "normal": nn.init.normal_,
    "normal of a std": partial(nn.init.normal_, mean=0.5, std=0.02),
    "uniform": nn.init.uniform_,
    "uniform of bounds": partial(nn.init.uniform_, a=-0.3, b=0.1),
    "truncated": partial(nn.init.trunc_normal_, std=0.5, a=-1, b=0.5),
    "tail": partial(nn.init.trunc_normal_, a=2, b=3),
    "xavier uniform": nn.init.xavier_uniform_,
    "xavier normal": partial(nn.init.xavier_normal_, gain=2.0),
    "kaiming uniform": partial(nn.init.kaiming_uniform_, a=math.sqrt(5)),
    "kaiming normal": partial(nn.init.kaiming_normal_, mode="fan_out", nonlinearity="relu"),
    "zeros": nn.init.zeros_,
    "ones": nn.init.ones_,
    "constant": partial(nn.init.constant_, val=0.1),
}
RANDOM = list(KNOWN)[:-3]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def ranks(rank: int, size: int) -> Any:
    return SimpleNamespace(rank=rank, size=size, name="tp")


def slices(init: Init, shape: tuple[int, ...], dim: int, size: int, dtype: torch.dtype) -> Tensor:
    """Every rank's draw under one random state, put together again."""
    parts = []
    for rank in range(size):
        local = list(shape)
        local[dim] = -(-local[dim] // size)
        parameter = nn.Parameter(torch.full(local, 7.0, dtype=dtype))
        torch.manual_seed(3)
        draw(parameter, shape, init, dim, ranks(rank, size))
        parts.append(parameter.detach())
    return torch.cat(parts, dim)


def whole(init: Init, *shape: int, seed: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    parameter = torch.empty(shape, dtype=dtype)
    torch.manual_seed(seed)
    draw(parameter, shape, init, None, ranks(0, 1))
    return parameter


@pytest.mark.parametrize("name", KNOWN)
def test_slices_of_every_size_make_up_one_weight(name: str) -> None:
    for dtype in DTYPES:
        for shape in ((12, 10), (7, 9), (2, 6, 8), (4, 270, 2)):
            one = slices(KNOWN[name], shape, 0, 1, dtype)
            assert one.shape == shape
            for dim, size in ((0, 2), (1, 2), (0, 5), (-1, 4)):
                found = slices(KNOWN[name], shape, dim, size, dtype)
                assert torch.equal(found.narrow(dim, 0, shape[dim]), one), (dtype, shape, dim, size)
                assert not found.narrow(dim, shape[dim], found.shape[dim] - shape[dim]).any()


@pytest.mark.parametrize("name", RANDOM)
def test_slices_that_begin_within_tiles(name: str) -> None:
    shape = (300, 520)
    one = slices(KNOWN[name], shape, 0, 1, torch.float32)
    for dim, size in ((0, 2), (1, 5), (0, 7)):
        found = slices(KNOWN[name], shape, dim, size, torch.float32)
        assert torch.equal(found.narrow(dim, 0, shape[dim]), one), (dim, size)


@pytest.mark.parametrize("name", RANDOM)
def test_a_tile_is_what_torch_fills_with_its_generator(name: str) -> None:
    found = whole(KNOWN[name], 40, 30)
    torch.manual_seed(3)
    seed = int(torch.randint(2**63 - 1, ()))
    expected, generator = (
        torch.empty(40, 30),
        torch.Generator().manual_seed(seed_of(f"{seed}/[0, 0]")),
    )
    KNOWN[name](expected, generator=generator)  # type: ignore[call-arg]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", RANDOM)
def test_weights_of_many_tiles_are_distributed_as_torch_fills_them(name: str) -> None:
    """The fans of xavier and kaiming are those of the full shape."""
    shape = (600, 400)
    ours = slices(KNOWN[name], shape, 0, 4, torch.float64)
    torch.manual_seed(4)
    theirs = torch.empty(shape, dtype=torch.float64)
    KNOWN[name](theirs)
    scale = max(theirs.std().item(), theirs.abs().max().item() / 10)
    for share in (0.001, 0.02, 0.25, 0.5, 0.75, 0.98, 0.999):
        one, other = (t.flatten().kthvalue(round(share * t.numel())).values for t in (ours, theirs))
        assert abs(one - other) < 0.04 * scale, share
    assert abs(ours.mean() - theirs.mean()) < 0.01 * scale
    if "normal" not in name:
        torch.testing.assert_close(ours.aminmax(), theirs.aminmax(), rtol=1e-3, atol=1e-3 * scale)


def test_fp32_has_the_weights_of_fp64_and_16_bits_their_rounding() -> None:
    for name in RANDOM:
        single = whole(KNOWN[name], 30, 20)
        for dtype in DTYPES:
            assert torch.equal(whole(KNOWN[name], 30, 20, dtype=dtype), single.to(dtype)), name
    exact = torch.full((3, 2), 0.1, dtype=torch.float64)
    assert torch.equal(whole(KNOWN["constant"], 3, 2, dtype=torch.float64), exact)


def test_a_rank_draws_the_tiles_that_its_slice_touches_and_no_others() -> None:
    drawn = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is torch.ops.aten.normal_.default:
                drawn.append(tuple(args[0].shape))
            return func(*args, **(kwargs or {}))

    column = torch.empty(512, 16)  # columns 250 to 266 of 2²⁴
    with Watch():
        draw(column, (512, 2**24), nn.init.normal_, 1, ranks(0, 2**20))
        assert drawn == [(256, 256)] * 2
        draw(torch.empty(4, 10), (40, 10), nn.init.normal_, 0, ranks(3, 10))
        assert drawn[2:] == [(40, 10)]
        draw(torch.empty(200, 10), (600, 10), nn.init.normal_, 0, ranks(1, 3))
        assert drawn[3:] == [(256, 10)] * 2


def test_parameters_of_any_strides() -> None:
    full = whole(nn.init.normal_, 12, 10)
    base = torch.zeros(24, 20)
    padded, stack = torch.empty(12, 11), torch.empty(3, 12, 10)
    for target in (torch.empty(10, 12).t(), base[::2, ::2], stack[1], padded[:, 1:]):
        torch.manual_seed(3)
        draw(target, (12, 10), nn.init.normal_, None, ranks(0, 1))
        assert torch.equal(target, full)
    assert not base[1::2].any()
    assert not base[:, 1::2].any()


def test_threads_change_no_bit() -> None:
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append([whole(KNOWN[name], 256, 301) for name in ("normal", "truncated", "tail")])
    finally:
        torch.set_num_threads(before)
    for one, other in pairwise(found):
        assert all(map(torch.equal, one, other))


def test_nothing_to_draw() -> None:
    for shape in ((0,), (3, 0), (0, 3)):
        assert whole(nn.init.normal_, *shape).shape == shape
    assert whole(nn.init.normal_) != 0
    assert not slices(nn.init.normal_, (3, 2), 0, 8, torch.float32)[3:].any()


def test_what_only_the_callable_knows_or_torch_refuses() -> None:
    """These get the full weight, and so torch's own error where there is one."""
    generator = torch.Generator().manual_seed(5)
    found = whole(partial(nn.init.normal_, generator=generator), 4, 4)
    assert torch.equal(found, torch.empty(4, 4).normal_(generator=generator.manual_seed(5)))
    refused: list[tuple[Any, str]] = [
        (partial(nn.init.normal_, 0.0, 0.02), "float"),
        (partial(nn.init.normal_, std=-1.0), "std >= 0"),
        (partial(nn.init.normal_, deviation=1.0), "deviation"),
        (partial(nn.init.uniform_, a=1.0, b=0.0), "from > to|from <= to|but found from"),
        (partial(nn.init.kaiming_normal_, mode="fan"), "Mode fan not supported"),
        (partial(nn.init.kaiming_normal_, nonlinearity="what"), "Unsupported nonlinearity"),
        (partial(nn.init.xavier_normal_, mode="fan_in"), "mode"),
    ]
    for init, said in refused:
        with pytest.raises((ValueError, TypeError, RuntimeError, AttributeError), match=said):
            draw(nn.Parameter(torch.empty(2, 4)), (4, 4), init, 0, ranks(1, 2))
    with pytest.raises(ValueError, match="fewer than 2 dimensions"):
        whole(nn.init.xavier_uniform_, 4)


def sparse(weight: Tensor) -> Tensor:
    return nn.init.sparse_(weight, sparsity=0.5)


def own(weight: Tensor) -> None:
    weight.normal_(0, 1 / weight.shape[1]).sub_(weight.mean())


@pytest.mark.parametrize("init", [nn.init.orthogonal_, nn.init.eye_, sparse, own])
def test_an_init_that_is_not_element_wise_gets_the_full_weight(init: Init) -> None:
    torch.manual_seed(3)
    full = torch.empty(7, 6)
    init(full)
    assert torch.equal(slices(init, (7, 6), 0, 3, torch.float32)[:7], full)
    assert torch.equal(slices(init, (7, 6), 1, 2, torch.float32), full)


def test_dirac_over_output_channels() -> None:
    full = nn.init.dirac_(torch.empty(6, 4, 3))
    assert torch.equal(slices(nn.init.dirac_, (6, 4, 3), 0, 2, torch.float32), full)


@pytest.mark.parametrize("name", KNOWN)
def test_the_random_state_after_a_draw_does_not_depend_on_the_slice(name: str) -> None:
    states = []
    for rank, size in ((0, 1), (0, 2), (3, 4), (7, 8)):
        parameter = nn.Parameter(torch.empty(8 // size, 6))
        torch.manual_seed(0)
        draw(parameter, (8, 6), KNOWN[name], 0, ranks(rank, size))
        states.append(torch.get_rng_state())
    assert all(torch.equal(state, states[0]) for state in states)


# -- are they random? ---------------------------------------------------------------------------


def uncorrelated(one: Tensor, other: Tensor) -> bool:
    """Neither the numbers nor their sizes, to 4.5 times what chance has."""
    pairs = ((one, other), (one.square() - 1, other.square() - 1), (one.square() - 1, other))
    for a, b in pairs:
        r = (a * b).mean() / (a.square().mean() * b.square().mean()).sqrt()
        if abs(r.item()) * math.sqrt(a.numel()) >= 4.5:
            return False
    return True


def test_tiles_have_nothing_in_common() -> None:
    tiles = [
        tile for row in whole(nn.init.normal_, 1024, 1024).split(256) for tile in row.split(256, 1)
    ]
    for i, one in enumerate(tiles):
        for other in tiles[:i]:
            assert uncorrelated(one, other)
            assert uncorrelated(one[1:], other[:-1])


def test_seeds_names_and_draws_have_nothing_in_common() -> None:
    names = [seed_of(f"{seed}/layers.{layer}.up") for seed in (0, 1) for layer in (0, 1, 10)]
    drawn = [whole(nn.init.normal_, 256, 256, seed=s) for s in (0, 1, 2, 2**31, *names)]
    with other_random_state(0):
        for _ in range(3):
            drawn.append(torch.empty(256, 256))
            draw(drawn[-1], (256, 256), nn.init.normal_, None, ranks(0, 1))
    drawn.pop(-3)  # the first of seed 0 again
    for i, one in enumerate(drawn):
        for other in drawn[:i]:
            assert uncorrelated(one, other)


def test_experts_and_filters_have_tiles_of_their_own() -> None:
    assert tile_shape((8, 1024, 512)) == [1, 256, 256]
    assert tile_shape((512, 512, 3, 3)) == [28, 256, 3, 3]
    experts = whole(nn.init.normal_, 4, 256, 256)
    assert len({tuple(one[0, :4].tolist()) for one in experts}) == 4


# -- models -------------------------------------------------------------------------------------


def test_attention_of_torch_is_drawn_anew() -> None:
    """Its in_proj_weight kept the numbers of the constructor, or after to_empty any memory."""
    for options in ({}, {"kdim": 6, "vdim": 4, "add_bias_kv": True}):
        found = []
        for seed in (0, 1, 2):
            torch.manual_seed(seed)
            with torch.device("meta"):
                model = nn.Sequential(nn.Linear(8, 8), nn.MultiheadAttention(8, 2, **options))
            model.to_empty(device="cpu")
            for parameter in model.parameters():
                nn.init.constant_(parameter, math.nan)
            initialize_parameters(model, seed=7 + seed // 2)
            found.append(model.state_dict())
        for name in found[0]:
            assert torch.equal(found[0][name], found[1][name]), name
            constant = name.endswith(("in_proj_bias", "out_proj.bias"))
            assert torch.equal(found[0][name], found[2][name]) == constant, name
        names = [name for name in found[0] if name.endswith(("in_proj_weight", "q_proj_weight"))]
        assert len(names) == 1
        weight = found[0][names[0]]
        bound = math.sqrt(6 / sum(weight.shape))  # as torch's constructor: xavier_uniform_
        assert 0.9 * bound < weight.abs().max() <= bound


class Scaled(nn.Linear):
    """A layer with a parameter that its inherited reset_parameters does not know."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = nn.Parameter(torch.ones(4))


class Mixture(nn.Module):
    """Weights in a list that the module around it fills."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.empty(3), torch.empty(0)])

    def reset_parameters(self) -> None:
        for weight in self.weights:
            nn.init.normal_(weight)


def test_a_parameter_that_nothing_draws_is_refused() -> None:
    model = nn.Sequential(Scaled(), nn.ParameterDict({"a": torch.ones(1)}))
    with pytest.raises(SpecError, match=r"0\.scale of Scaled, 1\.a of ParameterDict; expected"):
        initialize_parameters(model, seed=0)
    with pytest.raises(SpecError, match=r"weight of LazyLinear"):
        initialize_parameters(nn.LazyLinear(3, bias=False), seed=0)
    initialize_parameters(nn.Sequential(Scaled(), nn.Linear(2, 2))[1], seed=0)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_parameter_may_be_drawn_by_a_module_around_it() -> None:
    tied = nn.Sequential(nn.Embedding(4, 3), nn.Module())
    tied[1].head = tied[0].weight
    # An inference tensor does not count changes.
    for model, mode in (
        (Mixture(), torch.no_grad()), (tied, torch.no_grad()),
        (nn.Linear(2, 2), torch.inference_mode()),
    ):  # fmt: skip
        with mode:
            filled = deepcopy(model)
            for parameter in filled.parameters():
                parameter.fill_(7.0)
            initialize_parameters(filled, seed=0)
            assert all((parameter != 7.0).all() for parameter in filled.parameters())


# -- layers -------------------------------------------------------------------------------------


def of_no_memory() -> None:
    commgrid.initialize()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with torch.device("meta"):
        QKVParallelLinear(8, 2)
    GroupedExperts(4, 8, 2, ep="dp", etp="tp", device="meta")
    assert torch.equal(torch.get_rng_state(), before)
    with FakeTensorMode():
        layer = ColumnParallelLinear(4, 8)
        initialize_parameters(layer, seed=0)
        experts = GroupedExperts(4, 8, 2, ep="dp", etp="tp")
    assert layer.weight is not None
    assert (layer.weight.shape, experts.up.shape) == ((8, 4), (2, 8, 4))


def test_nothing_is_drawn_where_there_is_no_memory() -> None:
    run_on_ranks(of_no_memory, 1)


def drawn(ep: int, etp: int, gated: bool, kind: str) -> dict[str, Tensor]:
    """The full weights of experts that ep × etp ranks drew."""
    grid = commgrid.initialize(tp=2, ep=ep, etp=etp)
    init: Init | None = None
    if kind == "normal":
        init = partial(nn.init.normal_, std=0.02)
    elif kind == "orthogonal":

        def init(weight: Tensor) -> object:  # of one expert, and gated of two halves  # fmt: skip
            assert weight.dim() == 2 + gated
            return [nn.init.orthogonal_(half) for half in weight.view(-1, *weight.shape[-2:])]

    down = nn.init.orthogonal_ if kind == "orthogonal" else init
    layer = GroupedExperts(6, 8, 4, gated=gated, init=init, init_down=down)
    torch.manual_seed(grid.rank)
    initialize_parameters(layer, seed=2)
    full = {}
    for placement in placements(layer):
        whole = placement.parameter.detach()
        for dim, group in placement.shards:
            whole = all_gather(whole, group.name, dim=dim)
        full[placement.name] = whole
    commgrid.destroy()
    return full


@pytest.mark.full("False-normal", "False-orthogonal", "True-default", "True-normal")
@pytest.mark.parametrize("kind", ["default", "normal", "orthogonal"])
@pytest.mark.parametrize("gated", [False, True])
def test_experts_draw_one_weight_on_any_grid(gated: bool, kind: str) -> None:
    reference = run_on_ranks(drawn, 4, 1, 1, gated, kind)[0]
    for ep, etp in ((4, 1), (2, 2), (1, 2), (2, 1)):
        for found in run_on_ranks(drawn, 4, ep, etp, gated, kind):
            for name, weight in reference.items():
                assert torch.equal(found[name], weight), (ep, etp, name)
    up, down = reference["up"], reference["down"]
    assert up.shape == ((4, 2, 8, 6) if gated else (4, 8, 6))
    assert len({tuple(one.flatten().tolist()) for one in up}) == 4
    if kind == "default":
        assert up.abs().max() <= 6**-0.5
        assert down.abs().max() <= 8**-0.5
        assert up.abs().max() > 0.95 * 6**-0.5
    if kind == "orthogonal":
        eye = torch.eye(6)
        for one in down:
            torch.testing.assert_close(one @ one.t(), eye, rtol=0, atol=1e-5)
