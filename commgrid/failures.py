"""One rank's failure is an error on every other that names it; see `commgrid.runtime.failures`."""

from commgrid.runtime.failures import FailureBoard, GoneError, named_failures
from commgrid.runtime.stopping import told_when_stopped

__all__ = [
    "FailureBoard",
    "GoneError",
    "named_failures",
    "told_when_stopped",
]
