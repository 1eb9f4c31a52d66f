"""Every error commgrid raises on purpose, all of them `CommGridError`."""

from __future__ import annotations


class CommGridError(Exception):
    """Base of all commgrid errors; catch it to catch every one of them."""


class SpecError(CommGridError, ValueError):
    """A grid was described wrongly; the message names the key, the value and a fix."""


class UnknownGroupError(CommGridError, LookupError):
    """No group of the grid has this name, or it was not created."""


class NotInGroupError(CommGridError, LookupError):
    """The group exists, but this rank is not a member of it."""


class NotInGridError(CommGridError, LookupError):
    """The rank is not one of the grid's ranks."""


class GridNotInitializedError(CommGridError, RuntimeError):
    """There is no grid of this name (yet, or any more)."""


class GridExistsError(CommGridError, RuntimeError):
    """A grid of this name is alive already."""


class GridDestroyedError(CommGridError, RuntimeError):
    """The grid was destroyed; its communicators are gone."""


class GridMismatchError(CommGridError, RuntimeError):
    """Ranks disagree: about the grid's spec, or about who is in a group."""


class GroupSuspendedError(CommGridError, RuntimeError):
    """The communicator was given up by `grid.suspend`, or this handle is of before that."""


class PeerTimeoutError(CommGridError, TimeoutError):
    """A rank did not arrive in time; the message names it."""


class PeerFailedError(CommGridError, RuntimeError):
    """Another rank failed, or is gone; the message names it and carries its error."""


class CheckpointError(CommGridError, RuntimeError):
    """A checkpoint could not be written, or does not hold what is to be loaded; names what."""


class TransferError(CommGridError, RuntimeError):
    """Weights could not go from one grid to another; names parameter and ranks."""


class ShapeError(CommGridError, ValueError):
    """A tensor does not fit the group or layer it was given to; names shape and group."""
