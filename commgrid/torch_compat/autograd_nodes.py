"""Nodes of autograd's graph, notes on them that backward can read, factors of a loss."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from commgrid.torch_compat.mesh import Replaced

_NOTE, _SCALED = "commgrid module", "commgrid scaled"


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


def will_run(node: Any) -> bool | None:
    """Whether the backward under way runs a node; None: it is a leaf of `torch.autograd.grad`."""
    try:
        runs: bool = torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return None
    return runs


def has_hooks(leaf: Any) -> bool:
    """Whether a program sees a leaf's gradient, or changes it, as backward makes it."""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


def note_scaled(loss: Tensor) -> None:
    """Mark a loss as the product of the program's loss and a scale."""
    node: Any = loss.grad_fn
    if node is not None:
        node.metadata[_SCALED] = True


class BackwardPass:
    """A call of `torch.autograd.backward`, and nested calls.

    Args:
        root: the first argument.
        gradient: of the root; None: 1.

    Attributes:
        scale: product of the root's factors down to the one of `note_scaled`; None: there is none,
            or the root is not one number.
        divisors: numbers of the program that divide it before that one; not those of a mean.
        readers: that have counted this pass.
    """

    def __init__(self, root: Any, gradient: Any) -> None:
        self.readers: set[int] = set()
        self.scale: Tensor | None = None
        self.divisors: frozenset[float] = frozenset()
        factors: list[Tensor] = []
        root, gradient = _single(root), _single(gradient)
        if root is None:
            return
        if gradient is not None:
            factors.append(gradient.detach())
            self.divisors |= _inverse(gradient)
        node: Any = root.grad_fn
        while node is not None and node.name() in ("MulBackward0", "DivBackward0"):
            inner = [before for before, _ in node.next_functions if before is not None]
            other = node._saved_other if len(inner) == 1 else None
            if other is None or other.dim():
                break
            # Numbers of the program come as tensors of these dtypes, losses seldom do.
            is_mean = inner[0].name().startswith("SumBackward")
            given = other.dtype in (torch.int64, torch.float64) and not is_mean
            exact = other.detach().to(torch.float64)
            of_product = exact.reciprocal() if node.name() == "DivBackward0" else exact
            factors.append(of_product)
            if _SCALED in node.metadata:
                one = torch.ones((), dtype=torch.float64)  # numbers alone are multiplied in fp32
                self.scale, self.divisors = math.prod(factors, start=one), frozenset()
            elif given:
                self.divisors |= _inverse(of_product)
            node = inner[0]


def watch_backward() -> Replaced:
    """Read the graph of each backward before torch frees it.

    Returns:
        A handle, whose `remove` ends it.
    """
    start = torch.autograd.backward

    @wraps(start)
    def watched(tensors: Any, grad_tensors: Any = None, *args: Any, **named: Any) -> None:
        _RUNNING.append(BackwardPass(tensors, grad_tensors))
        try:
            start(tensors, grad_tensors, *args, **named)
        finally:
            _RUNNING.pop()

    made = Replaced(torch.autograd, "backward", start, watched)
    torch.autograd.backward = watched
    return made


_RUNNING: list[BackwardPass] = []


def running_pass() -> BackwardPass | None:
    """The outermost pass that runs; None: it was not started by `torch.autograd.backward`."""
    return _RUNNING[0] if _RUNNING else None


def _single(given: Any) -> Tensor | None:
    """The tensor of shape () that was given, alone or in a sequence."""
    if isinstance(given, list | tuple) and len(given) == 1:
        given = given[0]
    return given if isinstance(given, Tensor) and not given.dim() else None


def _inverse(number: Tensor) -> set[float]:
    """1 / number; nothing where reading it would wait for a device, or it is 0."""
    return {1 / float(number)} if number.device.type == "cpu" and bool(number) else set()
