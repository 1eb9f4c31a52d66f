"""One rank's failure is an error on every other that names it; see `commgrid.runtime.failures`."""

from commgrid.runtime.failures import FailureBoard, GoneError, named_failures

__all__ = ["FailureBoard", "GoneError", "named_failures"]
