"""The arguments of a transfer's side: a module, or tensors by name; and which are moved."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from commgrid.errors import ShapeError, SpecError
from commgrid.grid_pairs.pairing import OtherWorld
from commgrid.layout.axis_names import nearest
from commgrid.resharding.holders import Turns
from commgrid.resharding.item import Chunk, Item, local_part, refuse_partial, refuse_unreadable
from commgrid.resharding.model_state import ModelState
from commgrid.resharding.naming import Naming, Rename
from commgrid.resharding.optimizer_state import Optimizers
from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.registry import get_grid
from commgrid.torch_compat.world import is_store

Rows = Callable[[str], int | None]
Only = Iterable[str] | Callable[[str], bool]


@dataclass(frozen=True)
class Part:
    """A box of a full tensor, for a mapping of names to tensors.

    Args:
        tensor: this rank's, which is read, or written in place; or a DTensor, of which this rank's
            part is.
        shape: of the full tensor.
        offset: of the tensor's first element in the full one.

    Raises:
        ShapeError: it does not lie within the full tensor.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    def __post_init__(self) -> None:
        held, full, offset = tuple(self.tensor.shape), tuple(self.shape), tuple(self.offset)
        if not len(held) == len(full) == len(offset) or any(
            begin < 0 or begin + size > whole
            for begin, size, whole in zip(offset, held, full, strict=True)
        ):
            raise ShapeError(
                f"Part: a tensor of shape {held} at offset {offset} is not within one of shape "
                f"{full}; give shape and offset of the full tensor, one number for each dim"
            )


Model = nn.Module | Sequence[nn.Module] | Mapping[str, Tensor | Part | Sequence[Part]]
"""A module, a pipeline stage's chunks, or tensors by name: whole, DTensors, a part or several."""


class Names(Naming):
    """The names of the tensors that are moved, on both sides.

    Args:
        rename: the source's names to the target's; names that are not in it stay.
        only: patterns of the target's names, as `blocks.*`, or a function of one; None: all.

        padded: by the target's names, how many entries along dim 0 are no padding.

    Raises:
        SpecError: something else.
    """

    def __init__(
        self, rename: Rename | None, only: Only | None, padded: Mapping[str, int] | None = None
    ) -> None:
        if isinstance(only, str):
            only = [only]
        super().__init__("", rename, padded)
        self._only = only if only is None or callable(only) else list(only)
        if isinstance(self._only, list) and not all(isinstance(p, str) for p in self._only):
            raise SpecError(f"only={self._only!r}: expected patterns of names, or a function")

    def rows_of(self, side: str) -> Rows:
        """The function that says how many entries of a side's tensor are no padding."""
        return self.padded.get if side == "target" else self.rows_of_source

    @property
    def is_partial(self) -> bool:
        """Whether the sides may have tensors that are not moved."""
        return self._only is not None

    def check_used(self, names: Collection[str]) -> None:
        """Refuses a pattern by which nothing is moved, such as one typed wrong.

        Args:
            names: what is moved, by the target's names or the common ones.

        Raises:
            SpecError: names the pattern.
        """
        names = [name for part in names for name in self.on_target(part)]
        self.check_padded(names)
        for pattern in self._only if isinstance(self._only, list) else ():
            if not any(fnmatchcase(name, pattern) for name in names):
                raise SpecError(
                    f"only={self._only}: {pattern!r} is the name of no tensor of the target"
                    f"{nearest(pattern, names)}; leave it out, or correct it"
                )

    def parts_of(self, side: str, item: Item) -> list[Item]:
        """The moved parts of a side's tensor, by the target's names or the common ones."""
        name, is_source = item.path[-1], side == "source"
        if not is_source and not self.has(name):
            return []
        cut = self.source if is_source else self.target
        parts = cut(name, item.shape).items(item)
        held = [part for part in parts if part.chunks or not item.chunks]  # or it has none of any
        return [part for part in held if not is_source or self.takes(part.path[-1])]

    def takes(self, part: str) -> bool:
        """Whether a tensor of the target may have this, and is moved."""
        if self._only is None or self.cuts_source_alone:
            return True
        return any(map(self.has, self.on_target(part)))

    def has(self, name: str) -> bool:
        """Whether a tensor of this name on the target is moved."""
        if self._only is None:
            return True
        if callable(self._only):
            return self._only(name)
        return any(fnmatchcase(name, pattern) for pattern in self._only)


def tensors_of(model: Model) -> list[Any]:
    """Every tensor of a model: its name, what it is, where its memory is, its shape and dtype.

    This takes a few microseconds a tensor, and reading placements hundreds.
    """
    if isinstance(model, Mapping):
        return [
            (name, *_trace_of(each.tensor), tuple(each.shape), tuple(each.offset))
            if isinstance(each, Part) else (name, *_trace_of(each))
            for name, given in model.items()
            for each in several(given)
        ]  # fmt: skip
    roots = [model] if isinstance(model, nn.Module) else model
    kinds = nn.Module.named_parameters, nn.Module.named_buffers  # which attributes may hide
    return [
        (name, *_trace_of(tensor))
        for root in roots for kind in kinds for name, tensor in kind(root, remove_duplicate=False)
    ]  # fmt: skip


def _trace_of(tensor: Any) -> tuple[Any, ...]:
    if not isinstance(tensor, Tensor):  # which is refused
        return (id(tensor),)
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return id(tensor), local.data_ptr(), local.shape, local.stride(), local.dtype


