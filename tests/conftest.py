"""What every test runs under, and which of them only `pytest --full` runs."""

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.full import LEFT_OUT, LONGEST, UNMATCHED, full, patterns

# Run by tests in processes where some release of megatron-core stands in for the installed one.
collect_ignore = [f"megatron_adapter/{name}.py" for name in ("modules", "on_release", "starting")]

# A store's server looks up the name of whoever connects; where no name server answers, that takes
# 5 s by default, for everybody.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# A job in the background of a shell ignores Ctrl-C, and what it starts does too; tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Ranks are forked, and a forked child hangs if its parent has used several OpenMP threads.
torch.set_num_threads(1)

# The same examples in every run, however long one takes on a busy machine.
settings.register_profile("full", derandomize=True, deadline=None)
settings.register_profile("short", settings.get_profile("full"), max_examples=30)


MOST_PROCESSES = 4
"""Each of them may start eight ranks."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run what tests/full.py lists, too")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Everything at once runs in several processes, a file in one each: most tests use one core.

    Files begin in the order of tests/full.py, the longest first: xdist's own order, by the number
    of tests, has those of a few long ones last, when the other processes are done.

    Where pytest-xdist is not installed, -n was given or only some tests were asked for, as pytest
    does by itself.
    """
    options = config.option
    if hasattr(config, "workerinput"):  # is one of the several
        return
    if getattr(options, "numprocesses", 0) is not None or options.usepdb or options.collectonly:
        return
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        options.numprocesses = min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
        options.dist = "loadfile"
        options.loadscopereorder = False


def pytest_configure(config: pytest.Config) -> None:
    os.environ["COMMGRID_TESTS"] = "full" if config.getoption("--full") else "short"
    settings.load_profile("full" if full() else "short")
    config.pluginmanager.register(NoGridIsLeft())


class NoGridIsLeft:
    """A test that leaves a grid alive fails, doctests too: whoever comes next would start with it.

    A plugin, since hooks of this file are called for the tests beside it alone.
    """

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        yield
        runtime = sys.modules.get("commgrid.runtime.registry")
        left = sorted(runtime._registry.grids) if runtime else []
        if runtime and left:
            runtime.shutdown()
            pytest.fail(f"{item.nodeid} has left grids alive: {', '.join(left)}", pytrace=False)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """Marks what the list names, lets -k and -m choose, and then leaves the marked ones out."""
    unmatched = []
    by_file: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.nodeid.partition("::")[0], []).append(item)
    for line, pattern in patterns().items():
        file = line.partition("::")[0]
        named = [item for item in by_file.get(file, []) if pattern.fullmatch(item.nodeid)]
        for item in named:
            item.add_marker(pytest.mark.full)
        if not named:
            unmatched.append(line)
    config.stash[UNMATCHED] = unmatched
    yield
    left_out = [item for item in items if item.get_closest_marker("full") and not full()]
    config.stash[LEFT_OUT] = len(left_out)
    if hasattr(config, "workeroutput"):
        config.workeroutput["left out"] = len(left_out)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    if hasattr(config, "workerinput"):
        first = {file: place for place, file in enumerate(LONGEST)}
        items.sort(key=lambda item: first.get(item.nodeid.partition("::")[0], len(first)))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every process collects everything; what one of them has left out is told once."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left out", 0)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    count = config.stash.get(LEFT_OUT, 0)
    if count:
        terminalreporter.write_line(
            f"{count} of the tests that were asked for run only with --full (tests/full.py)"
        )
