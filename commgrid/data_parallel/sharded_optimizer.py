"""ShardedOptimizer: each rank updates a part of the parameters, and keeps its state only (ZeRO-1).

    backward   gradients are reduce-scattered bucket by bucket: each rank has 1/n of each sum
    step       any element-wise torch.optim optimizer updates that part
    forward    parameters are all-gathered bucket by bucket, awaited by the module that needs them

(ZeRO, arXiv 1910.02054, stage 1.) Half-precision parameters are updated in an fp32 copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from commgrid.collectives.asynchronous import Pending, start_all_gather_
from commgrid.data_parallel.buckets import Bucket, Piece
from commgrid.data_parallel.reducer import GradientReducer
from commgrid.errors import CommGridError, ShapeError, SpecError

# Their update of an element depends on others, so that a part cannot be updated alone.
NOT_ELEMENT_WISE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")


class ShardedOptimizer(torch.optim.Optimizer):
    """An element-wise optimizer over what a reducer keeps of each gradient.

    Over a reducer with `shard=True` this is ZeRO-1: state and update are 1/n per rank, the
    numbers are the unsharded optimizer's. Over one with `shard=False` every rank updates
    everything; half-precision parameters still get their fp32 copy. Learning-rate schedulers
    take it as any optimizer.

    The model's parameters become parts of flat buffers: make it after the model is on its
    device and has its weights (loading a state_dict into the model later is noticed).

    Args:
        reducer: of the model's gradients.
        optimizer_class: an element-wise class of torch.optim, such as AdamW.
        groups: parameter groups as torch takes them; None: all parameters in one.
        overlap: gather parameters beside the next forward; each module waits for its own before
            it runs, and modules that are never called for all that have not been. Code that
            reads parameters between `step` and forward calls `wait` first. Once torch.compile has
            traced a forward, `step` itself waits.
        **defaults: the optimizer's own arguments.

    Raises:
        SpecError: an optimizer that is not element-wise, or a parameter that the reducer does
            not know.

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
        groups: Iterable[Mapping[str, Any]] | None = None,
        overlap: bool = True,
        **defaults: Any,
    ) -> None:
        if optimizer_class.__name__ in NOT_ELEMENT_WISE:
            raise SpecError(
                f"{optimizer_class.__name__} does not update elements one by one, so its update "
                "cannot be sharded; use an element-wise optimizer such as AdamW"
            )
        self._reducer, self._overlap = reducer, overlap
        reducer.keeps_gradients = True
        given = [dict(group) for group in groups] if groups is not None else [{}]
        slots = {id(slot.parameter): slot for slot in reducer.slots}
        for group in given:
            listed = group.get("params", [slot.parameter for slot in slots.values()])
            group["params"] = [listed] if isinstance(listed, Tensor) else list(listed)
            for parameter in group["params"]:
                if id(parameter) not in slots:
                    shape = getattr(parameter, "shape", None)
                    what = f"a parameter of shape {tuple(shape)}" if shape else repr(parameter)[:60]
                    raise SpecError(f"{what} in groups is not one that the reducer's model trains")
        self._weights = _flatten(reducer) if reducer.shard else {}
        self._places = [(slot, slot.parameter.data_ptr()) for slot in reducer.slots]
        self._masters = {id(piece): self._make_master(piece) for piece in reducer.pieces}
        pieces: dict[int, Tensor] = {
            id(piece.slot.parameter): self._masters[id(piece)] for piece in reducer.pieces
        }
        inner_groups = [
            {**group, "params": [pieces[id(p)] for p in group["params"] if id(p) in pieces]}
            for group in given
        ]
        self._inner = optimizer_class(inner_groups, **defaults)
        super().__init__(given, self._inner.defaults)
        self._gathers: dict[int, Pending] = {}
        self._called: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._owners = _owners(reducer)
        reducer.weights_loaded = _Hook(self.reload)
        hooks = self._watch(reducer.model)
        self._unwatch = weakref.finalize(self, _remove, hooks)

    # -- the parts ----------------------------------------------------------------------

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer of the parts, which has their state."""
        return self._inner

    def parts(self) -> list[tuple[Piece, Tensor, str | None]]:
        """What this rank updates: which part of which parameter, the tensor that the inner
        optimizer has of it, and over which group the parameter is cut; None: it is not."""
        return [
            (piece, self._masters[id(piece)], self._reducer.cut_over(piece.slot.placement))
            for piece in self._reducer.pieces
        ]

    def _weight(self, piece: Piece) -> Tensor:
        """The part of the parameter itself that this rank updates."""
        if piece.is_whole:
            return piece.slot.parameter.detach()
        return piece.of(self._weights[piece.bucket])

    def _make_master(self, piece: Piece) -> Tensor:
        """What the inner optimizer updates: that part, or an fp32 copy of it."""
        weight = self._weight(piece)
        exact = torch.promote_types(weight.dtype, torch.float32)
        return weight.to(exact).requires_grad_()

    def reload(self, *_: object) -> None:
        """Takes the model's weights into the fp32 copies, after they were loaded or set."""
        with torch.no_grad():
            for piece in self._reducer.pieces:
                self._masters[id(piece)].copy_(self._weight(piece))

    # -- a step -------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates this rank's part and starts gathering the others'.

        Args:
            closure: as torch's; it calls backward and the reducer's `finish`.

        Raises:
            CommGridError: a parameter was moved or replaced since the optimizer was made, or read
                by a forward before it was whole.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_waited()
        self.wait()
        self._check_in_place()
        for outer, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({key: value for key, value in outer.items() if key != "params"})
        for piece in self._reducer.pieces:
            gradient = piece.gradient if piece.slot.used else None
            master = self._masters[id(piece)]
            if gradient is not None and gradient.dtype != master.dtype:
                gradient = gradient.to(master.dtype)
            master.grad = gradient
        self._inner.step()
        for piece in self._reducer.pieces:
            master, weight = self._masters[id(piece)], self._weight(piece)
            if master.dtype != weight.dtype:
                weight.copy_(master)
        self._gather()
        return loss

    def _gather(self) -> None:
        for bucket in reversed(self._reducer.buckets):  # the first that forward uses come first
            if self._reducer.shard and bucket.group.size() > 1:
                self._gathers[id(bucket)] = start_all_gather_(self._weights[bucket], bucket.group)
        if not self._overlap:
            self.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients, also what the reducer has accumulated for a step not taken."""
        super().zero_grad(set_to_none)
        self._reducer.zero_grad()

    def _check_in_place(self) -> None:
        for slot, place in self._places:
            if slot.parameter.data_ptr() != place:
                raise CommGridError(
                    f"{slot.placement} was moved or replaced after its ShardedOptimizer was made; "
                    "make reducer and optimizer after the model is on its device"
                )

    def _check_waited(self) -> None:
        """Refuses gradients that came from parameters which were not whole yet."""
        for bucket in self._reducer.buckets:
            for slot in bucket.slots if id(bucket) in self._gathers else ():
                if slot.used:
                    raise CommGridError(
                        f"{slot.placement} has a gradient, but no module waited for it after the "
                        "step before, as none does in code that torch.compile made before this "
                        "optimizer; use overlap=False, or call wait() before each forward"
                    )

    def wait(self) -> None:
        """Returns when every parameter is whole again."""
        for bucket in list(self._gathers):
            self._gathers.pop(bucket).wait()

    def _watch(self, model: nn.Module) -> list[Any]:
        before, whole, reload = (
            _Hook(method) for method in (self._before, self._whole, self.reload)
        )
        hooks: list[Any] = []
        module: Any  # torch does not annotate these methods
        for module in {model, *self._owners}:
            hooks.append(module.register_load_state_dict_pre_hook(whole))
            hooks.append(module.register_load_state_dict_post_hook(reload))
            if self._reducer.shard:
                hooks.append(module.register_forward_pre_hook(before))
                hooks.append(module.register_state_dict_pre_hook(whole))
        return hooks

    def _whole(self, *_: object) -> None:
        self.wait()

    def compiled(self) -> None:
        """Gathers no more beside a forward: compiled code does not wait for what it reads."""
        self._overlap = False
        self.wait()

    def _before(self, module: nn.Module, *_: object) -> None:
        """Waits for the parameters of a module about to run, and of those that never do."""
        if not self._gathers and module in self._called:
            return
        self._called.add(module)
        for owner, buckets in self._owners.items():
            if owner is module or owner not in self._called:
                for bucket in buckets:
                    if id(bucket) in self._gathers:
                        self._gathers.pop(id(bucket)).wait()

    # -- its state ----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, for the same rank of the same grid."""
        return {
            "layout": self._layout(),
            "inner": self._inner.state_dict(),
            "masters": [
                self._masters[id(piece)].detach().clone() for piece in self._reducer.pieces
            ],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes up where `state_dict` was called.

        Raises:
            ShapeError: it is of another model, grid, or rank.
        """
        self.wait()
        theirs, mine = state_dict["layout"], self._layout()
        if theirs != mine:
            differing = next(
                (pair for pair in zip(theirs, mine, strict=False) if pair[0] != pair[1]),
                (len(theirs), len(mine)),
            )
            raise ShapeError(
                f"this optimizer state was saved for other parts of the parameters: it has "
                f"{differing[0]} where this rank has {differing[1]} (name, start, stop); load it "
                "on the same rank of the same grid"
            )
        self._inner.load_state_dict(state_dict["inner"])
        for outer, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            outer.update({key: value for key, value in inner.items() if key != "params"})
        with torch.no_grad():
            for piece, master in zip(self._reducer.pieces, state_dict["masters"], strict=True):
                self._masters[id(piece)].copy_(master)
                self._weight(piece).copy_(master)
        self._gather()
        self.wait()

    def _layout(self) -> list[tuple[str, int, int]]:
        return [(p.slot.placement.name, p.start, p.stop) for p in self._reducer.pieces]


class _Hook:
    """Calls a method of an optimizer that is alive; a copied or pickled model's does nothing."""

    def __init__(self, method: Callable[..., object] | None = None) -> None:
        self._method = weakref.WeakMethod(method) if method is not None else None
        self.traced = False

    def __call__(self, *given: Any) -> None:
        if torch.compiler.is_compiling():
            self.trace()
            if self.traced:  # it is; guarded, so that another model's optimizer is told as well
                return
        method = self._method() if self._method is not None else None
        if method is not None:
            method(*given)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def trace(self) -> bool:
        """Called once, while torch.compile traces a forward, and is no part of what it makes."""
        method: Any = self._method() if self._method is not None else None
        if method is not None:
            method.__self__.compiled()
        self.traced = True
        return True

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


def _flatten(reducer: GradientReducer) -> dict[Bucket, Tensor]:
    """Moves the parameters into flat buffers laid out as their gradients'."""
    weights = {}
    with torch.no_grad():
        for bucket in reducer.buckets:
            flat = bucket.gradient.new_zeros(
                bucket.gradient.shape, dtype=bucket.slots[0].parameter.dtype
            )
            for slot in bucket.slots:
                view = flat[slot.start : slot.stop].view(slot.parameter.shape)
                view.copy_(slot.parameter)
                slot.parameter.data = view
            weights[bucket] = flat
    return weights


def _owners(reducer: GradientReducer) -> dict[nn.Module, list[Bucket]]:
    """Each module that has parameters itself, and the buckets these are in."""
    places = {
        id(slot.parameter): bucket
        for bucket in reducer.buckets for slot in bucket.slots
    }  # fmt: skip
    owners: dict[nn.Module, list[Bucket]] = {}
    for module in reducer.model.modules():
        own = [places[id(p)] for p in module.parameters(recurse=False) if id(p) in places]
        if own:
            owners[module] = list(dict.fromkeys(own))
    return owners
