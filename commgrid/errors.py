"""Every error commgrid raises on purpose, all of them `CommGridError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class CommGridError(Exception):
    """Base of all commgrid errors; catch it to catch every one of them.

    Fix: The message says it.
    """


class SpecError(CommGridError, ValueError):
    """A grid, a schedule or an argument was described wrongly; the message names key and value.

    Fix: Correct the key that the message names.
    """


class UnknownGroupError(CommGridError, LookupError):
    """No group of the grid has this name, or it was not created.

    Fix: Take a name that is listed, or add it to `create=`.
    """


class NotInGroupError(CommGridError, LookupError):
    """The group exists, but this rank is not a member of it.

    Fix: Ask `grid.is_member(name)` first.
    """


class NotInGridError(CommGridError, LookupError):
    """The rank is not one of the grid's ranks.

    Fix: Give a rank of the grid.
    """


class GridNotInitializedError(CommGridError, RuntimeError):
    """There is no grid of this name (yet, or any more).

    Fix: Call `commgrid.initialize()` first.
    """


class GridExistsError(CommGridError, RuntimeError):
    """A grid of this name is alive already.

    Fix: `commgrid.destroy(name)`, or another `name=`.
    """


class GridDestroyedError(CommGridError, RuntimeError):
    """The grid was destroyed; its communicators are gone.

    Fix: Make another one.
    """


class GridMismatchError(CommGridError, RuntimeError):
    """Ranks disagree: about the grid's spec, or about who is in a group.

    Fix: Give all of them the same; the message names who differs.
    """


class GroupSuspendedError(CommGridError, RuntimeError):
    """The communicator was given up by `grid.suspend`, or this handle is of before that.

    Fix: `grid.resume()`, on all ranks.
    """


class PeerTimeoutError(CommGridError, TimeoutError):
    """A rank did not arrive in time; the message names it.

    Fix: Look at the rank that the message names.
    """


class PeerFailedError(CommGridError, RuntimeError):
    """Another rank failed, or is gone; the message names it and carries its error.

    Fix: Its error is in the message; mend that.
    """


class CheckpointError(CommGridError, RuntimeError):
    """A checkpoint could not be written, or does not hold what is to be loaded; names what.

    Fix: The message says what differs.
    """


class TransferError(CommGridError, RuntimeError):
    """Weights could not go from one grid to another; names parameter and ranks.

    Fix: The message says what differs.
    """


class ShapeError(CommGridError, ValueError):
    """A tensor does not fit the group or layer it was given to; names shape and group.

    Fix: Pad it, or give the shape that is named.
    """


@contextmanager
def writing(what: str, kind: type[CommGridError] = SpecError) -> Iterator[None]:
    """Within it, an error of the file system is one of commgrid's, of a file or an option."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: cannot be written: {error.strerror or error}") from error
