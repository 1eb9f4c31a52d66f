"""ShardedOptimizer: each rank updates a part of the parameters and keeps only its state (ZeRO-1).

    backward   gradients are reduce-scattered bucket by bucket: each rank has 1/n of each sum
    step       any element-wise torch.optim optimizer updates that part; parameters are all-gathered
    forward    with overlap=True the gathers end during it, awaited by the modules that need them

(ZeRO, arXiv 1910.02054, stage 1.) Half-precision parameters are updated in an fp32 copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from commgrid.data_parallel.bucket import Bucket, GradientPart
from commgrid.data_parallel.gathers import WeightGathers
from commgrid.data_parallel.reducer import GradientReducer
from commgrid.equality.comparison import on_all
from commgrid.errors import CommGridError, ShapeError, SpecError
from commgrid.parameters.placement import Placement

ELEMENT_WISE = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD",
)  # fmt: skip
"""Classes of torch.optim that update every element by itself, so that a part can be updated."""


class _Part:
    """The part of a parameter that this rank updates.

    Args:
        piece: its gradient.
        flat: of each bucket the flat buffer of its parameters; empty: they are whole.
    """

    def __init__(self, piece: GradientPart, flat: Mapping[Bucket, Tensor]) -> None:
        self.piece, self.parameter = piece, piece.slot.parameter
        self.weight = self.parameter.detach() if piece.is_whole else piece.of(flat[piece.bucket])
        exact = torch.promote_types(self.weight.dtype, torch.float32)
        self.master = self.weight.detach().to(exact).requires_grad_()
        """The tensor that the inner optimizer updates: the weight, or an fp32 copy of it."""
        self.version = self.parameter._version

    def follow(self) -> None:
        """Copy the weight to its fp32 copy, except where the copy rounds to it.

        Weights that were swapped for averages and back, or clamped to what they were, are the
        rounded ones: with them training would stand still.
        """
        weight, master, self.version = self.weight, self.master, self.parameter._version
        is_rounded = master.to(weight.dtype) == weight
        master.copy_(torch.where(is_rounded, master, weight.to(master.dtype)))


class ShardedOptimizer(torch.optim.Optimizer):
    """An element-wise optimizer over the part of each gradient that a reducer keeps.

    Over a reducer with `shard=True` this is ZeRO-1: state and update are 1/n per rank, the
    numbers are the unsharded optimizer's. With `shard=False` every rank updates everything;
    half-precision parameters still get an fp32 copy. Learning-rate schedulers accept it as any
    optimizer.

    The model's parameters become parts of flat buffers: make it after the model is on its
    device and has its weights (loading a state_dict into the model later is noticed).

    With `overlap=True`, forwards, `state_dict`, `load_state_dict`, checkpoints and the next `step`
    wait for the gathers by themselves. Any other code that reads parameters must call
    `optimizer.wait()` first: copy.deepcopy, pickle, AveragedModel, a norm of the weights,
    `F.linear(x, unit.weight)` outside of the unit's own forward, a parameter kept in a variable.

    On CUDA `fused=True` updates all parts in one kernel.

    Args:
        reducer: of the model's gradients.
        optimizer_class: an element-wise class of torch.optim, such as AdamW.
        groups: parameter groups as torch takes them, of parameters or of names and parameters;
            None: all parameters in one.
        overlap: gather parameters during the next forward instead of in `step`.
        units: with `overlap`, modules of the model, such as the blocks of a transformer, that each
            wait for their own parameters only when their forward begins; no other code may read
            these before. None: every forward waits for all parameters below it, so that gathers
            overlap with the code before the model's call. Once torch.compile has traced a forward,
            `step` itself waits.
        element_wise: declares that a class from outside of torch.optim updates every element
            independently of the others.
        **defaults: the optimizer's own arguments.

    Raises:
        SpecError: an optimizer that is not element-wise, or not known to be, a parameter that the
            reducer does not know, units that are not the model's, or another optimizer over this
            reducer.

    Example:
        >>> import commgrid, torch
        >>> from commgrid.data_parallel import GradientReducer
        >>> grid = commgrid.initialize()
        >>> model = torch.nn.Linear(2, 1)
        >>> reducer = GradientReducer(model, shard=True)
        >>> optimizer = ShardedOptimizer(reducer, torch.optim.AdamW, lr=1e-3)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> reducer.finish()
        >>> norm = reducer.clip_gradients(1.0)
        >>> optimizer.step()
        >>> commgrid.shutdown()
    """

    def __init__(
        self,
        reducer: GradientReducer,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        groups: Iterable[Mapping[str, Any] | Tensor | tuple[str, Tensor]] | None = None,
        overlap: bool = False,
        units: Iterable[nn.Module] | None = None,
        element_wise: bool = False,
        **defaults: Any,
    ) -> None:
        _check_class(optimizer_class, element_wise)
        self._reducer, self._is_made = reducer, False
        given = _as_groups(groups)
        slots = {id(slot.parameter): slot for slot in reducer.slots}
        for group in given:
            listed = group.get("params", [slot.parameter for slot in slots.values()])
            listed = [listed] if isinstance(listed, Tensor) else list(listed)
            group["params"] = [each[1] if isinstance(each, tuple) else each for each in listed]
            for parameter in group["params"]:
                if id(parameter) not in slots:
                    shape = getattr(parameter, "shape", None)
                    what = f"a parameter of shape {tuple(shape)}" if shape else repr(parameter)[:60]
                    raise SpecError(f"{what} in groups is not one that the reducer's model trains")
        if reducer.optimizer is not None:
            raise SpecError(
                "another ShardedOptimizer was made over this reducer, and would update the same "
                "parameters; give all options to one: groups=[{'params': …, 'lr': …}, …]"
            )
        flat = _flatten(reducer) if reducer.shard else {}
        self._places = [(slot, slot.parameter.data_ptr()) for slot in reducer.slots]
        self._parts = [_Part(piece, flat) for piece in reducer.pieces]
        masters = {id(part.parameter): part.master for part in self._parts}
        inner_groups = [
            {**group, "params": [masters[id(p)] for p in group["params"] if id(p) in masters]}
            for group in given
        ]
        self._inner = optimizer_class(inner_groups, **defaults)
        super().__init__(given, self._inner.defaults)
        self._is_made = True
        self._half = [part for part in self._parts if part.master.dtype != part.weight.dtype]
        self.gathers = WeightGathers(reducer.model, flat, overlap=overlap, units=list(units or []))
        reducer.attach(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the parts that this rank updates are fixed when the optimizer is made.

        Raises:
            SpecError: always, once the optimizer is made.
        """
        if self._is_made:
            raise SpecError(
                "a ShardedOptimizer's groups are given when it is made, groups=[…]: the buffers of "
                "its reducer hold the parameters of then; GradientReducer(frozen=True) takes those "
                "too that are unfrozen later. After adding some, close it and make both anew"
            )
        super().add_param_group(param_group)

    # -- the parts ----------------------------------------------------------------------

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer of the parts, which has their state."""
        self._take_changed()
        return self._inner

    def parts(self) -> list[tuple[GradientPart, Tensor, str | None]]:
        """The parts that this rank updates: for each the piece, the inner optimizer's tensor of
        it, and the name of the group over which the parameter is sharded (None: it is not)."""
        self._take_changed()
        return [
            (part.piece, part.master, self.cut_over(part.piece.slot.placement))
            for part in self._parts
        ]

    def cut_over(self, placement: Placement) -> str | None:
        """The name of the group over which a parameter is sharded; None: it is not."""
        return self._reducer.groups.cut_over(placement)

    @torch.no_grad()
    def reload(self) -> None:
        """Copies the model's weights to the fp32 copies, after they were set through `.data`."""
        for part in self._half:
            part.follow()

    @torch.no_grad()
    def _take_changed(self) -> None:
        """Copies weights that were changed in place, as by load_state_dict and init functions."""
        for part in self._half:
            if part.parameter._version != part.version:
                part.follow()

    def _note_versions(self) -> None:
        for part in self._half:
            part.version = part.parameter._version

    # -- a step -------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates this rank's part and starts gathering the others'.

        Args:
            closure: as for torch's optimizers; it calls backward and the reducer's `finish`.

        Returns:
            The closure's loss; None without a closure.

        Raises:
            CommGridError: a parameter was moved or replaced since the optimizer was made.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.wait()
        self._check_in_place()
        self._take_changed()
        self._set_options()
        self._set_gradients()
        self._inner.step()
        if self._half:
            torch._foreach_copy_([p.weight for p in self._half], [p.master for p in self._half])
        self._note_versions()
        self.gathers.start()
        return loss

    def _set_options(self) -> None:
        """Copies options that schedulers have set in this optimizer's groups to the inner one."""
        for outer, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({key: value for key, value in outer.items() if key != "params"})

    def _set_gradients(self) -> None:
        """Gives the inner optimizer the reducer's gradients, in the dtype of its weights."""
        others: list[tuple[Tensor, Tensor]] = []
        for part in self._parts:
            gradient = part.piece.held
            if gradient is not None and gradient.dtype != part.master.dtype:
                others.append((torch.empty_like(part.master), gradient))
                gradient = others[-1][0]
            part.master.grad = gradient
        if others:
            torch._foreach_copy_([made for made, _ in others], [given for _, given in others])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, including the reducer's accumulated ones of an abandoned step."""
        self._reducer.zero_grad()

    def _check_in_place(self) -> None:
        for slot, place in self._places:
            if slot.parameter.data_ptr() != place:
                raise CommGridError(
                    f"{slot.placement} was moved or replaced after its ShardedOptimizer was made; "
                    "make reducer and optimizer after the model is on its device"
                )

    def wait(self) -> None:
        """Returns when every parameter is gathered."""
        self.gathers.wait()

    # -- its state ----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, for the same rank of the same grid."""
        self._take_changed()
        self._set_options()
        return {
            "layout": self._layout(),
            "coordinate": self._reducer.groups.coordinate(),
            "inner": self._inner.state_dict(),
            "masters": [part.master.detach().clone() for part in self._parts],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores the state at which `state_dict` was called.

        All ranks call it.

        Raises:
            ShapeError: the state of this rank, or of another one, is from another model, grid, or
                rank.
        """
        self.wait()
        mine = self._misfit(state_dict)
        wrong, _ = on_all(mine, self._reducer.groups.everyone)
        if mine is not None:
            raise mine
        if wrong is not None:
            raise ShapeError(f"on another rank, {wrong}")
        self._inner.load_state_dict(state_dict["inner"])
        for outer, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            outer.update({key: value for key, value in inner.items() if key != "params"})
        with torch.no_grad():
            for part, master in zip(self._parts, state_dict["masters"], strict=True):
                part.master.copy_(master)
                part.weight.copy_(master)
        self._note_versions()
        self.gathers.start()
        self.wait()

    def _misfit(self, state_dict: Mapping[str, Any]) -> ShapeError | None:
        """The error of a state_dict that is not this rank's; names the part, or the place."""
        if "layout" not in state_dict:
            keys = ", ".join(map(repr, state_dict)) or "no keys"
            return ShapeError(
                f"this state_dict has {keys} and is not of a ShardedOptimizer; load what its "
                "state_dict() returned on the same rank, or save and load with commgrid.checkpoint"
            )
        theirs, mine = state_dict["layout"], self._layout()
        if theirs != mine:
            differing = next(
                (pair for pair in zip(theirs, mine, strict=False) if pair[0] != pair[1]),
                (len(theirs), len(mine)),
            )
            return ShapeError(
                f"this optimizer state was saved for other parts of the parameters: it has "
                f"{differing[0]} where this rank has {differing[1]} (name, start, stop); load it "
                "on the same rank of the same grid"
            )
        own = self._reducer.groups.coordinate()
        saved = state_dict.get("coordinate") or own  # none in those of an earlier release
        saved = {axis: saved.get(axis, index) for axis, index in own.items()}
        if saved != own:
            return ShapeError(
                f"this optimizer state was saved at {saved} of its grid and is loaded at {own}, "
                "where parameters are other slices or other parts; load each rank's own state, or "
                "save and load with commgrid.checkpoint, which fits any grid"
            )
        return None

    def _layout(self) -> list[tuple[str, int, int]]:
        return [(p.slot.placement.name, p.start, p.stop) for p in self._reducer.pieces]


def _as_groups(given: Iterable[Any] | None) -> list[dict[str, Any]]:
    """Parameter groups from what torch's optimizers take: groups, or parameters in one group."""
    if given is None:
        return [{}]
    listed = list(given)
    if all(isinstance(each, Mapping) for each in listed):
        return [dict(each) for each in listed]
    return [{"params": listed}]


def _flatten(reducer: GradientReducer) -> dict[Bucket, Tensor]:
    """Moves the parameters into flat buffers with the layout of their gradients."""
    weights = {}
    with torch.no_grad():
        for bucket in reducer.buckets:
            flat = torch.zeros_like(bucket.gradient, dtype=bucket.slots[0].parameter.dtype)
            for slot in bucket.slots:
                slot.parameter.data = slot.of(flat).copy_(slot.parameter)
            weights[bucket] = flat
    return weights


def _check_class(optimizer_class: type[torch.optim.Optimizer], element_wise: bool) -> None:
    """Refuses optimizers that are not known to update every element by itself."""
    name = getattr(optimizer_class, "__name__", repr(optimizer_class))
    known = [getattr(torch.optim, each) for each in ELEMENT_WISE]
    if optimizer_class in known or element_wise:
        return
    if getattr(torch.optim, name, None) is optimizer_class:
        raise SpecError(
            f"{name} does not update elements one by one, so its update cannot be sharded; use an "
            f"element-wise optimizer: {', '.join(ELEMENT_WISE)}"
        )
    raise SpecError(
        f"{name} is not known to update elements one by one, as is needed where each rank updates "
        f"a part of a parameter. If it does (no norms, no matrices), say element_wise=True; else "
        f"use one of {', '.join(ELEMENT_WISE)}"
    )
