"""MoELayer: router, dispatch, experts and the way back, in place of a transformer block's MLP."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from commgrid.collectives import gather_from_group, scatter_to_group
from commgrid.collectives.group_ref import GroupRef
from commgrid.equality.inputs import note
from commgrid.errors import GridNotInitializedError, ShapeError, UnknownGroupError
from commgrid.expert.dispatch import Dispatcher
from commgrid.expert.experts import Activation, GroupedExperts
from commgrid.expert.router import Router, Routing
from commgrid.expert.shared import SharedExpert
from commgrid.parameters import mark_parameters
from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.registry import get_grid
from commgrid.tensor_parallel.init import Init
from commgrid.tensor_parallel.matmul import as_own


class MoELayer(nn.Module):
    """A mixture of experts.

    Tokens are shared out over tp: under sequence parallelism they are already, else each rank takes
    its share and the outputs are gathered. The expert region folds over dp, cp and tp as it likes,
    so that experts see the tokens of all those ranks.

    Args:
        hidden: width of a token.
        ffn_hidden: width inside each expert.
        num_experts: over all ranks of ep.
        top_k: how many a token goes to.
        activation, gated, init, init_down: as GroupedExperts'.
        shared_ffn_hidden: width inside an expert that sees every token; 0: there is none.
        shared_scaled: its `scaled`.
        pad: give every expert its full capacity of rows, so that the host never waits for the
            device; needs `capacity_factor`, and x of one shape on all ranks of ep and etp.
        sequence_parallel: x and y are this rank's slices of the sequence.
        sequence_dim: which dim of x is the sequence.
        tp, ep, etp: group names, or bare ProcessGroups.
        cp: the group whose ranks have other parts of the same sequences, of which the auxiliary
            losses are then taken as a whole; None, or a grid without `cp`: each rank has its own.
        grid: where to look names up; None: the default one.
        device, dtype: of the parameters.
        **routing: further arguments of Router, such as `aux_loss`, `score`, `capacity_factor`.

    Shapes:
        x, y: (*, hidden).

    Communication:
        Forward and backward: all-to-all over ep there and back, with etp an all-gather and a
        reduce-scatter as well; without sequence parallelism an all-gather over tp each way.

    Raises:
        SpecError, ShapeError: numbers that do not fit each other or the groups; x of another
            width; logits that are not finite, on any rank.
        UnknownGroupError: the grid has no ep or etp.

    Example:
        >>> import commgrid
        >>> grid = commgrid.initialize(ep=1, etp=1)
        >>> layer = MoELayer(8, 16, num_experts=4, top_k=2, aux_loss=0.01)
        >>> layer(torch.randn(3, 5, 8)).shape
        torch.Size([3, 5, 8])
        >>> commgrid.shutdown()
    """

    def __init__(
        self,
        hidden: int,
        ffn_hidden: int,
        num_experts: int,
        top_k: int,
        *,
        activation: Activation = F.gelu,
        gated: bool = False,
        init: Init | None = None,
        init_down: Init | None = None,
        shared_ffn_hidden: int = 0,
        shared_scaled: bool = False,
        pad: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        tp: str | ProcessGroup = "tp",
        ep: str | ProcessGroup = "ep",
        etp: str | ProcessGroup = "etp",
        cp: str | ProcessGroup | None = "cp",
        grid: HyperCommGrid | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **routing: Any,
    ) -> None:
        super().__init__()
        label = f"MoELayer({hidden}, {ffn_hidden}, {num_experts}, {top_k})"
        self.hidden, self.sequence_parallel = hidden, sequence_parallel
        self.group = GroupRef(tp, grid, owner=label)
        self.router = Router(
            hidden, num_experts, top_k, device=device, dtype=dtype, **routing
        )  # fmt: skip
        if self.group.size > 1:
            mark_parameters(self.router, partial=tp, grid=grid)
        try:
            groups = GroupRef(ep, grid, owner=label), GroupRef(etp, grid, owner=label)
        except UnknownGroupError as error:
            raise UnknownGroupError(
                f"{label}: {error}. Experts need the axes ep and etp: commgrid.initialize(ep=…) "
                "makes them, or etp=… where ep is 1"
            ) from error
        self.cp: GroupRef | None = None
        try:
            self.cp = None if cp is None else GroupRef(cp, grid, owner=label)
        except (GridNotInitializedError, UnknownGroupError):
            if cp != "cp":
                raise
        self.dispatcher = Dispatcher(num_experts, *groups, pad=pad)
        shape: dict[str, Any] = {
            "activation": activation, "gated": gated, "init": init, "init_down": init_down,
            "grid": grid, "device": device, "dtype": dtype,
        }  # fmt: skip
        self.experts = GroupedExperts(hidden, ffn_hidden, num_experts, ep=ep, etp=etp, **shape)
        self.shared: SharedExpert | None = None
        if shared_ffn_hidden:
            self.shared = SharedExpert(
                hidden, shared_ffn_hidden, scaled=shared_scaled, group=tp,
                sequence_parallel=sequence_parallel, sequence_dim=sequence_dim, **shape,
            )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 0 or x.shape[-1] != self.hidden:
            raise ShapeError(
                f"{self.group.owner}: tokens of shape {tuple(x.shape)}; expected (*, {self.hidden})"
            )
        tokens, shares, most = x.reshape(-1, self.hidden), None, None
        if not self.sequence_parallel:
            note(f"{self.group.owner}'s tokens", x, self.group)
            whole, rest = divmod(len(tokens), self.group.size)
            shares = [whole + (rank < rest) for rank in range(self.group.size)]
            most = shares[0]
            tokens = scatter_to_group(tokens, self.group, dim=0, sizes=shares)
        y = self.route(tokens, most)[0]
        if shares is not None:
            y = gather_from_group(y, self.group, dim=0, sizes=shares)
        y = as_own(y, *x.shape)
        return y if self.shared is None else y + self.shared(x)

    def route(self, tokens: Tensor, num_tokens: int | None = None) -> tuple[Tensor, Routing]:
        """Takes this rank's tokens, (tokens, hidden), through their experts.

        Args:
            num_tokens: as the router's.

        Returns:
            The outputs, of the same shape, and where they went, with the losses that balance adds.
        """
        group = self.group if self.group.size > 1 else None
        cp = self.cp if self.cp is not None and self.cp.size > 1 else None
        routing = self.router(tokens, group, cp=cp, num_tokens=num_tokens)
        dispatched = self.dispatcher.dispatch(tokens, routing)
        sent = dispatched.rows, dispatched.weights, dispatched.counts
        return self.dispatcher.combine(self.experts(*sent), dispatched), routing

    def update_bias(self, group: str | ProcessGroup = "dp_cp_tp") -> None:
        """After a step, with `bias_rate`: moves the router's bias against the load.

        Args:
            group: all ranks that have tokens of their own, those of tp among them; a name is looked
                up in the grid of the layer's `tp`.

        Raises:
            CommGridError: the router has no bias.
        """
        grid = get_grid(self.group.grid_name) if isinstance(group, str) else None
        self.router.update_bias(group if grid is None else grid.get_group(str(group)))
