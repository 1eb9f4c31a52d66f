"""States of random generators that do not fit: all generators stay as they were."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch

from commgrid import CheckpointError, checkpoint


def drawn(*generators: torch.Generator) -> list[Any]:
    """The next number of each generator, after which all are where they were."""
    states = checkpoint.random_states({str(n): each for n, each in enumerate(generators)})
    found = [
        random.random(), float(torch.rand(1)), float(numpy.random.rand()),
        *(float(torch.rand(1, generator=each)) for each in generators),
    ]  # fmt: skip
    checkpoint.set_random_states(states, {str(n): each for n, each in enumerate(generators)})
    return found


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("torch", torch.zeros(3, dtype=torch.uint8)),
        ("python", [1, [2, 3], None]),
        ("numpy", {"bit_generator": "PCG64", "state": {"state": 1, "inc": 2}}),
        ("given loader", torch.zeros(3, dtype=torch.uint8)),
    ],
)
def test_nothing_is_set_where_one_state_does_not_fit(name: str, state: Any) -> None:
    loader = torch.Generator()
    states = checkpoint.random_states({"loader": loader})
    for _ in range(3):  # on from there
        random.random(), torch.rand(1), numpy.random.rand(), torch.rand(1, generator=loader)
    before = drawn(loader)
    told = f"^the state of generator {name.removeprefix('given ')} is of another kind or version"
    with pytest.raises(CheckpointError, match=told):
        checkpoint.set_random_states({**states, name: state}, {"loader": loader})
    assert drawn(loader) == before
    checkpoint.set_random_states(states, {"loader": loader})
    assert drawn(loader) != before


def test_states_that_are_missing_are_said_to_be() -> None:
    with pytest.raises(CheckpointError, match=r"^states=None: expected what random_states"):
        checkpoint.set_random_states(None)  # type: ignore[arg-type]
