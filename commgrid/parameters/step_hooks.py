"""Hooks that torch calls around optimizer steps, registered while they have a user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class StepHooks:
    """Hooks of all optimizers, registered with torch while they have a user.

    Args:
        register: calls torch's functions, and returns their handles.
    """

    def __init__(self, register: Callable[[], list[Any]]) -> None:
        self._register, self._users = register, 0
        self._handles: list[Any] = []

    def add_user(self) -> None:
        """Registers the hooks, if they are not."""
        self._users += 1
        if not self._handles:
            self._handles = self._register()

    def remove_user(self) -> None:
        """Removes the hooks with the last user."""
        self._users -= 1
        if not self._users:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
