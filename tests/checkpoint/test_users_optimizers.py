"""State of optimizers that users make: what none of torch's own keeps comes back, or is refused."""

from __future__ import annotations

import copy
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import commgrid
from commgrid import checkpoint
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.tensor_parallel import ColumnParallelLinear, initialize_parameters
from commgrid.testing import run_on_ranks
from commgrid.transfer import Transfer
from tests.ways import WAYS, bring

Entry = Callable[[Tensor], Any]
"""What an optimizer keeps of a parameter, at its first step."""


class Kept(torch.optim.Optimizer):
    """SGD that keeps some entries of each parameter, by key."""

    def __init__(self, params: Any, entries: dict[Any, Entry], lr: float = 0.5) -> None:
        self.entries = entries
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"]
                for key, made in self.entries.items():
                    self.state[parameter][key] = made(parameter)


def plain(value: Any) -> Any:
    """A value that can be compared with ==, and tells dtypes."""
    if isinstance(value, DTensor):
        return plain(value.to_local())
    if isinstance(value, Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def state_of(optimizer: torch.optim.Optimizer) -> Any:
    inner = optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer
    params = [p for group in inner.param_groups for p in group["params"]]
    return [{repr(k): plain(v) for k, v in inner.state.get(p, {}).items()} for p in params]


def third_of(parameter: Tensor) -> Tensor:
    return parameter.detach().float() / 3 + 1000


STATES: dict[str, dict[Any, Entry]] = {
    "fp32 copies": {"master": third_of},
    "a dot": {"ema.fast": third_of, "ema.slow.": torch.ones_like},
    "numbers": {0: third_of, 7: lambda p: 3, -1.5: lambda p: "text"},
    "tuples": {("ema", 0.9): third_of, (1, (2, "x")): torch.ones_like},
    "odd texts": {"[0]": third_of, "": torch.ones_like, "a\nb": torch.zeros_like, "ü x": third_of},
    "nested": {"of": lambda p: {"a": [torch.tensor([1.0, 1 / 3]), 2]}, "none": lambda p: None},
    "dtypes": {
        "eight": lambda p: torch.full_like(p, 5, dtype=torch.uint8),
        "exact": lambda p: p.detach().double() / 3,
        "d": lambda p: torch.tensor(1 / 3),
        "step": lambda p: torch.tensor(4.0),
    },
}


def brought(way: str, folder: str, what: str, kind: str) -> bool:
    """Whether what an optimizer keeps is there after another one has got its state."""
    grid, entries = commgrid.initialize(tp=2 if kind == "tp" else 1), STATES[what]

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        dtype = torch.bfloat16
        if kind.startswith("sharded"):
            model: nn.Module = nn.Linear(64, 64, bias=False)
            model.to(dtype if kind == "sharded half" else torch.float32)
            reducer = GradientReducer(model, shard=True)
            inner: Any = Kept
            return model, ShardedOptimizer(reducer, inner, element_wise=True, entries=entries)
        model = ColumnParallelLinear(4, 4, bias=False) if kind == "tp" else nn.Linear(4, 4)
        initialize_parameters(model, 1)
        model.to(dtype)
        if kind == "fsdp":
            fully_shard(model, mesh=grid.device_mesh("dp"))
        return model, Kept(model.parameters(), entries)

    model, optimizer = made()
    if kind.startswith("sharded"):
        model(torch.ones(1, 64, dtype=model.weight.dtype)).sum().backward()
        optimizer._reducer.finish()  # type: ignore[attr-defined]
    optimizer.step()
    right = state_of(optimizer)
    other, fresh = made()
    bring(way, folder, (model, optimizer), (other, fresh))
    found = state_of(fresh)
    assert found == right, (found, right)
    commgrid.shutdown()
    return bool(right and right[0])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", STATES, ids=[key.replace(" ", "_") for key in STATES])
def test_an_optimizer_of_the_users_own_gets_its_whole_state_back(
    what: str, way: str, tmp_path: Path
) -> None:
    assert all(run_on_ranks(brought, 2, way, str(tmp_path), what, "tp"))


@pytest.mark.parametrize("kind", ["fsdp", "sharded", "sharded half"])
@pytest.mark.parametrize("what", ["fp32 copies", "numbers", "dtypes"])
def test_it_does_where_data_parallel_ranks_have_parts(what: str, kind: str, tmp_path: Path) -> None:
    assert all(run_on_ranks(brought, 2, "load", str(tmp_path), what, kind))


# -- one value for all parts of a parameter ------------------------------------------------


def own_number(parameter: Tensor) -> int:
    return commgrid.get_grid().rank


SLICES: dict[str, Entry] = {
    "number": lambda p: 10 + own_number(p),
    "tensor of one number": lambda p: torch.tensor(10.0 + own_number(p)),
    "in a dict": lambda p: {"scales": [1, 10 + own_number(p)]},
    "in a deque": lambda p: deque([own_number(p), 1.0], maxlen=4),
    "list of slices": lambda p: [torch.zeros(local(p).shape), torch.zeros(local(p).shape)],
}
ALIKE: dict[str, Entry] = {
    "number": lambda p: 10,
    "tensor of one number": lambda p: torch.tensor(10.0),
    "list": lambda p: [torch.zeros(7), torch.ones(7)],
    "object": lambda p: Path("runs"),
}


def local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def kept_by(way: str, folder: str, made: Entry, kind: str) -> str:
    """The error of a save, and so on, of what an optimizer keeps of slices; "": none."""
    grid = commgrid.initialize(tp=2 if kind == "tp" else 1)
    torch.manual_seed(0)
    model: Any = ColumnParallelLinear(64, 64) if kind == "tp" else nn.Linear(64, 64)
    initialize_parameters(model, 1)
    optimizer: torch.optim.Optimizer
    if kind == "sharded":
        reducer, inner = GradientReducer(model, shard=True), Kept
        optimizer = ShardedOptimizer(reducer, inner, element_wise=True, entries={"own": made})
        model(torch.ones(1, 64)).sum().backward()
        reducer.finish()
    else:
        if kind == "fsdp":
            fully_shard(model, mesh=grid.device_mesh("dp"))
        optimizer = Kept(model.parameters(), {"own": made})
    optimizer.step()
    told = ""
    try:
        if way == "keep":
            checkpoint.keep(1, model, optimizer)
        elif way == "transfer":
            other = copy.deepcopy(model)
            sides = {"source_grid": grid, "target_grid": grid}
            fresh = Kept(other.parameters(), {})
            pair = optimizer, fresh
            Transfer(model, other, **sides, optimizer=pair, copies="any", timeout=30).run()
        else:
            how: dict[str, Any] = {"background": way == "background"}
            how |= {"copies": "first"} if way == "first" else {}
            checkpoint.save(folder, 1, model, optimizer, **how, progress=False)
            checkpoint.wait()
    except commgrid.CommGridError as error:
        told = str(error)
    commgrid.shutdown()
    return told


@pytest.mark.parametrize(
    ("what", "way", "kind"),
    [
        *[(what, "save", "tp") for what in SLICES],
        *[("in a dict", way, "tp") for way in ("background", "keep", "transfer")],
        ("list of slices", "keep", "tp"),
        *[("in a dict", "first", kind) for kind in ("tp", "fsdp", "sharded")],
        *[(what, "save", kind) for kind in ("fsdp", "sharded") for what in SLICES],
    ],
)
def test_slices_whose_optimizer_keeps_other_values_are_refused(
    what: str, way: str, kind: str, tmp_path: Path
) -> None:
    check = way != "transfer"  # a refused one leaves keys of gloo's at the store
    given = way, str(tmp_path), ("slices", what), kind
    for told in run_on_ranks(kept_by_named, 2, *given, check=check):
        assert "weight" in told, told
        assert "own" in told
        words = "keep such tensors" if what == "list of slices" else "between ranks 0 and 1"
        assert words in told
    assert checkpoint.steps(tmp_path) == []


@pytest.mark.parametrize("kind", ["tp", "fsdp", "sharded"])
@pytest.mark.parametrize("what", ALIKE)
def test_values_that_all_slices_have_alike_are_kept(what: str, kind: str, tmp_path: Path) -> None:
    ways = ("save", "first", "keep", "transfer") if kind == "tp" else ("save", "keep")
    for way in ways:
        folder = str(tmp_path / way)
        assert run_on_ranks(kept_by_named, 2, way, folder, ("alike", what), kind) == ["", ""]


def first_of(folder: str) -> list[Any]:
    """What is loaded after each of two copies of a parameter has kept a number of its own."""
    commgrid.initialize()
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight), nn.init.zeros_(model.bias)
    optimizer = Kept(model.parameters(), {"own": lambda p: {"scale": own_number(p)}})
    optimizer.step()
    checkpoint.save(folder, 1, model, optimizer, copies="first", progress=False)
    checkpoint.load(folder, model, optimizer, progress=False)
    commgrid.shutdown()
    return [state["'own'"] for state in state_of(optimizer)]


