"""Places of errors: the call, its group and the program's line, whatever stands between them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import deprecated

import commgrid
from commgrid.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.recording.places import Whereabouts, whereabouts
from commgrid.tensor_parallel import ColumnParallelLinear
from tests.killing import KILLED, kill_me, run_killable

ONE, TWO = torch.ones(1), torch.ones(2)
OLD = deprecated("a test", category=FutureWarning)
DISABLE = torch.compiler.disable


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return all_gather(tensor, "dp")


def calls() -> dict[str, Callable[[], object]]:
    """Calls that wait for the other rank, by the place that an error of each has."""
    group, models = commgrid.get_group("dp"), [nn.Linear(4, 4), nn.Linear(4, 4)]
    reducer, finished = GradientReducer(models[0]), GradientReducer(models[1], shard=True)
    optimizer = ShardedOptimizer(finished, torch.optim.SGD, lr=1.0, overlap=False)
    for model in models:
        model(torch.ones(1, 4)).sum().backward()
    finished.finish()
    layer = ColumnParallelLinear(4, 4, group="dp", gather_output=True)

    @torch.no_grad()
    def own() -> None:
        all_reduce(ONE, "dp")

    return {
        "GradientReducer.finish on group 'dp_cp' in place": reducer.finish,
        "ShardedOptimizer.step on group 'dp_cp' in place": optimizer.step,
        "all_reduce on group 'dp' in own": own,
        "all_reduce on group 'dp' in <lambda>": OLD(lambda: all_reduce(ONE, "dp")),
        "reduce_scatter on group 'dp' in <lambda>": lambda: OLD(reduce_scatter)(TWO, "dp"),
        "all_to_all on group 'dp' in <lambda>": lambda: DISABLE(all_to_all)(TWO, "dp"),
        "all_gather on group 'dp' in forward": lambda: Gather.apply(ONE),
        "gather on group 'dp' in <lambda>": lambda: layer(torch.ones(1, 4)),
        "broadcast on group 'dp' in <lambda>": lambda: torch.no_grad()(dist.broadcast)(
            ONE, group=group, group_src=1
        ),
    }  # fmt: skip


def places() -> dict[str, str]:
    grid = commgrid.initialize(timeout=60, backend="gloo")
    made = calls()
    all_reduce(ONE, "dp")
    if grid.rank == 1:
        kill_me()
    return {name: place(call) for name, call in made.items()}


def place(call: Callable[[], object]) -> str:
    with pytest.raises((RuntimeError, ValueError)) as raised:
        call()
    said = str(whereabouts(raised.value))
    return re.sub(r"^in | \(|\)$", "", said).replace("test_places.py:", " ")


@pytest.mark.filterwarnings("ignore:a test:FutureWarning")
def test_no_wrapper_hides_the_call() -> None:
    """Without its group it was not known either for which ranks the call had waited."""
    found, killed = run_killable(places, 2)
    assert killed == KILLED
    assert [re.sub(r" \d+", "", said) for said in found.values()] == list(found)


def test_a_module_is_named_by_its_forward() -> None:
    assert place(lambda: nn.Linear(4, 4)(ONE)).startswith("Linear.forward ")


def test_a_call_of_nothing_but_wrappers_has_its_line() -> None:
    assert place(lambda: torch.no_grad()(DISABLE(torch.cat))([])).startswith("at ")


@pytest.mark.parametrize("described", [None, "", "mine"])
def test_a_group_of_torchs_has_one_name_in_errors_and_records(
    where: Any, described: str | None
) -> None:
    group = dist.new_group([0], group_desc=described)
    said = place(lambda: dist.broadcast(ONE, 7, group=group))
    dist.broadcast(ONE, 0, group=group)
    name = commgrid.trace.recorded().calls[-1].group.name
    assert name == (described or group.group_name)
    assert f" on group {name!r} " in said


@pytest.mark.parametrize(
    ("known", "said"),
    [
        (
            {"operation": "f", "group": "dp", "line": "a.py:1 in g"},
            "in f on group 'dp' (a.py:1 in g)",
        ),
        ({"operation": "f", "group": "dp"}, "in f on group 'dp'"),
        ({"operation": "f", "line": "a.py:1 in g"}, "in f (a.py:1 in g)"),
        ({"operation": "", "group": "dp"}, "on group 'dp'"),
        ({"operation": "", "group": "dp", "line": "a.py:1 in g"}, "on group 'dp' (a.py:1 in g)"),
        ({"operation": "", "line": "a.py:1 in g"}, "at a.py:1 in g"),
        ({"operation": ""}, "at an unknown place"),
    ],
)
def test_whereabouts_say_what_is_known(known: dict[str, str], said: str) -> None:
    assert str(Whereabouts(**known)) == said  # type: ignore[arg-type]


def broadcast(x: torch.Tensor) -> torch.Tensor:
    dist.broadcast(x, 0, group=commgrid.get_group("dp"))
    return x


class Broadcasts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return broadcast(x)


def traced() -> nn.Module:
    """A module whose code torch.fx has generated, which calls torch itself."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(dist.broadcast, (x, 0))
    graph.output(x)
    return torch.fx.GraphModule(nn.Module(), graph)


def through(depth: int, calls: Callable[[], object]) -> None:
    if depth:
        through(depth - 1, calls)
    else:
        calls()


@pytest.fixture
def where() -> Any:
    """Returns the stack of the last call, without lines."""
    commgrid.initialize()
    commgrid.trace.start()
    yield lambda: [
        re.sub(r":\d+ ", " ", each) for each in commgrid.trace.recorded().calls[-1].stack
    ]
    commgrid.trace.stop()
    commgrid.shutdown()


def test_a_stack_has_every_place_of_the_program(where: Any) -> None:
    ours, name = "test_places.py", "test_a_stack_has_every_place_of_the_program"
    broadcast(ONE)
    assert where()[-2:] == [f"{ours} {name}", f"{ours} broadcast"]
    Broadcasts()(ONE)
    assert where()[-3:] == [f"{ours} {name}", f"{ours} forward", f"{ours} broadcast"]


def test_stacks_differ_where_an_outer_line_does(where: Any) -> None:
    commgrid.trace.stop()
    commgrid.trace.start()

    def helper() -> None:
        broadcast(ONE)

    helper()
    helper()
    first, second = (call.stack for call in commgrid.trace.recorded().calls)
    assert first[-2:] == second[-2:]
    assert first[-3] != second[-3]


def test_of_a_deep_stack_the_innermost_places_are_kept(where: Any) -> None:
    through(40, lambda: broadcast(ONE))
    (last,) = commgrid.trace.recorded().calls[-1:]
    assert len(last.stack) == 16
    assert last.where == last.stack[-1]
    assert last.where.endswith(" broadcast")


def test_code_without_a_file_has_a_place_and_generated_code_is_passed_over(where: Any) -> None:
    exec(compile("broadcast(x)", "<a text>", "exec"), {"broadcast": broadcast, "x": ONE})
    exec("import torch.distributed as dist\ndist.broadcast(x, 0)", {"x": ONE})
    module = traced()
    module(ONE)  # the line
    *_, text, string, generated = commgrid.trace.recorded().calls
    assert [re.sub(r":\d+ ", " ", each) for each in text.stack[-2:]] == [
        "<a text> <module>", "test_places.py broadcast",
    ]  # fmt: skip
    assert string.where == "<string>:2 <module>"
    assert generated.where.startswith("test_places.py:")
    assert not any("eval_with_key" in each for each in generated.stack)
