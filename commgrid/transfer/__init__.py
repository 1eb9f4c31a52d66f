"""Weights from any grid to any other, without a disk.

    transfer = Transfer(model, served, source_grid=training, target_grid=serving)
    print(transfer.plan)        bytes between each two ranks
    transfer.run()              as often as the weights change

`Transfer` is called on all ranks of both grids, with `None` for a side that a rank is not on. As in
checkpoints, each rank holds boxes of full tensors, by their names in the whole model. Both sides
tell each other once; the plan is arithmetic from then on, without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from commgrid.on_demand import on_demand
from commgrid.resharding.plan import Message, Move, TransferPlan

if TYPE_CHECKING:
    from commgrid.resharding.name_tables.table import NameTable, mapping
    from commgrid.transfer.conversion import Convert, Fp8Blocks
    from commgrid.transfer.models import Part
    from commgrid.transfer.transfer import Transfer

__all__ = [
    "Convert", "Fp8Blocks", "Message", "Move", "NameTable", "Part", "Transfer", "TransferPlan",
    "mapping",
]  # fmt: skip

_LIVE = {
    "commgrid.resharding.name_tables.table": ("NameTable", "mapping"),
    "commgrid.transfer.conversion": ("Convert", "Fp8Blocks"),
    "commgrid.transfer.models": ("Part",),
    "commgrid.transfer.transfer": ("Transfer",),
}  # fmt: skip

__getattr__, __dir__ = on_demand(globals(), _LIVE)