def test_of_copies_the_firsts_value_is_saved_if_asked_for(tmp_path: Path) -> None:
    assert run_on_ranks(first_of, 2, str(tmp_path)) == [[{"scale": 0}] * 2] * 2


def kept_by_named(way: str, folder: str, place: tuple[str, str], kind: str) -> str:
    return kept_by(way, folder, {"slices": SLICES, "alike": ALIKE}[place[0]][place[1]], kind)


# -- names that no rank takes --------------------------------------------------------------


def loads_more() -> str:
    """A file of torch's with state of a parameter that no optimizer has, and with odd keys."""
    commgrid.initialize()
    model = nn.Linear(2, 2, bias=False)
    optimizer = Kept(model.parameters(), {"ema.fast": torch.ones_like, 3: torch.zeros_like})
    optimizer.step()
    state = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    with tempfile.TemporaryDirectory() as folder:
        whole = {"model": model.state_dict(), "optimizer": state}
        dcp.save(whole, checkpoint_id=f"{folder}/right")
        checkpoint.load(f"{folder}/right", model, optimizer, progress=False)
        assert state_of(optimizer)[0].keys() == {"'ema.fast'", "3"}
        renamed = nn.ModuleDict({"up": nn.Linear(2, 2, bias=False)})
        fresh = Kept(renamed.parameters(), {3: torch.zeros_like})
        fresh.step()
        checkpoint.load(f"{folder}/right", renamed, fresh, rename=lambda name: f"up.{name}",
                        progress=False)  # fmt: skip
        assert "'ema.fast'" in state_of(fresh)[0]
        state["state.ghost.ema"] = torch.ones(2)
        dcp.save(whole, checkpoint_id=f"{folder}/more")
        with pytest.raises(commgrid.CheckpointError) as error:
            checkpoint.load(f"{folder}/more", model, optimizer, progress=False)
        found = checkpoint.load(f"{folder}/more", model, optimizer, strict=False, progress=False)
        assert found.unexpected == ("optimizer.state.ghost.ema",)
    commgrid.shutdown()
    return str(error.value)


