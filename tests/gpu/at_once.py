"""pytest plugin: each result is appended to a file and printed at once, whatever kills pytest."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.gpu.results import KEPT, Result, machine

PRINTED = os.dup(1)  # before pytest keeps output back


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--at-once", metavar="FILE", help="append each result to it, as JSON lines")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(AtOnce(config), "results at once")


class AtOnce:
    """Appends the name of each test that begins, and its result when it ends."""

    def __init__(self, config: pytest.Config) -> None:
        self._file = os.open(config.getoption("--at-once"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._machine = machine(config.getoption("--emulate"))
        self._skipped: set[str] = set()

    def _append(self, row: dict[str, Any]) -> None:
        os.write(self._file, f"{json.dumps(row)}\n".encode())

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._append({"begun": nodeid, "pid": os.getpid()})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            found = dict(report.user_properties).get("found", "")
            if isinstance(report.longrepr, tuple):  # of a skipped test: file, line, reason
                found = report.longrepr[2].removeprefix("Skipped: ")
            text = "\n".join([report.capstdout, report.capstderr, report.longreprtext])
            lines = text.splitlines() if report.failed else []
            self._tell(report.nodeid, report.outcome, report.duration, str(found), lines)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._tell(report.nodeid, "failed", 0.0, "", report.longreprtext.splitlines())

    def _tell(self, name: str, outcome: str, took: float, found: str, lines: list[str]) -> None:
        result = Result(name, outcome, took, found, tuple(lines[-KEPT:]), **self._machine)
        self._append(vars(result))
        test = name.partition("[")[0]
        if outcome != "skipped" or test not in self._skipped:  # of all cases, the first
            os.write(PRINTED, f"{result}\n".encode())
        self._skipped |= {test} if outcome == "skipped" else set()

    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str]:
        return report.outcome, "", ""  # pytest itself prints nothing
