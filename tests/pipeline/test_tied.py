"""Parameters with copies on several stages, in several groups."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import commgrid
from commgrid.data_parallel import GradientReducer
from commgrid.parameters import mark_parameters
from commgrid.pipeline import Pipeline
from commgrid.testing import run_on_ranks

ENDS = {"of": "pp", "pick": ["first", "last"]}


class Stage(nn.Module):
    """The two stages register their copies of `scale` and `shift` in different orders."""

    def __init__(self, stage: int, *, mark: bool = True) -> None:
        super().__init__()
        made = {name: nn.Linear(3, 3, bias=False).double() for name in ("scale", "shift")}
        for name, layer in made.items() if mark else ():
            mark_parameters(layer, shared=f"{name}s")
        for number, name in enumerate(made):
            nn.init.constant_(made[name].weight, 0.5 + number)
        self.parts = nn.ModuleDict({name: made[name] for name in sorted(made, reverse=stage == 1)})

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.parts["shift"](self.parts["scale"](x)))


def summed(reduces: bool, broadcast: bool) -> dict[str, Tensor]:
    grid = commgrid.initialize(pp=2, groups={"scales": ENDS, "shifts": ENDS})
    stage = Stage(grid.get_local_rank("pp"))
    reducer = GradientReducer(stage, broadcast=broadcast) if reduces else None
    pipeline = Pipeline(
        [stage], "1f1b", num_microbatches=2, loss=lambda y, _: y.sum(), reducer=reducer
    )
    inputs = [torch.full((2, 3), i + 1.0, dtype=torch.float64) for i in range(2)]
    pipeline.step(inputs, inputs)
    if reducer is not None:
        reducer.finish(count=1)
    found = {
        name: part.weight.grad.clone()
        for name, part in stage.parts.items()
        if isinstance(part.weight, Tensor) and part.weight.grad is not None
    }
    commgrid.shutdown()
    return found


@pytest.mark.parametrize(
    ("reduces", "broadcast"), [(False, False), (True, False), (True, True)], ids=str
)
def test_stages_may_register_shared_parameters_in_different_orders(
    reduces: bool, broadcast: bool
) -> None:
    first, last = Stage(0, mark=False), Stage(1, mark=False)
    for i in range(2):
        x = torch.full((2, 3), i + 1.0, dtype=torch.float64)
        last(first(x)).sum().backward()
    for found in run_on_ranks(summed, 2, reduces, broadcast):
        for name, gradient in found.items():
            both = [stage.parts[name].weight.grad for stage in (first, last)]
            torch.testing.assert_close(gradient, both[0] + both[1], rtol=1e-12, atol=0)


def groups_in_use(broadcast: bool) -> set[str]:
    """The groups of shared parameters with calls, once the reducer is made."""
    grid = commgrid.initialize(pp=2, groups={"scales": ENDS, "shifts": ENDS}, trace=True)
    GradientReducer(Stage(grid.get_local_rank("pp")), broadcast=broadcast)
    found = {call.group.name for call in commgrid.trace.recorded().calls}
    commgrid.trace.stop()
    commgrid.shutdown()
    return found


@pytest.mark.parametrize("broadcast", [False, True])
def test_no_shared_group_is_used_for_the_first_time_within_a_backward(broadcast: bool) -> None:
    """The first stage's backward would wait for the connection inside the last stage's."""
    for found in run_on_ranks(groups_in_use, 2, broadcast):
        assert {"scales", "shifts"} <= found
