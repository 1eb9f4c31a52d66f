"""Settings of every test, and the selection of the run's size (tests/sizes.py)."""

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo  # optimizers import it at their first step: here once, not once a rank
from hypothesis import settings

from tests.sizes import SIZES, VARIABLE, full, size, size_of, unmatched

# Run by tests in processes where another release of megatron-core replaces the installed one.
collect_ignore = [f"megatron_adapter/{name}.py" for name in ("modules", "on_release", "starting")]

# A store's server looks up the name of each client. Without a name server that takes 5 s by
# default.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# A job in the background of a shell ignores Ctrl-C, and so do its children; tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A forked rank hangs if its parent has used several OpenMP threads.
torch.set_num_threads(1)

# The same examples in every run, without a deadline for each.
settings.register_profile("full", derandomize=True, deadline=None)
settings.register_profile("short", settings.get_profile("full"), max_examples=30)

LEFT_OUT = pytest.StashKey[dict[str, int]]()
"""Number of tests left out of this run, by the size that would include them."""

MOST_WORKERS = 5
"""Each may start eight ranks."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run tests marked full")
    parser.addoption("--nightly", action="store_true", help="run every test, however long")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Use several xdist workers where everything is run: one more than cores, since tests wait.

    Idle workers take tests from busy ones. Options given on the command line win.
    """
    options = config.option
    if hasattr(config, "workerinput"):
        return
    if getattr(options, "numprocesses", 0) is not None or options.usepdb or options.collectonly:
        return
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        options.numprocesses = min(len(os.sched_getaffinity(0)) + 1, MOST_WORKERS)
        options.dist = "worksteal"


def pytest_configure(config: pytest.Config) -> None:
    chosen = [name for name in SIZES[1:] if config.getoption(f"--{name}")]
    os.environ[VARIABLE] = chosen[-1] if chosen else SIZES[0]
    settings.load_profile("full" if full() else "short")
    config.pluginmanager.register(NoGridIsLeft())


class NoGridIsLeft:
    """Fail a test, or doctest, that leaves a grid alive for the next one.

    A plugin, since hooks of this file run for tests below this folder only.
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
    """Leave out tests of larger sizes, after -k and -m have chosen."""
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and (wrong := unmatched(items)):
        raise pytest.UsageError("\n".join(wrong))
    yield
    smaller = SIZES[: SIZES.index(size()) + 1]
    left_out = [item for item in items if size_of(item) not in smaller]
    counts = {name: sum(size_of(item) == name for item in left_out) for name in SIZES[1:]}
    config.stash[LEFT_OUT] = counts
    if hasattr(config, "workeroutput"):
        config.workeroutput["left out"] = counts
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the counts of one worker: each collects everything."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left out", {})


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for name, count in config.stash.get(LEFT_OUT, {}).items():
        if count:
            terminalreporter.write_line(f"{count} of the selected tests run only with --{name}")