def mapped_items(
    tensors: Mapping[str, Tensor | Part | Sequence[Part]], rows: Rows = lambda _: None
) -> list[Item]:
    """The tensors of a mapping.

    Args:
        rows: as `ModelState` takes it.

    Raises:
        SpecError: something in it is no tensor, or has no numbers.
    """
    items = (_mapped(name, each) for name, given in tensors.items() for each in several(given))
    return [
        item if (true := rows(item.path[-1])) is None else item.without_padding(true)
        for item in items
    ]


def several(given: Any) -> Sequence[Any]:
    """The parts of a name; what is no list of parts is one by itself."""
    return given if isinstance(given, list | tuple) else (given,)


def _mapped(name: str, given: Tensor | Part) -> Item:
    tensor = given.tensor if isinstance(given, Part) else given
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        raise SpecError(
            f"{{{name!r}: {type(tensor).__name__!s}}}: expected names, and tensors with "
            "numbers, DTensors, or Part(tensor, shape, offset)"
        )
    refuse_unreadable(name, tensor)
    data, inner = local_part(tensor), (0,) * tensor.dim()
    if isinstance(tensor, DTensor):
        refuse_partial(name, tensor)
        (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
        inner = tuple(chunk.offsets)
    shape, offset = tuple(tensor.shape), inner
    if isinstance(given, Part):
        shape = tuple(given.shape)
        offset = tuple(begin + more for begin, more in zip(given.offset, inner, strict=True))
    chunks = [Chunk(offset, data)] if data.numel() else []
    return Item(("model", name), shape, chunks, tensor.dtype)


Looked = tuple[list[Item], ModelState | None]
"""The tensors of a model, and what else is known of it."""


def items_of(model: Model, grid: HyperCommGrid, rows: Rows) -> Looked:
    """The tensors of a model, and what else is known of it; of a mapping nothing is."""
    if isinstance(model, Mapping):
        return mapped_items(model, rows), None
    if not isinstance(model, nn.Module | Sequence):
        raise SpecError(
            f"a {type(model).__name__} as a model: expected a module, a list of a stage's chunks, "
            "or a mapping of names to tensors, such as dict(…)"
        )
    state = ModelState(model, grid, foreign=True, rows=rows)
    return [item for item in state.items(Turns(grid)) if isinstance(item, Item)], state


def stateful(state: ModelState | None) -> ModelState:
    """The model's state that an optimizer's belongs to."""
    if state is None:
        raise SpecError(
            "optimizer= goes with a module or a stage's chunks, not with a mapping; "
            "give the model itself"
        )
    if state.has_foreign:
        raise SpecError(
            "optimizer= does not go with parameters that Megatron-core's or Transformers' layers "
            "have cut, of whose optimizers nothing is known here; move the weights alone"
        )
    return state


OfBoth = tuple[Optimizers | None, Optimizers | None]
"""The source's and the target's optimizers."""


def optimizers_of(given: OfBoth | None, **others: object) -> OfBoth:
    """The source's and the target's optimizer.

    Args:
        others: arguments that do not go with optimizers.

    Raises:
        SpecError: something else was given, or one of these.
    """
    if given is None:
        return None, None
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise SpecError(
            f"optimizer={type(given).__name__}: expected the source's and the target's, "
            "with None for a side that this rank is not on"
        )
    if any(other is not None for other in others.values()):
        named = " and ".join(f"{name}=" for name, other in others.items() if other is not None)
        raise SpecError(f"optimizer= goes with a whole model, unconverted; leave {named} out")
    return given


def grids_of(
    source: Model | None,
    target: Model | None,
    source_grid: HyperCommGrid | None,
    target_grid: HyperCommGrid | None,
) -> dict[str, HyperCommGrid]:
    """This rank's grid of each side that it is on."""
    found: dict[str, HyperCommGrid] = {}
    for side, model, grid in (("source", source, source_grid), ("target", target, target_grid)):
        if grid is not None and not isinstance(grid, HyperCommGrid):
            raise SpecError(f"{side}_grid={grid!r}: expected a grid, or None on other ranks")
        if grid is not None or model is not None:
            found[side] = grid or get_grid()
    if not found:
        raise SpecError(
            "Transfer(None, None): call it on the ranks of the two grids alone, each with its "
            "part of the model; a rank without a part gives its grid"
        )
    return found


def other_world(
    store: Any, peer: str | None, grids: Mapping[str, HyperCommGrid]
) -> OtherWorld | None:
    """The program of the other side; None: this one.

    Args:
        store, peer: as `Transfer` takes them.
        grids: this rank's, by side.

    Raises:
        SpecError: one without the other, or both sides in this program.
    """
    if store is None and peer is None:
        return None
    if not is_store(store):
        raise SpecError(
            f"store={store!r}: expected a torch.distributed.TCPStore or FileStore that the ranks "
            "of both programs reach; where both grids are of one program leave peer= out, too"
        )
    if not isinstance(peer, str | None) or peer == "":
        raise SpecError(f"peer={peer!r}: expected what to call the other program, such as 'engine'")
    if len(grids) > 1:
        raise SpecError(
            "store= is given, and both a source and a target: each of two programs gives its own "
            "side, and None for the other; leave store= out where one program has both"
        )
    return OtherWorld(store, peer or "other program")
