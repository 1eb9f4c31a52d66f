"""The table of collectives: their names in torch, and the arguments that must agree.

Every other list of collectives is made from this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class Operation:
    """A collective, or one half of a transfer.

    Args:
        name: as `torch.distributed` calls it, without the forms that it has for one tensor.
        methods: of `torch.distributed.ProcessGroup` that issue it.
        tensors: which of their arguments holds what the record is about: a rank's inputs, for
            `recv` and `scatter` its outputs; None: there is none.
        outputs: which holds the outputs.
        peer: which holds the group rank of the other side, or options with the root.
        sizes: the size that must agree on all ranks: of inputs, of outputs, or none.
        reduces: whether it adds up, or the like.
    """

    name: str
    methods: tuple[str, ...]
    tensors: int | None = 0
    outputs: int | None = None
    peer: int | None = None
    sizes: Literal["inputs", "outputs", "free"] = "inputs"
    reduces: bool = False


# Some methods are of later versions of torch, and some of earlier ones.
_ALL = (
    Operation("all_reduce", ("allreduce", "allreduce_coalesced"), reduces=True),
    Operation("broadcast", ("broadcast",), peer=1),
    Operation("reduce", ("reduce",), peer=1, reduces=True),
    # Each rank may hand in another amount, as long as all make room for the same.
    Operation(
        "all_gather",
        ("allgather", "_allgather_base", "all_gather_single", "allgather_coalesced",
         "allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
        tensors=1, outputs=0, sizes="outputs",
    ),
    Operation(
        "reduce_scatter",
        ("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single",
         "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
        tensors=1, outputs=0, reduces=True,
    ),
    Operation(
        "all_to_all", ("alltoall", "alltoall_base", "all_to_all_single"),
        tensors=1, outputs=0, sizes="free",
    ),
    Operation("gather", ("gather",), tensors=1, outputs=0, peer=2),
    Operation("scatter", ("scatter",), peer=2),
    Operation("barrier", ("barrier", "monitored_barrier"), tensors=None, sizes="free"),
    Operation("send", ("send",), peer=1),
    Operation("recv", ("recv",), peer=1),
)  # fmt: skip
OPERATIONS = {each.name: each for each in _ALL}
TRANSFERS = ("send", "recv")
"""Operations between two ranks; every other takes all of the group."""

_PLAIN = {name.replace("_", ""): name for name in OPERATIONS}
_FORMS = ("base", "coalesced", "single", "v", "oop", "tensor", "into")


def methods() -> Iterator[tuple[str, Operation]]:
    """The methods of torch's process groups that issue one, each with its operation."""
    for operation in _ALL:
        for method in operation.methods:
            yield method, operation
    # From any rank: it has no peer.
    yield "recv_anysource", Operation("recv", ("recv_anysource",))


def named(name: str) -> str:
    """The operation that torch's flight recorder calls by any of its names.

    >>> named("_all_gather_base"), named("ALLGATHER_coalesced"), named("all_reduce_barrier")
    ('all_gather', 'all_gather', 'barrier')
    """
    plain = name.split(" ")[0].lower()
    for form in _FORMS:
        plain = plain.removesuffix(f"_{form}")
    plain = plain.lstrip("_")
    if "barrier" in plain:
        plain = "barrier"
    return _PLAIN.get(plain.replace("_", ""), plain)


class Alike(NamedTuple):
    """The properties of a call that must agree on all ranks.

    Args:
        operation, dtype: of the call.
        size: bytes of inputs or outputs; 0: sizes may differ.
        root: of a collective with one.
        reduction: such as `SUM`; "": none, or it was not recorded.
    """

    operation: str
    dtype: str
    size: int
    root: int | None
    reduction: str


def alike(
    name: str, dtype: str, size: int, output: int | None, root: int | None, reduction: str = ""
) -> Alike:
    """Return the properties of a call that must agree on all ranks.

    Args:
        name: of the operation; of an unknown one, all of these must agree.
        size, output: bytes that this rank hands in, and that it gets; None: not recorded.
        dtype, root, reduction: as of `Alike`; the dtype of the first tensor.
    """
    if name in TRANSFERS:  # both sides are one message, and each names the other
        return Alike("message", dtype, size, None, "")
    known = OPERATIONS.get(name)
    if name == "barrier":
        return Alike(name, "", 0, None, "")
    if known is not None and known.sizes != "inputs":
        size = (output or 0) if known.sizes == "outputs" else 0
    return Alike(name, dtype, size, root, reduction)
