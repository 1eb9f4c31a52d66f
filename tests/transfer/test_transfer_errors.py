"""Transfers that all ranks refuse before anything moves, and ones that end in the middle."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import commgrid
from commgrid import CommGridError
from commgrid.resharding import transport
from commgrid.testing import RanksFailed, run_on_ranks
from commgrid.transfer import Part, Transfer
from tests.flags import hear, tell
from tests.waiting import until

TARGET = (2, 3, 4)


def net(salt: float, wide: int = 6) -> nn.Module:
    model = nn.Sequential()
    model.add_module("up", nn.Linear(4, wide))
    model.add_module("down", nn.Linear(wide, 4))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(salt + number)
    return model


class Sides:
    """Ranks 0 to 2 train, ranks 2 to 4 serve."""

    def __init__(self) -> None:
        self.training = commgrid.initialize(ranks=range(3), name="training")
        self.serving = commgrid.initialize(ranks=TARGET, name="serving")
        self.rank = torch.distributed.get_rank()
        self.grids = {"source_grid": self.training, "target_grid": self.serving}

    def models(self, salt: float = 0.5) -> tuple[Any, Any]:
        return (
            net(salt) if self.training is not None else None,
            net(-1.0) if self.serving is not None else None,
        )

    def made(self, source: Any, target: Any, **options: Any) -> Transfer:
        return Transfer(source, target, **self.grids, **{"timeout": 20, **options})

    def refused(self, source: Any, target: Any, **options: Any) -> str:
        with pytest.raises(CommGridError) as error:
            self.made(source, target, **options)
        return f"{type(error.value).__name__}: {error.value}"


def told(call: Any) -> str:
    with pytest.raises(CommGridError) as error:
        call()
    return f"{type(error.value).__name__}: {error.value}"


def refused() -> dict[str, Any]:
    """One after the other on the same grids, which stay good."""
    sides, said = Sides(), {}
    source, target = sides.models()
    other = net(0.0, wide=8) if target is not None else None
    said["shapes"] = sides.refused(source, other)
    more = None
    if source is not None:
        more = net(0.5)
        more.add_module("extra", nn.Linear(1, 1))
    said["more"] = sides.refused(more, target)
    optimizer = torch.optim.SGD(source.parameters(), momentum=0.9) if source is not None else None
    said["optimizer"] = sides.refused(source, target, optimizer=(optimizer, None))
    said["dtype"] = sides.refused(
        {"w": torch.zeros(2, dtype=torch.float64 if sides.rank else torch.float32)}
        if source is not None else None,
        {"w": torch.zeros(2)} if target is not None else None,
    )  # fmt: skip
    said["wraps"] = sides.refused(
        {"w": torch.full((2,), 200, dtype=torch.uint8)} if source is not None else None,
        {"w": torch.zeros(2, dtype=torch.int8)} if target is not None else None,
    )
    shared = source if sides.rank == 2 else target
    said["memory"] = sides.refused(source, shared)
    said["nothing"] = sides.refused(source, target, only="nothing.*")
    said["no model"] = sides.refused([1] if sides.rank == 1 else source, target)

    with sides_moved(sides, more, target, only=["up.*"]) as moved:
        if target is not None:
            said["only"] = [p.detach()[0].max().item() for p in target.parameters()]
        with torch.no_grad():
            if sides.rank == 3:
                target.up.weight.data = target.up.weight.data[:2]  # type: ignore[union-attr]
        said["changed"] = told(moved.run)
    target = net(-1.0) if target is not None else None
    renamed = None
    if source is not None:
        renamed = {
            f"model.{name}": Part(p[:3], tuple(p.shape), (0,) * p.dim())
            if sides.rank == 0 else Part(p[3:], tuple(p.shape), (3, *[0] * (p.dim() - 1)))
            for name, p in source.named_parameters() if len(p) == 6
        }  # fmt: skip
    with sides_moved(
        sides, renamed, target, only=["up.*"], rename=lambda name: name.removeprefix("model.")
    ):
        if target is not None:
            said["parts"] = [p.detach()[0].max().item() for p in target.parameters()]
    if source is not None and sides.rank == 1:
        with torch.no_grad():
            source.down.bias[2] += 1e-3
    differs = sides.made(source, target)
    said["copies"] = told(differs.run)
    with sides_moved(sides, source, target, copies="any"):
        pass
    if sides.rank != 4:
        said["late"] = sides.refused(source, target, timeout=2.0)
    torch.distributed.barrier()
    with sides_moved(sides, source, target, copies="any") as moved:
        torch.distributed.barrier()
        if sides.rank != 0:
            moved._timeout = 2.0
            said["no run"] = told(moved.run)
        torch.distributed.barrier()  # rank 0 has not closed it either
    if sides.serving is not None:
        said["no source"] = told(
            lambda: Transfer(None, target, target_grid=sides.serving, timeout=2.0)
        )
    torch.distributed.barrier()
    last = sides.made(source, target, name="last")
    commgrid.destroy("serving")
    said["destroyed"] = told(last.run)
    commgrid.shutdown()
    return said


class sides_moved:
    """A transfer that has run once, and is closed after."""

    def __init__(self, sides: Sides, source: Any, target: Any, **options: Any) -> None:
        self._transfer = sides.made(source, target, **options)

    def __enter__(self) -> Transfer:
        self._transfer.run()
        return self._transfer

    def __exit__(self, *_: object) -> None:
        self._transfer.close()


@pytest.mark.full
def test_all_ranks_say_what_is_wrong_and_nothing_moves() -> None:
    ranks = run_on_ranks(refused, 5, backend=None, launcher="torchrun")
    expected = {
        "shapes": "TransferError: nothing was moved: .*up.weight has shape (6, 4) on ranks "
        "0-2 of the source and (8, 4) on ranks 2-4 of the target",
        "more": "extra.bias, extra.weight on ranks 0-2 of the source is on no rank of the target",
        "optimizer": "the source has an optimizer and the target has none",
        "dtype": "w has shape (2,) and dtype float32 on rank 0 and shape (2,) and dtype float64 on "
        "ranks 1-2",
        "memory": "rank 2: up.weight of the target shares its memory with up.weight of the source",
        "nothing": "the target has no tensors",
        "no model": "rank 1: model=[1]: expected a module, or a list of a stage's chunks",
        "copies": "down.bias, of which ranks 0-2 hold [4] at [0], differs between ranks 0, 2 and "
        "rank 1; these should be copies, of which any may be sent.*nothing was moved",
        "wraps": "w has dtype uint8 on ranks 0-2 of the source and int8 on ranks 2-4 of the target",
    }
    for rank, said in enumerate(ranks):
        if rank < 2:  # outside the destroyed grid: told by the ranks that have left
            expected["destroyed"] = "has closed the transfer, or its program has ended"
        else:
            expected["destroyed"] = "grid 'serving' was destroyed"
        for case, text in expected.items():
            for part in text.split(".*"):
                assert part in said[case], (rank, case, said[case])
        assert "up.weight had shape (6, 4)" in said["changed"] or "weight" in said["changed"]
        assert "on rank 3 has changed since the transfer was planned" in said["changed"]
        if rank != 4:
            assert "PeerTimeoutError: transfer 'default': rank 4 did not arrive" in said["late"]
        if rank != 0:
            assert "PeerTimeoutError: rank 0 did not call run() of a transfer" in said["no run"]
        if rank in TARGET:
            assert said["only"] == said["parts"] == [0.5, 1.5, -1.0 + 2, -1.0 + 3]
        if rank in TARGET:
            assert said["no source"].startswith(
                "PeerTimeoutError: transfer 'default': no source grid has come to meet the target "
                "grid of ranks 2-4 within timeout"
            )


def stages_with_one_name() -> tuple[str, float]:
    """A block of each of two stages is called `weight`; a module that all ranks are to get."""
    pipeline = commgrid.initialize(pp=2, name="pipeline")
    replicas = commgrid.initialize(name="replicas")
    stage, target = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        stage.weight.fill_(10.0 + pipeline.get_local_rank("pp"))
        target.weight.fill_(-1.0)
    transfer = Transfer(stage, target, source_grid=pipeline, target_grid=replicas, timeout=20)
    said = told(transfer.run)
    commgrid.shutdown()
    return said, target.weight[0, 0].item()


def test_stages_with_different_tensors_of_one_name_are_refused() -> None:
    # A transfer that failed leaves keys of gloo's in the store.
    for said, left in run_on_ranks(stages_with_one_name, 4, check=False):
        assert "weight, of which ranks 0-3 hold [2, 2] at [0, 0], differs between ranks 0-1" in said
        assert "tensors of different stages the names that they have in the whole model" in said
        assert left == -1.0


def fails_in_the_middle(how: str, folder: str) -> None:
    sides = Sides()
    source, target = sides.models()
    transfer = sides.made(source, target, max_bytes=64, timeout=1000)  # no test lasts so long
    transfer.run()
    finish, calls, sent = transport.Carrier._finish, [], []
    start_transfers = transport.start_transfers

    def starting(group: Any, sends: Any, *given: Any) -> Any:
        works = start_transfers(group, sends, *given)
        sent.extend(works[: len(sends)])
        return works

    def failing(self: Any, *given: Any) -> None:
        calls.append(given)
        if sides.rank == 3 and len(calls) == 2:
            if how == "killed":
                for each in sent:  # for the rest of a message that has begun gloo waits for ever
                    each.wait()
                os.kill(os.getpid(), signal.SIGKILL)
            raise MemoryError("no more")
        finish(self, *given)

    transport.Carrier._finish = failing  # type: ignore[method-assign]
    transport.start_transfers = starting
    said = told(transfer.run)
    again = told(transfer.run) if how == "raised" else ""
    Path(folder, str(sides.rank)).write_text(f"{said}\n{again}")
    store = torch.distributed.distributed_c10d._get_default_store()
    store.add("done", 1)
    if sides.rank == 0:  # whose process is the store's
        until(lambda: store.add("done", 0) >= 4, "the end of the others")
    os._exit(0)


@pytest.mark.nightly("raised")  # a rank may see rank 0 end before it reads why
@pytest.mark.parametrize("how", ["raised", "killed"])
def test_a_rank_that_fails_in_the_middle_is_named_by_all(how: str, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed):  # they end without a result
        run_on_ranks(fails_in_the_middle, 5, how, str(tmp_path), backend=None, launcher="torchrun")
    for rank in range(5) if how == "raised" else (0, 1, 2, 4):
        said, again = Path(tmp_path, str(rank)).read_text().split("\n")
        assert "rank 3" in said, said
        assert "the target is not to be used" in said, said
        if how == "killed":
            assert said.startswith("PeerFailedError: rank 3 is gone"), said
        else:
            assert "MemoryError" in said or "no more" in said, said
            assert "make a new Transfer" in again, again


def comes_late(rank: int) -> list[float]:
    """Each has one half and needs the other; rank 1 begins after a fifth of rank 0's timeout."""
    grid = commgrid.initialize()
    needed, offsets = torch.zeros(4), [(4 * rank,), (4 - 4 * rank,)]
    transfer = Transfer(
        {"w": Part(torch.full((4,), rank + 1.0), (8,), offsets[0])},
        {"w": Part(needed, (8,), offsets[1])},
        source_grid=grid, target_grid=grid, timeout=15,
    )  # fmt: skip
    carried = transport.Carrier.carry

    def carrying(self: transport.Carrier) -> None:
        time.sleep(3.5 * rank)  # longer than a fifth of the timeout
        carried(self)

    transport.Carrier.carry = carrying  # type: ignore[method-assign]
    transfer.run()
    return needed.tolist()


