"""The collectives of a step, with the memory they reduced and the module they ran in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from commgrid.call_records.operations import TRANSFERS
from commgrid.recording.places import caller, group_of
from commgrid.torch_compat import autograd_nodes
from commgrid.torch_compat.interposer import Arguments, Listener


@dataclass(frozen=True)
class _Seen:
    """One collective: what to say of it, and which memory it was handed."""

    said: list[str]
    module: str
    memory: tuple[tuple[int, int], ...]


class ReductionListener(Listener):
    """A listener that keeps a step's collectives.

    Args:
        inside: says which module's forward is under way; "": none.
    """

    def __init__(self, inside: Callable[[], str]) -> None:
        self._inside = inside
        self._seen: list[_Seen] = []
        self.events: list[list[str]] = []
        """Events of backward, in order: gradients by id, and collectives of modules."""

    def begins(self, group: dist.ProcessGroup, made: Arguments) -> object:
        if group.size() == 1 or made.operation in (*TRANSFERS, "barrier"):
            return None
        memory: tuple[tuple[int, int], ...] = ()
        if made.reduction:
            memory = tuple((t.data_ptr(), t.data_ptr() + t.nbytes) for t in made.tensors)
        said = [made.operation, group_of(group).name, caller()]
        self._seen.append(_Seen(said, self._inside(), memory))
        module = autograd_nodes.noted()
        if module is not None:
            where = f"{said[2]}, in the backward of {module or 'the model'}"
            self.events.append([made.operation, said[1], where])
        return None

    def arrived(self, key: str) -> None:
        """Backward has come to a parameter's gradient."""
        self.events.append(["", key, ""])

    def over(self, tensor: Tensor) -> list[list[str]]:
        """The reductions that were handed some of a tensor's memory, in their order."""
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return [
            seen.said for seen in self._seen
            if any(first < end and begin < last for first, last in seen.memory)
        ]  # fmt: skip

    def by_module(self) -> dict[str, list[list[str]]]:
        """Collectives of forward by the innermost module, each once."""
        found: dict[str, list[list[str]]] = {}
        for seen in self._seen:
            if seen.module and seen.said not in found.setdefault(seen.module, []):
                found[seen.module].append(seen.said)
        return found

    def forget(self) -> None:
        """A new step."""
        self._seen.clear()
        self.events.clear()
