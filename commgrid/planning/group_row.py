"""Rows of the groups table, as a user writes them: further names, and options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from commgrid.errors import SpecError
from commgrid.layout.ranks import RankTuple, as_index, check_ranks
from commgrid.planning.yaml_keys import ROW_OPTIONS, check_level, refuse_unknown

NCCL_OPTIONS = {
    "is_high_priority_stream": bool,
    "blocking": int,
    "cga_cluster_size": int,
    "collnet_enable": int,
    "comm_name": str,
    "cta_policy": int,
    "max_ctas": int,
    "min_ctas": int,
    "net_name": str,
    "nvls_ctas": int,
    "split_share": int,
    "traffic_class": int,
}
"""Fields of torch's `ProcessGroupNCCL.Options` and its `config`, with their types."""

UNWANTED = "_"
"""The part of a split that takes up its place and gets no group."""


@dataclass(frozen=True)
class GroupOptions:
    """Options of a communicator; None and () leave the grid's own choice.

    Args:
        backend: as `torch.distributed.new_group` takes it: `nccl`, `cpu:gloo,cuda:nccl`.
        timeout: seconds a collective may take.
        nccl: pairs of an `NCCL_OPTIONS` key and its value, sorted.
    """

    backend: str | None = None
    timeout: float | None = None
    nccl: tuple[tuple[str, int | bool | str], ...] = ()

    def over(self, base: GroupOptions) -> GroupOptions:
        """These options, with those of `base` where these say nothing."""
        return GroupOptions(
            backend=self.backend or base.backend,
            timeout=base.timeout if self.timeout is None else self.timeout,
            nccl=tuple(sorted({**dict(base.nccl), **dict(self.nccl)}.items())),
        )

    def to_dict(self) -> dict[str, Any]:
        """The keys a groups entry has for these options."""
        given = {"backend": self.backend, "timeout": self.timeout, "nccl": dict(self.nccl) or None}
        return {key: value for key, value in given.items() if value is not None}


@dataclass(frozen=True)
class GroupEntry:
    """One row of the groups table.

    Args:
        name: the row's key.
        of: the group it is made from; None where the row only sets options.
        own: True gives it a communicator of its own.
        pick: members by position, integers or `first` and `last`; the others are not in it.
        split: part names and sizes, slowest first; one size may be -1.
        options: see `GroupOptions`.
        lists: the members of every group of this name as global ranks, each list in the group's
            order; ranks in none of them have no group of this name.
        within: the level of a cluster of which one unit has to hold every group of this name.
    """

    name: str
    of: str | None = None
    own: bool = False
    pick: tuple[int | str, ...] | None = None
    split: tuple[tuple[str, int], ...] | None = None
    options: GroupOptions = field(default_factory=GroupOptions)
    lists: tuple[RankTuple, ...] | None = None
    within: str | None = None

    @classmethod
    def parse(cls, name: object, value: object) -> GroupEntry:
        """A row from YAML or a dict: a string (another name), or a mapping of `ROW_OPTIONS`."""
        if not isinstance(name, str) or not name.isidentifier():
            raise SpecError(f"groups.{name}: expected a name such as dp_cp_ag as the key")
        if isinstance(value, str):
            value = {"of": value}
        if not isinstance(value, Mapping):
            raise SpecError(
                f"groups.{name}={value!r}: expected the name of a group, or a mapping with "
                f"some of {', '.join(ROW_OPTIONS)}"
            )
        refuse_unknown(f"groups.{name}.", value, ROW_OPTIONS)
        level = value.get("within")
        within = None if level is None else check_level(f"groups.{name}.within", level)
        if value.get("ranks") is not None:
            options = _parse_options(name, value)
            return cls(name, options=options, lists=_parse_lists(name, value), within=within)
        of, own = value.get("of"), value.get("own", False)
        if of is not None and not isinstance(of, str):
            raise SpecError(f"groups.{name}.of={of!r}: expected the name of a group")
        if not isinstance(own, bool):
            raise SpecError(f"groups.{name}.own={own!r}: expected true or false")
        pick, split = _parse_pick(name, value.get("pick")), _parse_split(name, value.get("split"))
        if of is None and (own or pick or split):
            raise SpecError(f"groups.{name}: own, pick and split need `of`, the group they act on")
        if pick and split:
            raise SpecError(f"groups.{name}: pick and split exclude each other; write two entries")
        return cls(name, of, own, pick, split, _parse_options(name, value), within=within)

    def to_dict(self) -> str | dict[str, Any]:
        """The row as `parse` takes it."""
        given: dict[str, Any] = {} if self.of is None else {"of": self.of}
        if self.own:
            given["own"] = True
        if self.pick is not None:
            given["pick"] = list(self.pick)
        if self.split is not None:
            given["split"] = dict(self.split)
        if self.lists is not None:
            given["ranks"] = [list(ranks) for ranks in self.lists]
        if self.within is not None:
            given["within"] = self.within
        given.update(self.options.to_dict())
        return given["of"] if list(given) == ["of"] else given


