"""Parameters with copies on several stages, in several groups."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import commgrid
from commgrid.data_parallel import GradientReducer
from commgrid.errors import SpecError
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


def summed(broadcast: bool) -> dict[str, Tensor]:
    grid = commgrid.initialize(pp=2, groups={"scales": ENDS, "shifts": ENDS})
    stage = Stage(grid.get_local_rank("pp"))
    reducer = GradientReducer(stage, broadcast=broadcast)
    pipeline = Pipeline(
        [stage], "1f1b", num_microbatches=2, loss=lambda y, _: y.sum(), reducer=reducer
    )
    inputs = [torch.full((2, 3), i + 1.0, dtype=torch.float64) for i in range(2)]
    pipeline.step(inputs, inputs)
    reducer.finish(count=1)
    found = {
        name: part.weight.grad.clone()
        for name, part in stage.parts.items()
        if isinstance(part.weight, Tensor) and part.weight.grad is not None
    }
    commgrid.shutdown()
    return found


@pytest.mark.parametrize("broadcast", [False, True])
def test_stages_may_register_shared_parameters_in_different_orders(broadcast: bool) -> None:
    first, last = Stage(0, mark=False), Stage(1, mark=False)
    for i in range(2):
        x = torch.full((2, 3), i + 1.0, dtype=torch.float64)
        last(first(x)).sum().backward()
    for found in run_on_ranks(summed, 2, broadcast):
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


def without_a_reducer() -> tuple[list[float], list[Tensor], str]:
    """Losses of an evaluation, gradients of a step with frozen copies, then why none trains."""
    grid = commgrid.initialize(pp=3, groups={"scales": ENDS, "shifts": ENDS})
    number = grid.get_local_rank("pp")
    stage: nn.Module = nn.Linear(3, 3).double() if number == 1 else Stage(number // 2)
    if number == 1:
        nn.init.ones_(stage.weight)
        nn.init.zeros_(stage.bias)
    pipeline = Pipeline([stage], "1f1b", num_microbatches=2, loss=lambda y, _: y.sum())
    inputs = [torch.full((2, 3), i + 1.0, dtype=torch.float64) for i in range(2)]
    evaluated = pipeline.evaluate(inputs, inputs)
    for part in stage.parts.children() if number != 1 else ():
        part.requires_grad_(False)
    pipeline.step(inputs, inputs)
    found = [p.grad.clone() for p in stage.parameters() if p.grad is not None]
    stage.requires_grad_()
    with pytest.raises(SpecError) as caught:
        pipeline.step(inputs, inputs)
    commgrid.shutdown()
    return [] if evaluated is None else evaluated.tolist(), found, str(caught.value)


def test_copies_without_a_reducer_do_not_train() -> None:
    """They are evaluated, and pass frozen; once one trains, every stage refuses the step."""
    first, middle, last = Stage(0, mark=False), nn.Linear(3, 3).double(), Stage(1, mark=False)
    nn.init.ones_(middle.weight)
    nn.init.zeros_(middle.bias)
    losses = [
        last(middle(first(torch.full((2, 3), i + 1.0, dtype=torch.float64)))).sum()
        for i in range(2)
    ]
    torch.stack(losses).sum().backward()
    found = run_on_ranks(without_a_reducer, 3)
    assert found[2][0] == pytest.approx([loss.item() for loss in losses], rel=1e-12)
    assert (found[0][1], found[2][1]) == ([], [])
    torch.testing.assert_close(
        found[1][1], [middle.weight.grad, middle.bias.grad], rtol=1e-12, atol=0
    )
    for _, _, refused in found:
        assert "stage 0 (rank 0) shares '0.parts.scale.weight' among ranks [0, 2]" in refused
        assert "give every stage reducer=GradientReducer(torch.nn.ModuleList(chunks))" in refused
