"""What people who read the page gave a Transfer: each would have moved something else in silence,
or ended in an error of Python's."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

import commgrid
from commgrid.tensor_parallel import ColumnParallelLinear, initialize_parameters
from commgrid.testing import run_on_ranks
from commgrid.transfer import Part, Transfer
from tests.ways import attempt


def given() -> dict[str, str]:
    training = commgrid.initialize(tp=2)
    serving = commgrid.initialize(name="serving", tp=2, ranks=[1, 0])  # other ranks have the slices
    source, target = ColumnParallelLinear(2, 4), ColumnParallelLinear(2, 4, grid=serving)
    initialize_parameters(source, 1)
    rank, grids = training.rank, {"source_grid": training, "target_grid": serving}
    said = {"slices": attempt(dict(source.state_dict()), dict(target.state_dict()), **grids)}
    own = {"w": torch.full((2,), float(rank))}
    said["unequal"] = attempt(own, {"w": torch.zeros(2)})
    said["any"] = attempt(own, {"w": torch.zeros(2)}, copies="any")
    part = {"w": Part(torch.full((2,), float(rank)), shape=(4,), offset=(2 * rank,))}
    said["parts"] = attempt(part, {"w": torch.zeros(4)})
    cut = distribute_tensor(torch.arange(4.0), training.device_mesh("tp"), [Shard(0)])
    cut_part = {"w": [Part(torch.zeros(4), (8,), (0,)), Part(cut, (8,), (4,))]}
    said["a part of a DTensor"] = attempt(cut_part, {"w": torch.ones(8)})
    two = [Part(torch.zeros(4), (4,), (0,)), Part(torch.zeros(2), (4,), (0,))]
    said["overlapping parts"] = attempt(part, {"w": two})
    transfer = Transfer(part, {"w": torch.zeros(4)})
    transfer.run()
    part["w"] = Part(part["w"].tensor, shape=(4,), offset=(2 - 2 * rank,))
    with pytest.raises(commgrid.CommGridError) as error:
        transfer.run()
    said["another offset"] = str(error.value).replace(f"rank {rank}", "this rank")
    transfer.close()

    def tied() -> nn.ModuleDict:
        net = nn.ModuleDict({name: nn.Linear(2, 2) for name in "abc"})
        net["b"].weight = net["a"].weight
        return net

    net = tied()
    initialize_parameters(net, 1)
    transfer = Transfer(net, tied())
    transfer.run()
    net["b"].weight = net["c"].weight
    with pytest.raises(commgrid.CommGridError) as error:
        transfer.run()
    said["tied to another"] = str(error.value).replace(f"rank {rank}", "this rank")
    transfer.close()

    def both() -> dict[str, Tensor]:
        return {"up.weight": torch.ones(2), "down.weight": torch.zeros(2)}

    said["pattern"] = attempt(both(), both(), only=["up.*", "donw.*"])
    said["one name"] = attempt(both(), {"w": torch.zeros(2)}, rename=lambda name: "w")
    names = {"up.weight": "w", "down.weight": None}
    said["left out"] = attempt(both(), {"w": torch.zeros(2)}, rename=names.__getitem__)
    said["no name"] = attempt(both(), both(), rename=len)
    shared = torch.zeros(2)
    said["memory"] = attempt(both(), {"up.weight": shared, "down.weight": shared.view(2)})
    halves = torch.zeros(4)
    said["flat"] = attempt(both(), {"up.weight": halves[:2], "down.weight": halves[2:]})
    said["whole numbers"] = attempt(both(), {n: one.to(torch.int8) for n, one in both().items()})
    said["real"] = attempt({"w": torch.ones(2, dtype=torch.complex64)}, {"w": torch.ones(2)})
    said["wider"] = attempt({"w": torch.ones(2, dtype=torch.int8)}, {"w": torch.zeros(2)})
    said["generator"] = attempt(source.named_parameters(), dict(target.state_dict()))
    said["grid"] = attempt(both(), both(), source_grid="default")
    said["timeout"] = attempt(both(), both(), timeout=0)
    plain = [nn.Linear(2, 2), nn.Linear(2, 2)]
    initialize_parameters(plain[0], 1)
    said["optimizer"] = attempt(*plain, optimizer=torch.optim.AdamW(plain[0].parameters()))
    pair = tuple(torch.optim.AdamW(one.parameters()) for one in plain)
    said["some optimizers"] = attempt(*plain, optimizer=(None if rank == 0 else pair[0], pair[1]))
    return said


def interrupted() -> str:
    """Ctrl-C reaches one rank while it looks at its model."""
    rank = commgrid.initialize().rank

    def wanted(name: str) -> bool:
        if rank == 1:
            raise KeyboardInterrupt
        return True

    try:
        Transfer(nn.Linear(2, 2), nn.Linear(2, 2), only=wanted, timeout=3)
    except (KeyboardInterrupt, Exception) as error:
        return f"{type(error).__name__}: {error}"
    return "made"


@pytest.mark.full
def test_a_rank_that_was_interrupted_while_planning_is_named() -> None:
    """The others said that gloo could not connect."""
    assert run_on_ranks(interrupted, 2) == [
        "TransferError: rank 1 failed: KeyboardInterrupt: KeyboardInterrupt", "KeyboardInterrupt: "
    ]  # fmt: skip


SAID = {
    "slices": "TransferError: ranks 0-1: weight, of which ranks 0-1 hold [2, 2] at [0, 0], differs "
    "between rank 0 and rank 1, and so do 1 more tensors; these should be copies, of which any may "
    "be sent. Give slices in a mapping as Part(tensor, shape, offset)",
    "unequal": "TransferError: ranks 0-1: w, of which ranks 0-1 hold [2] at [0], differs",
    "parts": "{'w': [0.0, 0.0, 1.0, 1.0]}",
    "a part of a DTensor": "{'w': [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 3.0]}",
    "overlapping parts": "TransferError: nothing was moved: ranks 0-1: w of the target has parts "
    "on this rank that overlap, [4] at [0] and [2] at [0]; give parts that are equal",
    "another offset": "the source on this rank has changed since the transfer was planned: "
    "this rank has other boxes of w",
    "tied to another": "the source on this rank has changed since the transfer was planned: ",
    "pattern": "TransferError: nothing was moved: ranks 0-1: only=['up.*', 'donw.*']: 'donw.*' is "
    "the name of no tensor of the target; leave it out, or correct it",
    "one name": "TransferError: nothing was moved: ranks 0-1: rename= calls both up.weight and "
    "down.weight of the source w; give each a name of its own",
    "left out": "{'w': [1.0, 1.0]}",
    "no name": "TransferError: nothing was moved: ranks 0-1: rename('up.weight') returned 9: "
    "expected a name, or None",
    "memory": "TransferError: nothing was moved: ranks 0-1: up.weight and down.weight of the "
    "target are in one memory",
    "flat": "{'up.weight': [1.0, 1.0], 'down.weight': [0.0, 0.0]}",
    "whole numbers": "TransferError: nothing was moved: ranks 0-1: up.weight has dtype float32 on "
    "ranks 0-1 of the source and int8 on ranks 0-1 of the target, which cannot hold its numbers",
    "real": "TransferError: nothing was moved: ranks 0-1: w has dtype complex64",
    "wider": "{'w': [1.0, 1.0]}",
    "generator": "TransferError: nothing was moved: ranks 0-1: a generator as a model: expected a "
    "module, a list of a stage's chunks, or a mapping of names to tensors, such as dict(…)",
    "grid": "SpecError: source_grid='default': expected a grid, or None on other ranks",
    "timeout": "SpecError: timeout=0: expected seconds above 0, or a timedelta",
    "optimizer": "SpecError: optimizer=AdamW: expected the source's and the target's, with None",
    "some optimizers": "TransferError: ranks 0-1: no rank of the source gave optimizer.",
}


@pytest.fixture(scope="module")
def said() -> list[dict[str, str]]:
    # A grid that failed leaves keys in the store.
    return run_on_ranks(given, 2, check=False)


@pytest.mark.parametrize("case", SAID)
def test_what_is_not_what_it_is_taken_for_is_refused(case: str, said: list[dict[str, str]]) -> None:
    assert [one[case][: len(SAID[case])] for one in said] == [SAID[case]] * 2


def test_unequal_copies_go_where_that_is_asked_for(said: list[dict[str, str]]) -> None:
    assert {one["any"] for one in said} <= {"{'w': [0.0, 0.0]}", "{'w': [1.0, 1.0]}"}
