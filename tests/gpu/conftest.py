"""Settings of GPU tests: they skip without CUDA, saying why, but for those that run emulated."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tests.gpu.on_gpus import Where
from tests.gpu.session import Session
from tests.gpu.turns import turn

TURNS = Path(tempfile.gettempdir()) / f"commgrid-gpu-tests-{os.getuid()}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--emulate", action="store_true", help="over gloo on the CPU")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: counts memory of the device, which all tests share")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    emulated = config.getoption("--emulate", default=False)
    for item in items:
        if Path(__file__).parent not in Path(item.path).parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if emulated and "where" not in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason="needs CUDA: it has no form over gloo"))
        elif not emulated and not torch.cuda.is_available():
            reason = "needs CUDA: torch.cuda.is_available() is false here"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def where(request: pytest.FixtureRequest) -> Where:
    """Where a test runs that has a form over gloo."""
    return Where(emulated=request.config.getoption("--emulate", default=False))


@pytest.fixture(scope="module")
def session(where: Where) -> Iterator[Session]:
    """Two ranks that run one check after the other."""
    with Session(where, 2) as session:
        yield session


@pytest.fixture(autouse=True)
def _turn(request: pytest.FixtureRequest) -> Iterator[None]:
    alone = request.node.get_closest_marker("alone") is not None
    emulated = request.config.getoption("--emulate", default=False)
    with nullcontext() if emulated else turn(TURNS, alone):
        yield
