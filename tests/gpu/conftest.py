"""GPU tests skip, saying why, where there is no CUDA; their summary goes to RESULTS.md on request.

Several ranks on one GPU: NCCL refuses two ranks of one host on one device unless each says it is
on another host, so every rank gets its own NCCL_HOSTID and NCCL talks over sockets on loopback.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest
import torch

RESULTS = Path(__file__).with_name("RESULTS.md")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = "needs CUDA: torch.cuda.is_available() is false here"
    for item in items:
        if Path(__file__).parent in Path(item.path).parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-results", action="store_true", help="write tests/gpu/RESULTS.md")


@pytest.hookimpl(wrapper=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> Iterator[None]:
    yield
    if not config.getoption("--write-results", default=False) or not torch.cuda.is_available():
        return
    lines = [
        "# GPU test results", "",
        f"- {date.today()}, {torch.cuda.device_count()} × {torch.cuda.get_device_name()}",
        f"- torch {torch.__version__}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}", "",
    ]  # fmt: skip
    for outcome in ("passed", "failed", "skipped"):
        seconds: dict[str, list[float]] = {}
        for report in terminalreporter.stats.get(outcome, []):
            if "tests/gpu" in report.nodeid:
                name = report.nodeid.removeprefix("tests/gpu/").partition("[")[0]
                seconds.setdefault(name, []).append(report.duration)
        for name, each in sorted(seconds.items()):
            many = f"{len(each)} cases, " if len(each) > 1 else ""
            lines.append(f"- {outcome}: {name} ({many}{sum(each):.1f} s)")
    RESULTS.write_text("\n".join(lines) + "\n")
