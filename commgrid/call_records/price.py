"""The time of recorded calls on a cluster by the cost model, each call by itself.

    commgrid audit --dry train.py --grid "tp=8 pp=4" --world-size 1024 --ranks 0 -o runs/dry
    commgrid trace runs/dry --cluster h100

Recorded input sizes become the sizes of the model, as in nccl-tests: an all-gather is of
all members' parts. A barrier is an all-reduce of one number, as torch has it on NCCL; a reduce
costs what a broadcast does, which goes the other way; a gather or scatter is a message of each
member.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from commgrid.call_records.call import Call
from commgrid.call_records.trace import Trace
from commgrid.cost_model.calibration import CALIBRATION, Calibration
from commgrid.cost_model.cluster import Cluster
from commgrid.cost_model.layer import Machine

_AS = {"barrier": "all_reduce", "reduce": "broadcast", "gather": "send_recv",
       "scatter": "send_recv", "send": "send_recv", "recv": "send_recv"}  # fmt: skip
_PRICED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", *_AS)
_NUMBER = 4  # bytes of a barrier's


def pricer(
    cluster: Cluster, calibration: Calibration = CALIBRATION
) -> Callable[[Trace, Call], float]:
    """Seconds of a rank's call; NaN where the model has no form of it, or its ranks are not known.

    Args:
        cluster: on whose levels ranks lie by their numbers.
        calibration: the share of a datasheet's bandwidth that is reached.

    Example:
        >>> from commgrid.cost_model.cluster import CLUSTERS
        >>> from commgrid.call_records.call import Group
        >>> call = Call(Group("tp", tuple(range(8))), "all_reduce", bytes=10**9)
        >>> f"{1e3 * pricer(CLUSTERS['h100'])(Trace(0, (), 0, {}), call):.1f} ms"
        '4.9 ms'
    """
    machine = Machine(cluster, calibration)

    def price(trace: Trace, call: Call) -> float:
        ranks = call.group.ranks
        if not ranks or call.operation not in _PRICED:
            return math.nan
        size = float(call.bytes)
        if call.is_transfer:
            if call.peer is None:  # from anybody
                return math.nan
            ranks = (trace.rank, call.peer)
        elif call.operation == "all_gather":
            size *= len(ranks)
        elif call.operation in ("gather", "scatter"):
            size *= len(ranks) - 1
        elif call.operation == "barrier":
            size = _NUMBER
        collective = _AS.get(call.operation, call.operation)
        return machine.collective(collective, size, cluster.span(ranks).narrow)

    return price


def world_size(traces: Iterable[Trace]) -> int:
    """Ranks that traces know of, as if there were none after the last.

    >>> world_size([Trace(0, (), 0, {"dp": (0, 8, 16, 24)})])
    25
    """
    known = (
        (trace.rank, *(r for ranks in trace.members.values() for r in ranks)) for trace in traces
    )
    return max((rank for ranks in known for rank in ranks), default=-1) + 1
