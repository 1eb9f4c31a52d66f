"""Lines of a stack that are the program's own: not torch's, commgrid's or Python's."""

from __future__ import annotations

import os
from pathlib import Path

import torch

TORCH, OWN = (
    f"{each}{os.sep}" for each in (Path(torch.__file__).parent, Path(__file__).parents[1])
)
"""The folders of torch and of commgrid."""

_PYTHON = f"{Path(os.__file__).parent}{os.sep}"
_GENERATED = ("<frozen", "<eval_with_key>")  # by Python, and by torch.fx
_WRAPPER = f"{os.sep}typing_extensions.py"  # around functions that torch has deprecated


def is_ours(file: str) -> bool:
    """Whether a file is torch's or commgrid's.

    >>> is_ours(torch.__file__), is_ours(os.__file__)
    (True, False)
    """
    return file.startswith((TORCH, OWN))


def is_programs(file: str) -> bool:
    """Whether a file is the program's, or of a package that it uses.

    >>> [is_programs(file) for file in (torch.__file__, os.__file__, "<frozen runpy>", "train.py")]
    [False, False, False, True]
    """
    if is_ours(file) or file.startswith(_GENERATED) or file.endswith(_WRAPPER):
        return False
    return not file.startswith(_PYTHON) or "-packages" in file
