"""What eight ranks do, and where in it one of them meets with a fault.

Every moment is a program that all ranks run alike. It is given `act`, which on the victim does what
the fault is and on the others nothing, and calls it at its moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import commgrid
from commgrid import checkpoint
from commgrid.collectives import all_reduce, all_to_all
from commgrid.failures import named_failures
from commgrid.pipeline import Pipeline
from commgrid.transfer import Transfer


@dataclass(frozen=True)
class Limits:
    """Seconds that a collective and a transfer, and that `initialize` may take."""

    timeout: float
    startup: float


Act = Callable[[], object]
Program = Callable[[Act, Path, Limits], object]


def started(limits: Limits, **more: Any) -> commgrid.HyperCommGrid:
    given = {"tp": 2, "pp": 2, "timeout": limits.timeout, "startup_timeout": limits.startup}
    return commgrid.initialize(**{**given, **more})


def replaced(owner: object, name: str, act: Act, at: int) -> None:
    """From its call number `at` on, a function of the library acts before it is called."""
    before, calls = getattr(owner, name), []

    def acting(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) == at:
            act()
        return before(*args, **kwargs)

    setattr(owner, name, acting)


def before_initialize(act: Act, folder: Path, limits: Limits) -> None:
    act()
    started(limits)


def while_agreeing(act: Act, folder: Path, limits: Limits) -> None:
    """The victim has torch.distributed up and has come to compare what it was given."""
    from commgrid.rendezvous.agreement import Agreement

    before, acted = Agreement._decision, []

    def acting(self: Agreement, *given: Any) -> Any:
        if self.about == "grid 'default'" and not acted:
            acted.append(self.about)
            act()
        return before(self, *given)

    Agreement._decision = acting  # type: ignore[method-assign]
    started(limits)


def while_creating_groups(act: Act, folder: Path, limits: Limits) -> None:
    from commgrid.torch_compat import groups as torch_groups

    replaced(torch_groups, "create_group", act, 3)
    started(limits)


def in_an_all_reduce(act: Act, folder: Path, limits: Limits) -> None:
    """Over all axes in turn, so that everyone waits for somebody who waits for the victim."""
    with named_failures(started(limits)):
        looping(act, lambda x: [all_reduce(x, axis) for axis in ("tp", "dp", "pp")])


def in_an_all_to_all(act: Act, folder: Path, limits: Limits) -> None:
    with named_failures(started(limits, tp=1, pp=1, ep=4)):
        looping(act, lambda x: [all_to_all(x, axis) for axis in ("ep", "edp")])


def looping(act: Act, step: Callable[[Tensor], object]) -> None:
    numbers = torch.ones(64_000)
    for _ in range(5):
        step(numbers)
    act()  # the others are in the next one meanwhile, or soon
    while True:
        step(numbers)


class Stage(nn.Module):
    """Adds its weight over tp; acts in the third forward of the second step."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))
        self.act, self.seen = act, 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        if self.seen == 4 + 3:
            self.act()
        return all_reduce(x @ self.weight, "tp", op="avg").detach() + x @ self.weight


def in_a_pipeline(act: Act, folder: Path, limits: Limits) -> None:
    grid = started(limits)
    module = Stage(act)
    pipeline = Pipeline(module, num_microbatches=4, loss=lambda y, target: y.square().sum())
    inputs = [torch.ones(4, 8)] * 4
    with named_failures(grid):
        while True:
            pipeline.step(inputs, inputs)
            all_reduce(module.weight.grad, "dp")
            module.zero_grad()


def in_a_transfer(act: Act, folder: Path, limits: Limits) -> None:
    """From all ranks to all ranks, in another order, so that everybody sends and receives."""
    from commgrid.resharding import transport

    source = started(limits)
    target = started(limits, name="serving", tp=1, pp=1, ranks=[7, 6, 5, 4, 3, 2, 1, 0])
    models = [nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))) for _ in range(2)]
    torch.manual_seed(0)
    for parameter in models[0].parameters():
        nn.init.normal_(parameter)
    transfer = Transfer(
        *models, source_grid=source, target_grid=target, max_bytes=1 << 14, timeout=limits.timeout
    )
    transfer.run()
    replaced(transport.Carrier, "carry", act, 1)
    transfer.run()


def in_a_save(act: Act, folder: Path, limits: Limits) -> None:
    from commgrid.checkpoint import saving

    grid = started(limits, tp=1, pp=1)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    replaced(saving, "write", act, 2)
    for step in (1, 2):
        checkpoint.save(folder / "checkpoints", step, model, progress=False, grid=grid)


def in_destroy(act: Act, folder: Path, limits: Limits) -> None:
    started(limits)
    replaced(torch.distributed, "destroy_process_group", act, 3)
    commgrid.destroy()
    commgrid.shutdown()


MOMENTS: dict[str, Program] = {
    "before initialize": before_initialize,
    "while agreeing": while_agreeing,
    "while creating groups": while_creating_groups,
    "in an all-reduce": in_an_all_reduce,
    "in an all-to-all": in_an_all_to_all,
    "in a pipeline step": in_a_pipeline,
    "in a transfer": in_a_transfer,
    "in a checkpoint save": in_a_save,
    "in destroy": in_destroy,
}


def now() -> float:
    """A clock that all processes of the machine share."""
    return time.monotonic()