def test_state_that_no_rank_takes_is_named() -> None:
    (told,) = run_on_ranks(loads_more, 1)
    assert "also has optimizer.state.ghost.ema, which no rank has" in told


class Wrapping(Kept):
    """Keeps something beside its state and groups."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"slow": 1}


def saves_further_state(kind: str) -> str:
    commgrid.initialize()
    model = nn.Linear(2, 2)
    cls = Wrapping if kind == "state_dict" else Kept
    optimizer = cls(model.parameters(), {})
    if kind == "state":
        optimizer.state["calls"] = 3  # type: ignore[index]
    if kind == "hook":
        optimizer.register_state_dict_post_hook(lambda _, state: state | {"seen": 1})
    with pytest.raises(commgrid.CommGridError) as error:
        checkpoint.keep(1, model, optimizer)
    commgrid.shutdown()
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "named"),
    [("state", "state['calls']"), ("state_dict", "state_dict()['slow']"),
     ("hook", "state_dict()['seen']")],
)  # fmt: skip
def test_state_of_no_parameter_is_refused(kind: str, named: str) -> None:
    for told in run_on_ranks(saves_further_state, 2, kind):
        assert f"keeps {named}, which belongs to no parameter" in told


def test_keys_that_cannot_be_read_back_are_refused() -> None:
    commgrid.initialize()
    model = nn.Linear(2, 2)
    optimizer = Kept(model.parameters(), {Path("a"): torch.ones_like})
    optimizer.step()
    with pytest.raises(commgrid.CommGridError, match=r"has the key .*Path"):
        checkpoint.keep(1, model, optimizer)
    commgrid.shutdown()
