"""Files of JSON that benchmarks have written, read with errors that name the file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from commgrid.errors import SpecError

T = TypeVar("T")


def read_json(path: Path, expected: str, read: Callable[[Mapping[str, Any]], T]) -> T:
    """What `read` makes of a file's one object.

    Args:
        path: of the file.
        expected: what it looks like, for the error.
        read: raises KeyError, TypeError or ValueError where it is something else.

    Raises:
        SpecError: a file that is not there, or is not as expected.
    """
    try:
        return read(json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number))
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise SpecError(f"{path}: expected {expected}: {type(error).__name__}: {error}") from error


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON's")
