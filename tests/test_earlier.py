"""Earlier import paths: each still leads to its names, with one warning, and so do pickles."""

import importlib
import pickle
import sys
import warnings

import pytest

from commgrid import earlier
from commgrid.cost_model.collective_form import KINDS
from commgrid.layout.rank_layout import RankLayout


def forget(name: str) -> None:
    """Let the next import of a module be its first."""
    sys.modules.pop(name, None)


@pytest.mark.parametrize("name", earlier.table())
def test_a_path_of_the_table_leads_to_where_its_names_are(name: str) -> None:
    for module in [m for m in earlier.table() if name == m or name.startswith(m + ".")]:
        forget(module)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = importlib.import_module(name)
    now = earlier.table()[name]
    assert [w for w in told if f"{name} is in {' and '.join(now)} now" in str(w.message)] or not now
    for each in now:
        home = importlib.import_module(each)
        names = [n for n in vars(home) if not n.startswith("_")]
        assert names
        assert getattr(found, names[-1]) is getattr(home, names[-1]) or len(now) > 1


def test_no_path_is_that_of_a_public_name() -> None:
    """An import of the path would put a module in the name's place."""
    for name in earlier.table():
        package, _, last = name.rpartition(".")
        if package not in earlier.table():
            assert last not in getattr(importlib.import_module(package), "__all__", ()), name


def test_one_use_warns_once_and_names_the_new_path() -> None:
    forget("commgrid.planning.cost")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        from commgrid.planning.cost import KINDS as earlier_kinds  # type: ignore[import-not-found]
        from commgrid.planning.cost import collective_time
    assert earlier_kinds is KINDS
    assert collective_time.__module__ == "commgrid.cost_model.collective"
    (warning,) = told
    assert "is in commgrid.cost_model.collective and commgrid" in str(warning.message)
    assert warning.filename == __file__


def test_a_pickle_of_a_class_that_has_moved() -> None:
    pickled = pickle.dumps(RankLayout.from_sizes({"tp": 2, "dp": 2}), protocol=0)
    before = pickled.replace(b"commgrid.layout.rank_layout", b"commgrid.planning.layout")
    assert before != pickled
    forget("commgrid.planning.layout")
    with pytest.warns(DeprecationWarning, match="commgrid.planning.layout is in"):
        assert pickle.loads(before) == pickle.loads(pickled)


def test_a_name_that_never_was() -> None:
    forget("commgrid.planning.layout")
    with pytest.warns(DeprecationWarning, match="is in commgrid.layout.rank_layout now"):
        found = importlib.import_module("commgrid.planning.layout")
    with pytest.raises(AttributeError, match=r"planning.layout' has no attribute 'Nothing'"):
        _ = found.Nothing
    with pytest.raises(ModuleNotFoundError, match=r"commgrid\.nothing"):
        importlib.import_module("commgrid.nothing")


def test_a_class_of_another_name() -> None:
    from commgrid import sharding

    with pytest.warns(DeprecationWarning, match="Transfer is RedistributionStep now"):
        assert sharding.Transfer is sharding.RedistributionStep
    with pytest.raises(AttributeError, match="no attribute 'Transfers'"):
        _ = sharding.Transfers


def test_paths_that_earlier_pages_have_shown_are_there() -> None:
    """Of the pages of release 0.2.0 and of the change log."""
    for name in (
        "advisor.cluster", "advisor.collectives", "advisor.crossing", "advisor.model",
        "advisor.redistribution", "advisor.search", "observe.findings", "observe.stages",
        "pipeline.schedule", "planning.cluster", "planning.cost", "planning.crossing",
        "planning.model_zoo", "planning.names", "planning.rank_lists", "planning.ranks",
        "planning.redistribution", "runtime.failures",
    ):  # fmt: skip
        assert f"commgrid.{name}" in earlier.table()
