"""Durations: their checks, the environment, and what a call of initialize sets."""

from dataclasses import fields

import pytest

import commgrid
from commgrid import SpecError, Timeouts
from commgrid.rendezvous.timeouts import timeouts, use_timeouts


@pytest.mark.parametrize("field", [field.name for field in fields(Timeouts)])
def test_every_duration_is_above_zero(field: str) -> None:
    for value in (0, -1.0, float("inf"), float("nan"), "5", None, True):
        with pytest.raises(SpecError, match=f"timeouts.{field}="):
            Timeouts(**{field: value})


def test_the_environment_changes_some() -> None:
    read = Timeouts.from_environment
    assert read({}) == Timeouts()
    assert read({"COMMGRID_TIMEOUTS": "settle=3, silent=120"}) == Timeouts(settle=3.0, silent=120.0)
    with pytest.raises(SpecError, match=r"'setle' is no duration.*did you mean 'settle'"):
        read({"COMMGRID_TIMEOUTS": "setle=3"})
    with pytest.raises(SpecError, match=r"settle='soon' is no number of seconds"):
        read({"COMMGRID_TIMEOUTS": "settle=soon"})
    with pytest.raises(SpecError, match=r"timeouts\.settle=-1"):
        read({"COMMGRID_TIMEOUTS": "settle=-1"})


def test_initialize_sets_them_until_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMGRID_TIMEOUTS", "beat=2")
    use_timeouts(None)
    assert timeouts().beat == 2.0
    try:
        commgrid.initialize(timeouts=Timeouts(settle=3.0), name="one")
        commgrid.initialize(name="two")  # leaves them
        assert timeouts() == Timeouts(settle=3.0)
        with pytest.raises(SpecError, match=r"timeouts=5: expected a commgrid\.Timeouts"):
            commgrid.initialize(timeouts=5, name="three")  # type: ignore[arg-type]
    finally:
        commgrid.shutdown()
    assert timeouts().beat == 2.0
    monkeypatch.delenv("COMMGRID_TIMEOUTS")
    use_timeouts(None)
