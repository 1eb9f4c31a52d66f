"""pytest plugin: tests marked `ranks` run on several ranks.

    @pytest.mark.ranks(4)                  # on 4 ranks, over gloo
    @pytest.mark.ranks([1, 2, 4])          # three tests
    @pytest.mark.ranks(4, tp=2)            # with a grid: commgrid.initialize(tp=2)
    @pytest.mark.ranks(4, leftovers=["threads"])   # threads may be left; "ignore": everything

pytest loads this module by its entry point in every project of the environment, so it imports torch
only when such a test runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from commgrid.launching.leftovers import kinds_of

MARKER = "ranks"


class OnEachRank:
    """The value of a fixture before the ranks exist: its name; any other use is an error."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<{self._name} of each rank>"

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # of pickle, before there is a name
            raise AttributeError(attribute)
        raise AttributeError(
            f"{self._name}.{attribute} was asked for before the ranks exist: {self._name} has a "
            "value in the body of the test only, not in another fixture"
        )


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("commgrid", "tests on several ranks")
    group.addoption(
        "--ranks-timeout",
        type=float,
        default=240.0,
        metavar="SECONDS",
        help="kill the ranks of a test after this many seconds and print their stacks (240)",
    )
    group.addoption(
        "--ranks-backend",
        choices=["gloo", "nccl"],
        help="backend of the ranks (nccl with a GPU for each rank, else gloo)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{MARKER}(n, leftovers=(), **sizes): run the body on n ranks, or for each n of a list; "
        'leftovers are kinds that may be left, or "ignore"; sizes are those of '
        "commgrid.initialize, whose grid is the fixture grid",
    )


@pytest.fixture(scope="session")
def rank() -> Any:
    """Global rank of the process, in a test marked `ranks`."""
    return OnEachRank("rank")


@pytest.fixture(scope="session")
def grid() -> Any:
    """The grid of a test marked `ranks`: made before its body, and shut down after it."""
    return OnEachRank("grid")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker(MARKER)
    if marker is not None:
        if "world_size" not in metafunc.fixturenames:
            metafunc.fixturenames.append("world_size")
        sizes = _sizes(marker, metafunc.definition.nodeid)
        metafunc.parametrize("world_size", sizes, ids=[f"{size} ranks" for size in sizes])


def _sizes(marker: pytest.Mark, test: str) -> list[int]:
    given = marker.args[0] if len(marker.args) == 1 else None
    listed = given if isinstance(given, (list, tuple)) else [given]
    sizes = [size for size in listed if isinstance(size, int) and size > 0]
    if not sizes or len(sizes) < len(listed):
        raise pytest.UsageError(
            f"{test}: @pytest.mark.ranks takes one number of ranks, or a list of them; "
            f"got {', '.join(map(repr, marker.args)) or 'nothing'}"
        )
    try:
        kinds_of(marker.kwargs.get("leftovers", ()))
    except ValueError as error:
        raise pytest.UsageError(f"{test}: @pytest.mark.ranks: {error}") from None
    return sizes


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    marker = pyfuncitem.get_closest_marker(MARKER)
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    if marker is None:
        for name, value in arguments.items():
            if isinstance(value, OnEachRank):
                pytest.fail(f"fixture {name!r} needs @pytest.mark.ranks(n)", pytrace=False)
        return None
    from commgrid.launching.local_ranks import RanksFailed

    world_size = pyfuncitem.callspec.getparam("world_size")
    assert isinstance(world_size, int)  # _sizes has checked it
    test = pyfuncitem.obj
    hypothesis = getattr(test, "hypothesis", None)
    if inspect.iscoroutinefunction(hypothesis.inner_test if hypothesis else test):
        pytest.fail(
            f"{pyfuncitem.name} is async, and @pytest.mark.ranks runs a plain function on each "
            "rank; call asyncio.run(…) in its body",
            pytrace=False,
        )
    on_ranks = _on_ranks(
        hypothesis.inner_test if hypothesis else test,
        world_size,
        dict(marker.kwargs),
        pyfuncitem.config,
    )
    if hypothesis is None:
        try:
            on_ranks(**arguments)
            return True
        except RanksFailed as failed:
            said = str(failed)
        pytest.fail(said, pytrace=False)  # the ranks' tracebacks are what matters
    inner = hypothesis.inner_test
    hypothesis.inner_test = on_ranks  # each example runs on ranks, and shrinks here
    try:
        test(**arguments)
    finally:
        hypothesis.inner_test = inner
    return True


def _on_ranks(
    test: Callable[..., Any], world_size: int, given: dict[str, Any], config: pytest.Config
) -> Callable[..., None]:
    def on_ranks(*args: Any, **arguments: Any) -> None:
        __tracebackhide__ = True
        options = dict(given)
        import torch

        from commgrid.launching.local_ranks import run_on_ranks

        leftovers = options.pop("leftovers", ())
        backend = config.getoption("--ranks-backend")
        if backend is None:
            backend = "nccl" if torch.cuda.device_count() >= world_size else "gloo"
        skipped = run_on_ranks(
            _body, world_size, test, args, arguments, options,
            leftovers=leftovers, backend=backend, method="spawn" if backend == "nccl" else "fork",
            timeout=config.getoption("--ranks-timeout"),
        )  # fmt: skip
        if all(reason is not None for reason in skipped):
            pytest.skip(skipped[0])
        if any(reason is not None for reason in skipped):
            ranks = [rank for rank, reason in enumerate(skipped) if reason is not None]
            pytest.fail(f"ranks {ranks} have skipped the test, and the others have not")

    return on_ranks


def _body(
    test: Callable[..., Any], args: tuple[Any, ...], arguments: dict[str, Any],
    sizes: dict[str, Any],
) -> str | None:  # fmt: skip
    """Run a test's body on this rank; return the reason if it was skipped."""
    import torch.distributed as dist

    from commgrid.runtime.start import initialize

    wanted = {name for name, value in arguments.items() if isinstance(value, OnEachRank)}
    here: dict[str, Any] = {"rank": dist.get_rank()}
    if "grid" in wanted or sizes:
        here["grid"] = initialize(**sizes)
    try:
        test(*args, **{**arguments, **{name: here[name] for name in wanted}})
    except pytest.skip.Exception as skipped:
        return str(skipped)
    return None
