"""The ways in which a model gets the state of another one, for what has to hold of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import commgrid
from commgrid import checkpoint
from commgrid.transfer import Transfer

WAYS = ("load", "recover", "transfer")


def bring(
    way: str, folder: str | Path, source: tuple[Any, ...], target: tuple[Any, ...],
    *, verify: bool = False,
) -> None:  # fmt: skip
    """Give a model, or a model and its optimizers, the state of others on the same grid.

    Args:
        way: one of `WAYS`.
        folder: for checkpoints; the same on all ranks.
        source: the model, or the model and its optimizers.
        target: in the same form.
        verify: whether a transfer compares digests in the end.
    """
    if way == "load":
        checkpoint.save(folder, 1, *source, progress=False)
        checkpoint.load(folder, *target, progress=False)
    elif way == "recover":
        checkpoint.keep(1, *source)
        commgrid.recover(None, *target)
    else:
        grid, (models, *optimizers) = commgrid.get_grid(), zip(source, target, strict=True)
        how: Any = {"optimizer": optimizers[0]} if optimizers else {}
        Transfer(*models, source_grid=grid, target_grid=grid, timeout=30, **how).run(verify)


def attempt(source: Any, target: Any, **options: Any) -> str:
    """The error of a transfer, or the numbers that tensors by name have then."""
    try:
        transfer = Transfer(source, target, **{"timeout": 20, **options})
        transfer.run()
        transfer.close()
    except commgrid.CommGridError as error:
        return f"{type(error).__name__}: {error}"
    return str({name: one.tolist() for name, one in target.items()})
