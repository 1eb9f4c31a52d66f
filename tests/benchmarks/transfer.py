"""Weights from one grid to another, against a checkpoint, gathering, and Megatron's refit.

    python tests/benchmarks/transfer.py --json
    python tests/benchmarks/transfer.py --only planning
    python tests/benchmarks/transfer.py --only "fsdp" --megabytes 20 --repeats 3

8 gloo ranks, fp32, from barrier to barrier, each contestant in turn. All of them fill one target,
which is compared with what it has to be after the first time. The peers:

- a checkpoint: `checkpoint.save` of the source to a new folder, `checkpoint.load` into the target;
- all-gather and slice: parameter after parameter is gathered to full over the source's groups, sent
  to whoever else needs it, and cut;
- megatron-core's `reshard_model_weights` with its gloo service, of Megatron's GPT, on a release of
  its own that is unpacked beside this Python. Its plan is made before, and kept, as ours is.

`move` is as `Transfer` comes, which compares the source's copies to the last bit before it sends
one. No peer does; `move, copies="any"` is without.

`two programs` is a transfer between two programs of 2 ranks, each with a torch.distributed of its
own, beside the same transfer between 2 + 2 ranks of one world; each repeat has both, one after the
other. The time is that of `run`, until the last rank is done; bytes are what all ranks receive of
each other in it. Memory is the most that a rank takes to make the transfer and run it twice, its
tensors apart.

`planning` is what a rank does without the others, of a model of 10,000 parameters on 1,024 ranks,
to 256 others or to the same: reading all layouts, the plan, its digest, and the rank's own
messages. Their boxes, of which FSDP2's ranks have millions, are listed when they are moved.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[2]))

import commgrid
from commgrid import checkpoint
from commgrid.resharding.layouts import Form, GridLayouts, LayoutEntry, pack
from commgrid.resharding.transport import most_of
from commgrid.transfer import Transfer, TransferPlan
from tests.benchmarks.race import meet
from tests.benchmarks.report import Row, compare, main, run_on_ranks
from tests.benchmarks.transfer_model import CUT, WIDTH, build, part_of, shapes_of, stage_of
from tests.benchmarks.transfer_programs import PROGRAMS, two_programs
from tests.megatron_adapter.wheels import on_release
from tests.transfer.cuts import Cut
from tests.transfer.pairs import on

CHECKPOINT, GATHER = "checkpoint", "all-gather and slice"
RELEASE = "0.19.2"
MEGATRON = f"megatron-core {RELEASE}"
OURS = {"compare": "move", "any": 'move, copies="any"'}
RANKS = 8
PAIRS = {
    "tp 2 · pp 2 · dp 2 → tp 4 · dp 2": (on(8, tp=2, pp=2, dp=2), on(8, tp=4, dp=2)),
    "fsdp 8 → tp 4 · dp 2": (on(8, dp=8, way="fsdp"), on(8, tp=4, dp=2)),
    "dp 8 → tp 8 (all is there)": (on(8, dp=8), on(8, tp=8)),
    "tp 2 · pp 2 → tp 4 on 4 others": (on(4, tp=2, pp=2), on(4, 4, tp=4)),
}
MEGATRONS = {
    "GPT, tp 2 · pp 2 · dp 2 → tp 4 · dp 2": ({"tp": 2, "pp": 2}, {"tp": 4}),
    "GPT, tp 8 → tp 2 · dp 4": ({"tp": 8}, {"tp": 2}),
}
LAYERS = 1250
PLANNING = {
    f"{case} → tp 4 · dp {len(ranks) // 4}": (source, ranks)
    for case, source in (
        ("tp 8 · pp 8 · dp 16", lambda: of_tp(range(1024), 8, 8)),
        ("fsdp 1,024", lambda: of_fsdp(range(1024))),
    )
    for ranks in (range(1024, 1280), range(1024))  # others, or the same
}


# -- who moves it ------------------------------------------------------------------------


class GatherAndSlice:
    """What people write: each parameter made whole on all ranks, and each takes its slice."""

    def __init__(
        self, layers: int, source: Any, target: Any, grids: list[Any], is_apart: bool
    ) -> None:
        self.layers, self.is_apart = layers, is_apart
        self.source = dict(source.named_parameters()) if source is not None else {}
        self.target = dict(target.named_parameters()) if target is not None else {}
        self.from_grid, self.to_grid = grids

    @torch.no_grad()
    def __call__(self) -> None:
        for name, shape in shapes_of(self.layers).items():
            full = torch.empty(shape)
            if self.from_grid is not None:
                full = self._whole_on_source(name, full)
            if self.is_apart:  # the source's first rank sends it to all
                dist.broadcast(full, src=0)
            if name in self.target:
                self.target[name].copy_(part_of(name, full, self.to_grid))

    def _whole_on_source(self, name: str, full: Tensor) -> Tensor:
        grid, held = self.from_grid, self.source.get(name)
        dim = CUT.get(name.split(".", 2)[2])
        if isinstance(held, DTensor):
            full = held.full_tensor()
        elif held is not None and dim is not None and grid.size("tp") > 1:
            parts = [torch.empty_like(held) for _ in range(grid.size("tp"))]
            dist.all_gather(parts, held.detach(), group=grid.get_group("tp"))
            full = torch.cat(parts, dim)
        elif held is not None:
            full = held.detach()
        if grid.size("pp") > 1:
            group = grid.get_group("pp")
            owner = dist.get_global_rank(group, stage_of(name, self.layers, grid))
            dist.broadcast(full, src=owner, group=group)
        return full


def through_disk(place: Path, source: Any, target: Any, grids: list[Any]) -> None:
    if source is not None:
        checkpoint.save(str(place), 1, source, progress=False, grid=grids[0])
    dist.barrier()
    if target is not None:
        checkpoint.load(str(place), target, progress=False, grid=grids[1])


def runs_of(source: Any, target: Any, grids: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """Ours: as it comes, and without comparing copies."""
    return {
        OURS[copies]: Transfer(source, target, **grids, copies=copies, name=copies).run
        for copies in OURS
    }


def on_a_rank(pair: tuple[Cut, Cut], layers: int, repeats: int, folder: str) -> Any:
    """Milliseconds of each contestant, in turn, and whether all ended with the same target."""
    warnings.simplefilter("ignore")
    commgrid.join()
    grids: list[Any] = [
        commgrid.initialize(**cut.axes, ranks=list(cut.ranks), name=name)
        for cut, name in zip(pair, ("source", "target"), strict=True)
    ]
    source, target = (
        build(cut, grid, layers) if grid is not None else None
        for cut, grid in zip(pair, grids, strict=True)
    )
    of_grids = {"source_grid": grids[0], "target_grid": grids[1]}
    is_apart = pair[0].ranks != pair[1].ranks
    gather = GatherAndSlice(layers, source, target, grids, is_apart)
    place = Path(folder) / "checkpoint"
    actions: dict[str, Callable[[], object]] = {
        **runs_of(source, target, of_grids),
        GATHER: gather,
        CHECKPOINT: lambda: through_disk(place, source, target, grids),
    }
    expected = {name: p.detach().clone() for name, p in gather.target.items()}

    def clean() -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(place, ignore_errors=True)

    spent = in_turn(actions, repeats, gather.target, expected, clean)
    commgrid.shutdown()
    return spent


def in_turn(
    actions: dict[str, Callable[[], object]], repeats: int, target: dict[str, Any],
    expected: dict[str, Tensor], clean: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:  # fmt: skip
    """Milliseconds of each action in each repeat; the first is compared and not counted."""
    spent: dict[str, list[float]] = {name: [] for name in actions}
    shuffle = random.Random(0).shuffle
    for repeat in range(repeats + 1):
        order = list(actions)
        shuffle(order)  # in the same way on all ranks
        for name in order:
            if not repeat:
                with torch.no_grad():
                    for parameter in target.values():
                        parameter.fill_(7.0)
            meet()
            started = time.perf_counter()
            actions[name]()
            meet()
            if repeat:
                spent[name].append((time.perf_counter() - started) * 1e3)
            else:
                wrong = [key for key, one in target.items() if not torch.equal(one, expected[key])]
                assert not wrong, f"{name} leaves {wrong} as they should not be"
            clean()
    return spent


# -- planning ----------------------------------------------------------------------------


PARTS = {  # of a layer: shape, and the dim that tp cuts
    "norm": ((4096,), None), "up": ((16384, 4096), 0), "down": ((4096, 16384), 1),
    "bias": ((16384,), 0), "q": ((4096, 4096), 0), "k": ((4096, 4096), 0),
    "v": ((4096, 4096), 0), "proj": ((4096, 4096), 1),
}  # fmt: skip


def layout(layers: range, ranks: int, rank: int, fsdp: bool = False) -> bytes:
    """What a rank has of layers of eight parameters, cut by tp or by FSDP2."""
    forms = {}
    for name, (shape, dim) in PARTS.items():
        dim = 0 if fsdp else dim
        offset, size = [0] * len(shape), list(shape)
        if dim is not None:
            size[dim] //= ranks
            offset[dim] = rank * size[dim]
        forms[name] = Form(shape, "bfloat16", 2, ((tuple(offset), tuple(size)),))
    return pack(
        [LayoutEntry(f"blocks.{i}.{name}", form) for i in layers for name, form in forms.items()]
    )


def of_tp(ranks: range, tp: int, pp: int) -> GridLayouts:
    """tp, then dp, then pp."""
    kinds = {
        (t, p): layout(range(p * LAYERS // pp, (p + 1) * LAYERS // pp), tp, t)
        for t, p in itertools.product(range(tp), range(pp))
    }
    stage = len(ranks) // pp
    return GridLayouts.of({rank: kinds[i % tp, i // stage] for i, rank in enumerate(ranks)})


def of_fsdp(ranks: range) -> GridLayouts:
    """Every rank with rows of its own: a layer says what the others are like, but for names."""
    (names,) = GridLayouts.of({0: layout(range(LAYERS), len(ranks), 0, True)}).lists
    one = GridLayouts.of(
        {rank: layout(range(1), len(ranks), i, True) for i, rank in enumerate(ranks)}
    )
    return GridLayouts((names,), one.packed, one.places)


def planning(source: GridLayouts, target: GridLayouts, repeats: int) -> list[float]:
    """Seconds of a rank, every other time one of the target's."""
    found = []
    for repeat in range(repeats):
        heard = [GridLayouts(side.lists, side.packed, side.places) for side in (source, target)]
        rank = min((target if repeat % 2 else source).places)
        started = time.perf_counter()
        plan = TransferPlan(*heard)
        assert len(plan.digest) == 64
        assert plan.messages(rank, most_of(1 << 28))
        found.append(time.perf_counter() - started)
    return found


