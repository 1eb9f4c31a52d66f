"""An error that all ranks have alike, such as sizes that do not fit, is said by one of them.

Whoever is not the first of those that one command has started waits for what becomes of the first.
Where that one has the same error it ends, and its traceback is the only one. Where it goes on, the
error is this rank's own, and is printed as ever.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType

from commgrid.errors import SpecError
from commgrid.runtime.launch import Launch

_AGENT_SECONDS = 10.0
"""In which torchrun's agent ends the others once one rank has failed."""
_STORE_SECONDS = 3.0
"""In which rank 0 would serve the store, had it not the same error."""


def is_first_of_command(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process speaks for all that one command has started.

    That is rank 0 under srun, which starts the ranks of all nodes, and on each node the first one
    under torchrun, which is started there.

    Args:
        environ: None: this process's environment.

    Example:
        >>> from commgrid.failures import is_first_of_command
        >>> is_first_of_command({"RANK": "8", "LOCAL_RANK": "0"})
        True
        >>> is_first_of_command({"SLURM_PROCID": "8", "SLURM_LOCALID": "0"})
        False
    """
    environ = os.environ if environ is None else environ
    return environ.get("LOCAL_RANK", environ.get("SLURM_PROCID", "0")) == "0"


def is_left_to_first() -> bool:
    """Whether this process is to keep silent about an error that all ranks have alike.

    The first of a command says it. Under torchrun, which ends all ranks once one has ended, the
    others wait meanwhile: one that went at once would take the first with it before that has said
    anything. Who is still there after ten seconds is alone with the error, and says it.

    Example:
        >>> from commgrid.failures import is_left_to_first
        >>> is_left_to_first()    # in a bare process
        False
    """
    if is_first_of_command():
        return False
    if _under_torchrun():
        time.sleep(_AGENT_SECONDS)  # the agent ends this process if the first has it too
        return False
    return True


def _under_torchrun() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@contextmanager
def said_once() -> Iterator[None]:
    """Within it, what is wrong with a spec is printed by one rank, if nobody catches it."""
    try:
        yield
    except SpecError as error:
        if not is_first_of_command() and not f"{error}".startswith("environment"):
            _say_elsewhere(error)
        raise


def _say_elsewhere(error: SpecError) -> None:
    """Leaves an error that ends this process to the first one, where that has it too."""
    mine, before = weakref.ref(error), sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if value is not mine() or not _first_has_it_too():
            before(kind, value, trace)

    sys.excepthook = hook


def _first_has_it_too() -> bool:
    if _under_torchrun():
        return is_left_to_first()
    launch = Launch.from_environment(os.environ)
    if launch.address is None:
        return False
    until = time.monotonic() + _STORE_SECONDS
    while time.monotonic() < until:
        try:
            socket.create_connection((launch.address, launch.port), _STORE_SECONDS).close()
            return False
        except OSError:
            time.sleep(0.1)
    return True
