"""What layers draw: slices of the full weight for inits that are known, and what they are."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import commgrid
from commgrid.collectives import all_gather
from commgrid.expert import GroupedExperts
from commgrid.parameters import placements
from commgrid.tensor_parallel import ColumnParallelLinear, QKVParallelLinear, initialize_parameters
from commgrid.tensor_parallel.init import Init, draw
from commgrid.tensor_parallel.known_init import law_of
from commgrid.testing import run_on_ranks

KNOWN: dict[str, Init] = {
    "normal": nn.init.normal_,
    "normal of a std": partial(nn.init.normal_, mean=0.5, std=0.02),
    "uniform": nn.init.uniform_,
    "uniform of bounds": partial(nn.init.uniform_, a=-0.3, b=0.1),
    "truncated": partial(nn.init.trunc_normal_, std=0.5, a=-1, b=0.5),
    "hardly truncated": partial(nn.init.trunc_normal_, std=0.02),
    "xavier uniform": nn.init.xavier_uniform_,
    "xavier normal": partial(nn.init.xavier_normal_, gain=2.0),
    "kaiming uniform": partial(nn.init.kaiming_uniform_, a=math.sqrt(5)),
    "kaiming normal": partial(nn.init.kaiming_normal_, mode="fan_out", nonlinearity="relu"),
    "zeros": nn.init.zeros_,
    "ones": nn.init.ones_,
    "constant": partial(nn.init.constant_, val=0.25),
}


def slices(init: Init, shape: tuple[int, ...], dim: int, size: int, dtype: torch.dtype) -> Tensor:
    """Every rank's draw under one random state, put together again."""
    parts = []
    for rank in range(size):
        local = list(shape)
        local[dim] = -(-local[dim] // size)
        parameter = nn.Parameter(torch.full(local, 7.0, dtype=dtype))
        torch.manual_seed(3)
        group: Any = SimpleNamespace(rank=rank, size=size)
        draw(parameter, shape, init, dim, group)
        parts.append(parameter.detach())
    return torch.cat(parts, dim)


@pytest.mark.parametrize("name", KNOWN)
def test_slices_of_every_size_make_up_one_weight(name: str) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for shape in ((12, 10), (7, 9), (13, 4), (2, 6, 8)):
            one = slices(KNOWN[name], shape, 0, 1, dtype)
            assert one.shape == shape
            for dim, size in ((0, 2), (1, 2), (0, 5), (0, 16), (len(shape) - 1, 4)):
                found = slices(KNOWN[name], shape, dim, size, dtype)
                assert torch.equal(found.narrow(dim, 0, shape[dim]), one), (dtype, shape, dim, size)
                assert not found.narrow(dim, shape[dim], found.shape[dim] - shape[dim]).any()


@pytest.mark.parametrize("name", KNOWN)
def test_known_inits_are_distributed_as_torch_fills_them(name: str) -> None:
    shape = (600, 400)
    ours = slices(KNOWN[name], shape, 0, 1, torch.float64)
    torch.manual_seed(4)
    theirs = torch.empty(shape, dtype=torch.float64)
    KNOWN[name](theirs)
    scale = max(theirs.std().item(), theirs.abs().max().item() / 10, 1e-9)
    for share in (0.001, 0.02, 0.25, 0.5, 0.75, 0.98, 0.999):
        one, other = (t.flatten().kthvalue(round(share * t.numel())).values for t in (ours, theirs))
        assert abs(one - other) < 0.04 * scale, share
    assert abs(ours.mean() - theirs.mean()) < 0.01 * scale
    if "normal" not in name and name != "hardly truncated":
        torch.testing.assert_close(ours.aminmax(), theirs.aminmax(), rtol=1e-3, atol=1e-3 * scale)


def test_what_only_the_callable_knows_or_torch_refuses() -> None:
    unknown: list[Any] = [
        nn.init.orthogonal_, nn.init.eye_, lambda weight: weight.normal_(),
        partial(nn.init.normal_, generator=torch.Generator()), partial(nn.init.normal_, 0.0, 0.02),
        partial(nn.init.normal_, std=-1.0), partial(nn.init.normal_, std=math.nan),
        partial(nn.init.normal_, deviation=1.0), partial(nn.init.uniform_, a=1.0, b=0.0),
        partial(nn.init.uniform_, b=math.inf), partial(nn.init.trunc_normal_, std=0.0),
        partial(nn.init.trunc_normal_, a=3.0, b=4.0), partial(nn.init.kaiming_normal_, mode="fan"),
        partial(nn.init.kaiming_normal_, nonlinearity="what"),
    ]  # fmt: skip
    for init in unknown:
        assert law_of(init, (4, 4)) is None
    assert law_of(nn.init.xavier_uniform_, (4,)) is None
    group: Any = SimpleNamespace(rank=1, size=2)
    with pytest.raises(ValueError, match="Mode fan not supported"):
        draw(nn.Parameter(torch.empty(2, 4)), (4, 4), unknown[-2], 0, group)


@pytest.mark.parametrize("init", [nn.init.orthogonal_, partial(nn.init.trunc_normal_, a=2, b=3)])
def test_an_unknown_init_gets_the_full_weight(init: Init) -> None:
    torch.manual_seed(3)
    full = torch.empty(7, 6)
    init(full)
    assert torch.equal(slices(init, (7, 6), 0, 3, torch.float32)[:7], full)
    assert torch.equal(slices(init, (7, 6), 1, 2, torch.float32), full)


@pytest.mark.parametrize("name", KNOWN)
def test_the_random_state_after_a_draw_does_not_depend_on_the_slice(name: str) -> None:
    states = []
    for rank, size in ((0, 1), (0, 2), (3, 4), (7, 8)):
        parameter = nn.Parameter(torch.empty(8 // size, 6))
        torch.manual_seed(0)
        group: Any = SimpleNamespace(rank=rank, size=size)
        draw(parameter, (8, 6), KNOWN[name], 0, group)
        states.append(torch.get_rng_state())
    assert all(torch.equal(state, states[0]) for state in states)


def test_every_draw_has_numbers_of_its_own() -> None:
    torch.manual_seed(0)
    group: Any = SimpleNamespace(rank=0, size=1)
    drawn = []
    for _ in range(50):
        parameter = nn.Parameter(torch.empty(3))
        draw(parameter, (3,), nn.init.normal_, None, group)
        drawn.append(parameter.detach())
    assert len(torch.cat(drawn).unique()) == 150


# -- through the layers -------------------------------------------------------------------------


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
