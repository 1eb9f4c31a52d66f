"""Bridge: a layer whose input is on one grid, and its output on another."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from commgrid.bridge.contract import Contract, Facts, conclude
from commgrid.bridge.exchange import Moving
from commgrid.bridge.links import BridgeLinks
from commgrid.bridge.sides import Cut, check_axes, grid_side
from commgrid.collectives.first_order import first_order
from commgrid.errors import CommGridError, GridDestroyedError, NotInGridError, ShapeError, SpecError
from commgrid.grid_pairs.pair_group import PairGroup
from commgrid.grid_pairs.pairing import SIDES, Pairing
from commgrid.rendezvous.agreement import PHASES
from commgrid.rendezvous.timeouts import Seconds, as_seconds
from commgrid.runtime.grid import HyperCommGrid


class Bridge(nn.Module):
    """Takes a tensor from one grid to another, and its gradient back.

    The source's last pipeline stage has a tensor, cut along `dim` over `group`; the target's first
    stage gets it, cut along the same dim over its own. The grids may have any sizes, on the same
    ranks, some of them or others. Every rank of both grids makes the bridge with the same arguments
    but for the grid that it is not in, which is None, and those of the two stages call it:

    | rank | calls | gets |
    |---|---|---|
    | of the source's stage | `bridge(x)` | a zero, whose `backward()` takes the gradient's way |
    | of the target's | `bridge(None)` | its part of the whole tensor |
    | of both | `bridge(x)` | its part of the whole tensor |
    | of neither | `bridge(None)`, or not | None |

    The source's parts may have any lengths along `dim`, which are joined in the group's order; the
    target's are equal, or where the whole is no multiple the first ones are 1 longer, as
    `torch.tensor_split` does.

    **Copies.** Ranks of a stage that differ only along axes that the tensor is not cut along hold
    copies. On the source they hold the same values; one of them sends, the nearest or in turn; all
    get the whole gradient. On the target each gets the values, and `partial` says what their
    gradients are. Along `tp` they are equal, because commgrid's column-parallel layers (and
    Megatron-LM's) sum the gradient of their input over tp: it comes from one copy. Along any other
    axis each copy computes something of its own, and has a part of the gradient: these are summed.
    Nothing is divided: the gradient is that of the sum of all losses of the target's data ranks.

    Args:
        source_grid, target_grid: None on ranks that are not in it.
        dim: of the tensor, along which it is cut.
        group: over whose ranks: a name, or a pair of names, the source's and the target's.
        source_sequence, target_sequence: a further dim that is cut, such as the sequence over `cp`,
            or over `tp` as sequence parallelism does. A cut of `dim` itself takes its place.
        source_stage, target_stage: pipeline stages.
        copies: axes along which ranks may hold copies. An axis of size above 1 that is not in it
            and not cut is an error, since its ranks may hold parts.
        partial: the axes among the target's copies whose gradients are summed; None: all but tp.
        dynamic: whether shapes may change from call to call, for which all ranks then tell each
            other theirs every time. Else they do in the first call, and where autograd begins or
            ceases to record.
        compare: whether the first call compares copies on the source, to the last bit.
        name: what both grids meet under; bridges that are made at one time have different ones.
        timeout: of its messages; None: the longer one of the grids'.
        startup_timeout: how long making it may take.
        device: where tensors arrive; None: the current CUDA device, or the CPU on gloo.

    Raises:
        SpecError: neither grid is given, or a group, stage or axis does not fit its grid.
        GridDestroyedError, GridNotInitializedError: a grid's communicators are gone, as with a
            torch.distributed that has ended.
        GridMismatchError: ranks were given other arguments.
        PeerTimeoutError: a rank of either grid did not come; it is named.

    Example:
        >>> import commgrid
        >>> grid = commgrid.initialize()
        >>> bridge = Bridge(grid, grid, dim=0)
        >>> x = torch.ones(2, 3, requires_grad=True)
        >>> (2 * bridge(x)).sum().backward()
        >>> x.grad[0]
        tensor([2., 2., 2.])
        >>> commgrid.shutdown()
    """

    def __init__(
        self,
        source_grid: HyperCommGrid | None,
        target_grid: HyperCommGrid | None,
        *,
        dim: int = 0,
        group: str | tuple[str, str] = "dp",
        source_sequence: Cut | None = None,
        target_sequence: Cut | None = None,
        source_stage: int = -1,
        target_stage: int = 0,
        copies: Sequence[str] = ("tp",),
        partial: Sequence[str] | None = None,
        dynamic: bool = False,
        compare: bool = True,
        name: str = "bridge",
        timeout: Seconds | None = None,
        startup_timeout: Seconds = 600.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.name, self.dynamic, self._compares = name, dynamic, compare
        self._about = f"bridge {name!r}"
        deadline = time.monotonic() + as_seconds("startup_timeout", startup_timeout)
        limit = None if timeout is None else as_seconds("timeout", timeout)
        given = {"source": source_grid, "target": target_grid}
        for what, grid in given.items():
            if grid is not None and not isinstance(grid, HyperCommGrid):
                raise SpecError(
                    f"{what}_grid={grid!r}: expected a grid, or None on ranks that are not in it"
                )
        grids = {what: grid for what, grid in given.items() if grid is not None}
        if not grids:
            raise SpecError(
                f"{self._about}: source_grid and target_grid are both None, so that this rank has "
                "no part in it; make it on the ranks of either grid only"
            )
        groups = (group, group) if isinstance(group, str) else group
        if not isinstance(groups, tuple | list) or len(groups) != 2:
            raise SpecError(f"group={group!r}: expected a name, or the source's and the target's")
        self._cuts = {
            "source": _cuts(dim, groups[0], source_sequence),
            "target": _cuts(dim, groups[1], target_sequence),
        }
        self._stages = {"source": source_stage, "target": target_stage}
        self._copies = (copies,) if isinstance(copies, str) else tuple(copies)
        self._partial = (partial,) if isinstance(partial, str) else partial and tuple(partial)
        self._links: BridgeLinks | None = None
        self._crossings: dict[bool, Contract] = {}
        self._calls = 0
        self._meet(grids, deadline, limit, device)
        for grid in grids.values():
            grid.before_destroy(self._grid_ends)

    # -- making it ----------------------------------------------------------------------

    def _meet(
        self,
        grids: dict[str, HyperCommGrid],
        deadline: float,
        timeout: float | None,
        device: torch.device | str | None,
    ) -> None:
        """Finds the other grid, compares arguments, and makes the communicator."""
        document = self._document(timeout)
        pair_group: PairGroup | None = None
        try:
            with Pairing(
                "bridge", self.name, grids, document, deadline,
                phases=PHASES, limit="startup_timeout",
            ) as pair:  # fmt: skip
                self.rank = pair.numbering.rank
                cards = [pair.cards[what] for what in SIDES]
                check_axes(self._copies, self._partial, *(card.spec for card in cards))
                self._source, self._target = (
                    grid_side(
                        what, card.spec, self._cuts[what], stage=self._stages[what],
                        copies=self._copies, partial=() if what == "source" else self._partial,
                    )
                    for what, card in zip(SIDES, cards, strict=True)
                )  # fmt: skip
                limits = [card.timeout for card in cards if card.timeout is not None]
                backends = {card.backend for card in cards}
                if self.rank in self.ranks:
                    pair_group = PairGroup(
                        pair, self._about, self.ranks, grids.values(),
                        backend=backends.pop() if len(backends) == 1 else None,
                        timeout=max(limits, default=None) if timeout is None else timeout,
                        connect=True,
                    )  # fmt: skip
                    self._links = BridgeLinks(pair_group, cards, device)
                pair.meet()
                if pair_group is not None:
                    pair_group.connect_watch()
                    pair_group.connect(pair.patience())
                pair.meet()
                if pair_group is not None:
                    pair_group.begin()
        except BaseException:
            if pair_group is not None:
                pair_group.end(broken=True)
            raise

    def _document(self, timeout: float | None) -> dict[str, Any]:
        """The arguments that must be equal on all ranks, beside the grids."""
        said: dict[str, Any] = {
            "copies": list(self._copies), "timeout": timeout, "dynamic": self.dynamic,
            "compare": self._compares,
            "partial": None if self._partial is None else list(self._partial),
        }  # fmt: skip
        for what in SIDES:
            said[f"{what}_stage"] = self._stages[what]
            said[f"{what}_cuts"] = json.dumps([cut.to_dict() for cut in self._cuts[what]])
        return said

    # -- what it is ---------------------------------------------------------------------

    @property
    def is_source(self) -> bool:
        """Whether this rank gives a tensor."""
        return self.rank in self._source.side.places

    @property
    def is_target(self) -> bool:
        """Whether this rank gets one."""
        return self.rank in self._target.side.places

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that call it, of both stages."""
        return tuple(sorted({*self._source.ranks, *self._target.ranks}))

    def extra_repr(self) -> str:
        said = [
            f"{what} {', '.join(f'dim {cut.dim} over {cut.group!r}' for cut in side.cuts)} "
            f"on {len(side.ranks)} ranks"
            for what, side in (("source", self._source), ("target", self._target))
        ]
        return f"{self.name!r}, {', '.join(said)}"

    # -- crossing it --------------------------------------------------------------------

    def forward(self, x: Tensor | None = None) -> Tensor | None:
        """Crosses it; on every rank of both stages, which all call it in one order.

        Args:
            x: this rank's part of the tensor; None on ranks that are not on the source's stage. It
                is not changed in place until its backward, or `finish`.

        Returns:
            This rank's part as the target cuts it; on a rank of the source's stage alone a zero, to
            call `backward()` of, or to add to a loss; elsewhere None.

        Raises:
            ShapeError: a rank gave no tensor, or tensors do not fit each other or the cuts.
            SpecError: the tensors have no such dim, or a dtype that NCCL does not send.
            GridMismatchError: in the first call, the source's copies differ.
            GoneError: a rank did not come, or is gone; it is named.
            GridDestroyedError: the bridge was destroyed, or one of its grids.
        """
        if not self.is_source and not self.is_target:
            if x is not None:
                raise NotInGridError(
                    f"{self._about}: rank {self.rank} gave a tensor, but is on neither stage of "
                    f"it, which have ranks {self.ranks}; call bridge(None), or not at all"
                )
            return None
        crossing = self._crossing(x)
        number = self._calls
        self._calls += 1
        anchor = x
        if anchor is None and crossing.needs_grad:
            anchor = torch.zeros((), device=self._live.device, requires_grad=True)
        with torch.set_grad_enabled(crossing.needs_grad and torch.is_grad_enabled()):
            crossed: Tensor = _Crossing.apply(x, anchor, self, crossing, number)  # type: ignore[no-untyped-call]
        return crossed

    def forget_shapes(self) -> None:
        """Has ranks tell each other their shapes anew in the next call; on all of them."""
        self._crossings.clear()

    def finish(self) -> None:
        """Returns when everything that this rank has sent has left."""
        if self._links is not None:
            self._links.finish()

    def destroy(self) -> None:
        """Gives up the communicator, as the end of either grid does; a second call does nothing."""
        if self._links is not None:
            self._links.close(wait=True)
            self._links = None
        self._crossings.clear()

    def _grid_ends(self) -> None:
        if self._links is not None:
            # While an error is under way receivers may be gone.
            self._links.close(wait=sys.exc_info()[0] is None)
            self._links = None

    @property
    def _live(self) -> BridgeLinks:
        if self._links is None:
            raise GridDestroyedError(
                f"{self._about} was destroyed, or one of its grids was; make it again"
            )
        return self._links

    def _crossing(self, x: Tensor | None) -> Contract:
        """The messages of such a call, from an earlier one or agreed on now."""
        facts = Facts.of(x, self.is_source, self._live.device, self._compares)
        known = None if self.dynamic else self._crossings.get(facts.records)
        if known is not None:
            if known.facts != facts:
                raise ShapeError(
                    f"{self._about}: rank {self.rank} gives {_given(facts)}, but gave "
                    f"{_given(known.facts)} in the first call; give every call one shape, make "
                    "the bridge with dynamic=True, or call forget_shapes() on all ranks"
                )
            return known
        told = self._live.tell(facts, f"call {self._calls}")
        found = conclude(self._about, told, self._source, self._target, self.rank)
        if not self._live.can_send(found.dtype):
            raise SpecError(f"{self._about}: a tensor of {found.dtype}, which NCCL does not send; "
                            "convert it")  # fmt: skip
        self._crossings[facts.records] = found
        self._compares = False
        return found

    # -- not to be copied ---------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        raise CommGridError(
            f"{self._about} cannot be pickled or copied: its ranks share one communicator, which "
            "they make together; do not save it, and make it again"
        )