@pytest.mark.full
def test_a_rank_is_waited_for_as_long_as_timeout_says() -> None:
    ranks = run_on_ranks(comes_late, 2, per_rank=[(0,), (1,)], backend=None, launcher="torchrun")
    assert ranks == [[2.0] * 4, [1.0] * 4]


def passes_it_on(rank: int) -> str:
    """Rank 0 waits for rank 1, which is silent, and by its end breaks off what waits for rank 0."""
    grid = commgrid.initialize()
    transfer = Transfer(
        {"w": Part(torch.full((4,), rank + 1.0), (16,), (4 * rank,))},
        {"w": Part(torch.zeros(4), (16,), (4 * rank,))},
        source_grid=grid, target_grid=grid, timeout=3,
    )  # fmt: skip
    carried, fail = transport.Carrier.carry, Transfer._fail

    def carrying(self: transport.Carrier) -> None:
        if rank == 1:
            hear("0 is through", "2 is through", "3 is through")
        else:
            time.sleep(1.0 if rank else 0.0)  # its time is over later than rank 0's
        carried(self)

    def slowly(self: Transfer, gate: str, error: BaseException) -> BaseException:
        if rank == 0:
            time.sleep(1.0)  # the others know of its end before it has said why
        return fail(self, gate, error)

    transport.Carrier.carry = carrying  # type: ignore[method-assign]
    Transfer._fail = slowly  # type: ignore[method-assign]
    said = told(transfer.run)
    tell(f"{rank} is through")
    if rank == 0:
        hear("1 is through")
    return said


@pytest.mark.full
def test_who_was_waited_for_first_is_named_and_not_who_waited() -> None:
    # A grid that failed leaves keys in the store.
    for said in run_on_ranks(passes_it_on, 4, per_rank=[(rank,) for rank in range(4)], check=False):
        assert said.startswith("PeerFailedError: rank 1 is gone or does not answer"), said
