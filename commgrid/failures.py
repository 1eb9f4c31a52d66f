"""Failures with names: one rank's failure is an error on every other, which names that rank."""

from commgrid.runtime.named_failures import FailureBoard, GoneError, named_failures
from commgrid.runtime.signals import told_when_stopped

__all__ = ["FailureBoard", "GoneError", "named_failures", "told_when_stopped"]
