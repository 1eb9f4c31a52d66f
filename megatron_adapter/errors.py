"""Errors that code written for Megatron-core can catch as it does Megatron's own.

Megatron's getters assert that they are initialized, and its initialization raises RuntimeError
for sizes that do not fit; programs rely on both.
"""

from __future__ import annotations

from commgrid.errors import CommGridError, SpecError


class MegatronStateError(CommGridError, AssertionError):
    """Megatron's parallel state is not what the call needs: not initialized, or already."""


class AmbiguousGridError(MegatronStateError):
    """Several grids are alive and none was chosen with `megatron_adapter.active`."""


class MegatronSizeError(SpecError, RuntimeError):
    """Sizes that Megatron-core refuses with a RuntimeError."""


class MegatronVersionError(CommGridError, ImportError):
    """megatron-core is not installed, or has state or an argument that the adapter lacks."""


class UnknownViewError(SpecError, KeyError):
    """No view of a HyperCommGrid has this name; Megatron's raises a KeyError."""

    __str__ = Exception.__str__  # a KeyError would print the message quoted