def _parse_pick(name: str, value: object) -> tuple[int | str, ...] | None:
    if value is None:
        return None
    given = list(value) if isinstance(value, list | tuple) else []
    items = [item if item in ("first", "last") else as_index(item) for item in given]
    if not items or None in items or len(set(items)) < len(items):
        raise SpecError(
            f"groups.{name}.pick={value!r}: expected a list of different positions, "
            "each first, last or an integer from 0"
        )
    return tuple(item for item in items if item is not None)


def _parse_split(name: str, value: object) -> tuple[tuple[str, int], ...] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not value:
        raise SpecError(f"groups.{name}.split={value!r}: expected a mapping of part names to sizes")
    parts = {}
    for part, given in value.items():
        if not isinstance(part, str) or not part.isidentifier():
            raise SpecError(f"groups.{name}.split: {part!r} is not a name for a part")
        size = as_index(given)
        if size is None or not (size > 0 or size == -1):
            raise SpecError(
                f"groups.{name}.split.{part}={given!r}: expected a positive integer, or -1"
            )
        parts[part] = size
    if list(parts.values()).count(-1) > 1:
        raise SpecError(f"groups.{name}.split: only one part can be -1; give the others sizes")
    return tuple(parts.items())


def _parse_lists(name: str, row: Mapping[str, Any]) -> tuple[RankTuple, ...]:
    """The groups of a row with `ranks`: lists of which no two have a rank in common."""
    key, given = f"groups.{name}.ranks", row["ranks"]
    beside = [other for other in ("of", "own", "pick", "split") if other in row]
    if beside:
        raise SpecError(
            f"groups.{name}: {' and '.join(beside)} beside ranks, which says all members and is a "
            f"communicator of its own; leave {' and '.join(beside)} out"
        )
    if not isinstance(given, list | tuple) or not given:
        raise SpecError(f"{key}={given!r}: expected a list of lists, such as [[0, 1], [2, 3]]")
    if as_index(given[0]) is not None:
        raise SpecError(
            f"{key}={given!r}: expected a list for each group; write {[list(given)]!r} for one"
        )
    lists = tuple(check_ranks(f"{key}[{i}]", ranks) for i, ranks in enumerate(given))
    holder: dict[int, int] = {}
    for i, ranks in enumerate(lists):
        for rank in ranks:
            if holder.setdefault(rank, i) != i:
                raise SpecError(
                    f"{key}: rank {rank} is in lists {holder[rank]} and {i}; under one name a rank "
                    "has one group, so write two rows"
                )
    return lists


def _parse_options(name: str, value: Mapping[str, Any]) -> GroupOptions:
    backend, timeout = value.get("backend"), value.get("timeout")
    nccl = {} if value.get("nccl") is None else value["nccl"]
    if backend is not None and not isinstance(backend, str):
        raise SpecError(f"groups.{name}.backend={backend!r}: expected a string such as nccl")
    if timeout is not None and (type(timeout) not in (int, float) or not 0 < timeout < 1e9):
        raise SpecError(
            f"groups.{name}.timeout={timeout!r}: expected seconds above 0 and below 1e9"
        )
    if not isinstance(nccl, Mapping):
        raise SpecError(f"groups.{name}.nccl={nccl!r}: expected a mapping of NCCL options")
    refuse_unknown(f"groups.{name}.nccl.", nccl, NCCL_OPTIONS)
    for key, given in nccl.items():
        if type(given) is not NCCL_OPTIONS[key]:
            expected = NCCL_OPTIONS[key].__name__
            raise SpecError(f"groups.{name}.nccl.{key}={given!r}: expected {expected}")
    timeout = None if timeout is None else float(timeout)
    return GroupOptions(backend, timeout, tuple(sorted(nccl.items())))
