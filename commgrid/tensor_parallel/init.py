"""The same initial weights on any grid.

A sharded layer draws its full weight and keeps its slice, so what it draws must not
depend on how many ranks share it, nor on which layers this rank happens to build. Each
module therefore gets a random stream of its own, seeded by the job's seed and the
module's name in the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from commgrid.collectives.group_ref import GroupRef
from commgrid.parameters import own_slice

Init = Callable[[Tensor], object]
"""Fills a full weight in place from torch's global random state."""


def draw(
    parameter: nn.Parameter, full_shape: Sequence[int], init: Init, dim: int | None, group: GroupRef
) -> None:
    """Fills a parameter with its slice along `dim` of what `init` makes of the full shape.

    The full tensor is made on the CPU, so that the numbers do not depend on the device; on the
    meta device nothing is drawn.
    """
    if parameter.is_meta:
        return
    with torch.no_grad():
        full = torch.empty(tuple(full_shape), dtype=parameter.dtype, device="cpu")
        init(full)
        if dim is not None:
            full = own_slice(full, dim, group, parameter.shape[dim])
        parameter.copy_(full)


def initialize_parameters(model: nn.Module, seed: int) -> None:
    """Draws every parameter anew, the same full weights on any grid.

    Calls `reset_parameters()` of each module that has it, with torch's random state
    seeded by `seed` and the module's name; the state is left as it was. A model built on the
    meta device is drawn so after `model.to_empty(device=…)`.

    Args:
        model: built on every rank with the same module names.
        seed: the same on every rank.
    """
    for name, module in model.named_modules():
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            with other_random_state(seed_of(f"{seed}/{name}")):
                reset()


@contextmanager
def other_random_state(seed: int) -> Iterator[None]:
    """Within it, torch's random state is that of `seed`; after it, what it was before."""
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        torch.manual_seed(seed)
        yield


def seed_of(text: str) -> int:
    """A seed of 63 bits that depends on every character of the text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
