"""Backward in two halves: first the gradients of the inputs, later those of the weights.

The first half runs autograd for the inputs alone. At a fork, where a branch leads only to weights,
such as the W of y = W x, it records the gradient that arrives there:

    outputs ── GeluBackward ── AddmmBackward ── … ── inputs        first half
                                  └ noted: ∂y          └─► sent to the stage before
                                  TBackward ── W                   second half, starts from ∂y

The second half runs these branches from the noted gradients. The graph's saved tensors stay until
then. Modules need no changes; but a fork is run in both halves, so that

- a custom autograd.Function at a fork should check `commgrid.tensor_parallel.wanted`,
  or it does all its work twice, or adds twice to a buffer such as `main_grad`;
- a module hook or tensor hook on its output is called in both, with the same effect as once;
- checkpointed activations (use_reentrant=False) are recomputed in each half.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils import checkpoint

from commgrid.errors import CommGridError

Gradients = tuple[Tensor | None, ...]

# Recomputes checkpointed activations once, not for every fork; missing in some versions of torch.
_recomputed_once = getattr(checkpoint, "GraphExecGroup", nullcontext)
_NODES_KEEP_GRAPHS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


@dataclass
class _Fork:
    """A node whose gradient flows to weights, and perhaps to the inputs as well."""

    node: Any
    weights: list[Tensor] = field(default_factory=list)
    arrived: Gradients = ()
    is_noted: bool = False

    def note(self, arriving: Gradients) -> None:
        """Records the gradients that the node receives in the first half, after its hooks."""
        self.arrived, self.is_noted = arriving, True

    def recall(self, _: Gradients) -> Gradients:
        """Return the noted gradients in the second half, so that hooks are not applied twice."""
        return self.arrived

    def run(self) -> None:
        """Computes the gradients of its weights."""
        roots = [
            (GradientEdge(self.node, i), gradient)
            for i, gradient in enumerate(self.arrived)
            if gradient is not None
        ]
        if not roots:
            return
        edges, gradients = zip(*roots, strict=True)
        handle = self.node.register_prehook(self.recall) if self.is_noted else None
        try:
            torch.autograd.backward(edges, gradients, inputs=self.weights)
        finally:
            if handle is not None:
                handle.remove()


def _run(forks: list[_Fork], kept: list[GradientEdge]) -> None:
    """Adds the weights' gradients where autograd would have added them, once.

    Args:
        forks: the nodes where the second half begins; is emptied.
        kept: keeps the graph until then; is emptied.
    """
    with _recomputed_once():
        while forks:
            forks.pop(0).run()
    kept.clear()


def backward_input(
    outputs: Sequence[GradientEdge], gradients: Sequence[Tensor], inputs: Sequence[Tensor]
) -> Callable[[], None]:
    """Adds the inputs' gradients to their `.grad`; returns a callable that does so for the weights.

    A weight that is used in several places of the graph gets its gradient at once. Without inputs,
    as on the first stage, no other stage waits for the first half, and it computes all gradients.

    Args:
        outputs: edges of the outputs that need a gradient.
        gradients: one for each output, in its shape.
        inputs: leaves that require a gradient.

    Raises:
        CommGridError: a compiled module frees buffers that the second half needs.
    """
    leading, forks = _find_forks([edge.node for edge in outputs], inputs)
    if not any(edge.node in leading for edge in outputs):
        torch.autograd.backward(outputs, gradients)
        return partial(_run, [], [])
    counts = Counter(weight for fork in forks for weight in fork.weights)
    shared = [weight for weight, count in counts.items() if count > 1]
    later = []
    for fork in forks:
        fork.weights = [weight for weight in fork.weights if counts[weight] == 1]
        if fork.weights:
            later.append(fork)
    # A fork that leads to no input is not run in the first half: it starts from `gradients`.
    given = {fork.node: fork for fork in later if fork.node not in leading}
    for edge, gradient in zip(outputs, gradients, strict=True):
        if edge.node in given:
            fork = given[edge.node]
            known = [*fork.arrived, *[None] * (edge.output_nr + 1 - len(fork.arrived))]
            before = known[edge.output_nr]
            known[edge.output_nr] = gradient if before is None else before + gradient
            fork.arrived = tuple(known)
    handles = [fork.node.register_prehook(fork.note) for fork in later if fork.node in leading]
    try:
        torch.autograd.backward(outputs, gradients, inputs=[*inputs, *shared], retain_graph=True)
    except RuntimeError as error:
        if "donated buffers" in str(error):
            raise CommGridError(
                "a backward in two halves needs what a compiled module frees in the first: set "
                "torch._functorch.config.donated_buffer = False before it is compiled, or take "
                "another schedule, such as 1f1b"
            ) from error
        raise
    finally:
        for handle in handles:
            handle.remove()
    # Before torch 2.13 a Python node, as of an autograd.Function, is freed with its graph, which
    # only the edges of its outputs keep alive.
    return partial(_run, later, [] if _NODES_KEEP_GRAPHS else [*outputs])


def _find_forks(
    roots: Iterable[Any], inputs: Sequence[Tensor]
) -> tuple[dict[Any, None], list[_Fork]]:
    """The nodes that lead to an input, and the forks, where branches to weights begin.

    In an order that depends on the graph alone: layers communicate when their node is run.
    """
    wanted = {id(tensor) for tensor in inputs}
    leading: dict[Any, None] = {}
    weights: dict[Any, tuple[Tensor, ...]] = {}  # of a node that does not lead to an input
    roots = list(dict.fromkeys(roots))
    for node in _children_first(roots):
        variable = getattr(node, "variable", None)
        children = [child for child, _ in node.next_functions if child is not None]
        if (variable is not None and id(variable) in wanted) or any(c in leading for c in children):
            leading[node] = None
        elif variable is not None:
            weights[node] = (variable,)
        else:
            weights[node] = tuple(dict.fromkeys(w for c in children for w in weights[c]))
    forks = []
    for node in [*leading, *(root for root in roots if root not in leading)]:
        if node in leading:
            branches = [child for child, _ in node.next_functions if child in weights]
            own = tuple(dict.fromkeys(w for child in branches for w in weights[child]))
        else:
            own = weights[node]
        if own:
            forks.append(_Fork(node, list(own)))
    return leading, forks


def _children_first(roots: Iterable[Any]) -> Iterable[Any]:
    """Every node of the graph, after its `next_functions`."""
    seen: set[Any] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child, _ in node.next_functions if child is not None)
