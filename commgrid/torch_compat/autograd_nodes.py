"""Nodes of autograd's graph, and notes on them that backward can read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_NOTE = "commgrid module"


def note_new(tensors: Iterable[Any], text: str) -> None:
    """Walk back from the nodes of some tensors, and label each; stop at labelled ones.

    Args:
        tensors: anything else among them is skipped.
        text: such as the module that has made them.
    """
    nodes: list[Any] = [each.grad_fn for each in tensors if isinstance(each, Tensor)]
    while nodes:
        node = nodes.pop()
        if node is not None and _NOTE not in node.metadata:
            node.metadata[_NOTE] = text
            nodes += [before for before, _ in node.next_functions]


def noted() -> str | None:
    """The text on the node whose backward this thread runs; None: there is none."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else node.metadata.get(_NOTE)
