"""Slips in layers of one's own, and in what is put around them: an error each, which names it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commgrid
from commgrid.collectives.group_ref import GroupRef
from commgrid.data_parallel import GradientReducer
from commgrid.errors import CommGridError, ShapeError, SpecError, UnknownGroupError
from commgrid.parameters import ShardedModule, placements
from commgrid.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from commgrid.tensor_parallel.init import draw
from commgrid.testing import run_on_ranks


def ddp_over(group: str | None) -> str:
    """DDP's first step over layers of tp: over all ranks it made both ranks' slices the first's."""
    grid = commgrid.initialize(tp=2)
    model = nn.Sequential(ColumnParallelLinear(4, 8), nn.ReLU(), RowParallelLinear(8, 4))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    try:
        given = {} if group is None else {"process_group": grid.get_group(group)}
        DistributedDataParallel(model, **given)
        DistributedDataParallel(nn.Linear(4, 4))  # a plain module may be over any ranks
        said = "taken"
    except SpecError as error:
        said = str(error)
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
    commgrid.shutdown()
    return said


def test_ddp_would_copy_a_slice_over_another() -> None:
    said = run_on_ranks(ddp_over, 4, None, backend=None, launcher="torchrun")
    assert [line[:90] for line in said] == [
        "DistributedDataParallel over ranks 0-3 would make 0.weight of shape (4, 4) equal on ranks "
    ] * 4
    assert [re.search(r"equal on ranks (\S+),", line)[1] for line in said] == [  # type: ignore[index]
        "0-1", "0-1", "2-3", "2-3"
    ]  # fmt: skip
    assert "process_group=commgrid.get_group('dp')" in said[0]
    assert run_on_ranks(ddp_over, 4, "dp", backend=None, launcher="torchrun") == ["taken"] * 4


class Gain(ShardedModule):
    """A gain of its own for each feature."""

    def __init__(self, shard_dims: dict[str, int], group: object = None) -> None:
        super().__init__()
        if group != "none":
            self.group = group or GroupRef("tp")  # type: ignore[assignment]
        self.shard_dims = shard_dims  # type: ignore[misc]
        self.gain = nn.Parameter(torch.ones(4))
        self.register_parameter("bias", None)


@pytest.fixture
def grid() -> Iterator[commgrid.HyperCommGrid]:
    yield commgrid.initialize()
    commgrid.shutdown()


@pytest.mark.usefixtures("grid")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Gain({"gian": 0}), r"0: Gain.shard_dims names 'gian', .* it has gain, bias"),
        (lambda: Gain({"gain": 5}), r"'gain' is cut along dim 5; it has shape \(4,\)"),
        (lambda: Gain({"gain": 0}, "tp"), r"0: Gain.group is 'tp': .* GroupRef\('tp'\)"),
        (lambda: Gain({"gain": 0}, "none"), r"0: Gain.group is None"),
    ],
    ids=["no such parameter", "no such dim", "a bare name", "no group"],
)
def test_what_a_layer_says_of_itself(make: Callable[[], Gain], said: str) -> None:
    """A name that no parameter has was taken, and the norm of the whole model was too small."""
    with pytest.raises(SpecError, match=said):
        GradientReducer(nn.Sequential(make()))


@pytest.mark.usefixtures("grid")
def test_a_layer_may_name_a_bias_that_it_is_made_without() -> None:
    model = nn.Sequential(Gain({"gain": 0, "bias": 0}))
    GradientReducer(model).close()
    assert [(p.name, p.shards[0][0]) for p in placements(model)] == [("0.gain", 0)]


def other_tensor(weight: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(weight)


def slices() -> list[str]:
    """What `draw` says of shapes that are no slice, on the first rank of two."""
    commgrid.initialize(tp=2)
    group = GroupRef("tp")
    weight = nn.Parameter(torch.empty(4, 8))
    said = []
    for full, dim in (((9, 8), 0), ((16, 8), 0), ((8, 16), 0), ((8, 8), 1), ((8, 8), 3)):
        for init in (nn.init.normal_, lambda w: w.fill_(1.0)):
            with pytest.raises(ShapeError, match=r"a parameter of shape \(4, 8\) is no slice of"):
                draw(weight, full, init, dim, group)
    for init, given in ((other_tensor, group), (nn.init.normal_, "tp")):
        try:
            draw(weight, (8, 8), init, 0, given)  # type: ignore[arg-type]
        except CommGridError as error:
            said.append(f"{error}")
    draw(weight, (8, 8), nn.init.ones_, 0, group)
    draw(weight, (7, 8), nn.init.ones_, 0, group)  # the last rank's slice is padded
    commgrid.shutdown()
    return said


def test_what_is_drawn_is_a_slice() -> None:
    """Other shapes were drawn without a word, or failed deep inside torch."""
    for said in run_on_ranks(slices, 2, backend=None, launcher="torchrun"):
        assert said == [
            "init='other_tensor' returned another tensor; expected a function that fills the one "
            "it is given, such as torch.nn.init.normal_",
            "draw(…, group='tp'): expected a GroupRef, which a layer keeps as self.group: "
            "GroupRef('tp')",
        ]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tp-dp", r"'tp-dp'; did you mean 'dp_tp'\?"),
        ("tp, pp", r"'tp, pp'; did you mean 'pp_tp'\?"),
        (("tp", "dp"), r"\('tp', 'dp'\): .* get_group\('dp', 'tp'\) or get_group\('dp_tp'\)"),
    ],
)
def test_axes_joined_otherwise(
    grid: commgrid.HyperCommGrid, name: str | tuple[str, ...], said: str
) -> None:
    """`tp-dp` was answered with "did you mean 'pp_dp'?", another group; a tuple with TypeError."""
    with pytest.raises(UnknownGroupError, match=said):
        grid.get_group(name)  # type: ignore[arg-type]
