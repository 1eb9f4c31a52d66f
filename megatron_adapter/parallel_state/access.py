"""How the functions of `parallel_state` read and write the state of the grid that is asked."""

from __future__ import annotations

from typing import Any

from megatron_adapter.errors import MegatronStateError
from megatron_adapter.state import STORE


def peek(variable: str) -> Any:
    """A variable, None if it was not set."""
    return STORE.variables(variable).get(variable)


def read(variable: str, what: str, check_initialized: bool = True) -> Any:
    """A variable that initialization sets.

    Raises:
        MegatronStateError: it did not, and `check_initialized` asks for it.
    """
    found = peek(variable)
    if found is None and check_initialized:
        raise MegatronStateError(
            f"{what} is not initialized; call initialize_model_parallel with the option that "
            "creates it, or choose a grid with megatron_adapter.active or install, which create "
            "what Megatron has and the grid lacks (every rank of the grid calls them)"
        )
    return found


def write(variable: str, value: Any) -> None:
    """Sets a variable of the grid that is asked."""
    STORE.variables(variable)[variable] = value