# -- all of them -------------------------------------------------------------------------


def layers_for(megabytes: int, of_a_layer: int) -> int:
    """An even number of layers, which about so many megabytes are."""
    return max(round(megabytes * 1e6 / (4 * of_a_layer) / 2), 1) * 2


def rows_of(case: str, ranks: list[dict[str, list[float]]]) -> Iterator[Row]:
    means = {
        name: [statistics.mean(one) for one in zip(*(r[name] for r in ranks), strict=True)]
        for name in ranks[0]
    }
    for peer in [name for name in means if name not in OURS.values()]:
        for ours in OURS.values():
            yield compare(case, ours, "ms", peer, means[ours], means[peer])


def measure(args: argparse.Namespace) -> Iterator[Row]:
    def wanted(case: str) -> bool:
        return not args.only or args.only in case

    for case, (source, ranks) in PLANNING.items():
        if wanted(f"planning {case}"):
            spent = planning(source(), of_tp(ranks, 4, 1), args.repeats)
            yield compare(case, "planning of 10,000 tensors", "s", "alone", spent, [])
    layers = layers_for(args.megabytes, 8 * WIDTH * WIDTH)
    for case, pair in PAIRS.items():
        if wanted(case):
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                ranks = run_on_ranks(
                    on_a_rank, RANKS, pair, layers, args.repeats, folder, backend=None,
                    launcher="torchrun", timeout=900,
                )  # fmt: skip
            yield from rows_of(case, ranks)
    for case, pair in PROGRAMS.items():
        if wanted(case):
            yield from two_programs(case, pair, layers, args.repeats)
    layers = layers_for(args.megabytes, 12 * WIDTH * WIDTH)
    for case, sizes in MEGATRONS.items():
        if wanted(case):
            try:
                ranks = on_release(
                    RELEASE, "tests.benchmarks.transfer_gpt", "on_ranks", RANKS, sizes, layers,
                    WIDTH, args.repeats, MEGATRON, timeout=900,
                )  # fmt: skip
            except pytest.skip.Exception as error:  # there is no index to get it from
                print(f"{case}: {error}", file=sys.stderr)
                continue
            yield from rows_of(case, ranks)


if __name__ == "__main__":
    main(
        __doc__, measure,
        ("--repeats", {"type": int, "default": 11, "help": "of each contestant (default 11)"}),
        ("--megabytes", {"type": int, "default": 200, "help": "of the model (default 200)"}),
        ("--folder", {"metavar": "DIR", "help": "where to write (default: the temporary folder)"}),
        ("--only", {"metavar": "TEXT", "help": "cases whose name has this in it"}),
    )  # fmt: skip
