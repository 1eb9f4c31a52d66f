"""Ranks that may be killed: their result is the signal, and the others run on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from commgrid.testing import run_on_ranks

KILLED = signal.SIGKILL


def run_killable(
    function: Callable[..., Any], world_size: int, *args: Any, **how: Any
) -> list[Any]:
    """Call `function(*args)` on ranks that torchrun's variables describe, without WORLD.

    Args:
        function, world_size, args, how: of `commgrid.testing.run_on_ranks`.
    """
    chosen = {"backend": None, "launcher": "torchrun", "killable": True, **how}
    return run_on_ranks(function, world_size, *args, **chosen)


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