class _Crossing(torch.autograd.Function):
    """Forward the source's tensor, backward the target's gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor | None, anchor: Tensor | None, bridge: Bridge, crossing: Contract,
        number: int,
    ) -> Tensor:  # fmt: skip
        ctx.bridge, ctx.crossing, ctx.number = bridge, crossing, number
        ctx.shape = None if x is None else x.shape
        arrived = Moving(
            bridge._live, number, crossing, crossing.forward, x, crossing.arrives
        ).forward()
        if arrived is None:
            return torch.zeros((), dtype=crossing.dtype, device=bridge._live.device)
        return arrived

    @staticmethod
    @first_order("a Bridge")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        bridge, crossing, number = ctx.bridge, ctx.crossing, ctx.number
        given = gradient if bridge.is_target else None
        back = Moving(
            bridge._live, number, crossing, crossing.backward, given, ctx.shape
        ).backward()
        bridge._live.let_leave(f"forward of call {number}")
        return back, None, None, None, None


def _cuts(dim: int, group: str, sequence: Cut | None) -> tuple[Cut, ...]:
    own = Cut(dim, group)
    if sequence is not None and not isinstance(sequence, Cut):
        raise SpecError(f"sequence={sequence!r}: expected Cut(dim, group), or with a sharding")
    if sequence is None:
        return (own,)
    return (sequence,) if sequence.dim == dim else (own, sequence)


def _given(facts: Facts) -> str:
    if facts.dtype is None:
        return "no tensor"
    return f"{facts.said}{' that needs a gradient' if facts.needs_grad else ''}"
