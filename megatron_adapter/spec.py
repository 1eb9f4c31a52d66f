"""From the arguments of Megatron-core's `initialize_model_parallel` to a GridSpec.

The spec creates the names that Megatron has and no others. Megatron's two rank generators are
its two regions; what is no combination of axes is a row of the groups table:

| Megatron's | row |
|---|---|
| gloo twins, all-gather group | `{of: dp_cp, own: true, backend: gloo}`, `{of: dp_cp, own: true}` |
| optimizer instances | edp becomes the axes `intra_edp` and `inter_edp`; dp_cp is split |
| hierarchical context parallelism | `{of: cp, split: {hcp_1: 2, hcp_0: 4}}` |
| hybrid context parallelism | `{of: dp_cp, split: {_: 4, hybrid_2: 2}}`, for each size |
| embedding groups | `{of: pp, pick: [first, last]}` |
| sharded weights (`gtp_remat`) | axes `gtp`, `egtp`; of size 1 `{of: tp, split: {_: 4, gtp: 1}}` |
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from commgrid.errors import SpecError
from commgrid.layout.axis_names import nearest
from commgrid.layout.ranks import as_index
from commgrid.planning.spec import GridSpec
from commgrid.planning.yaml import load_yaml
from commgrid.planning.yaml_keys import DEFAULT_SHARE
from megatron_adapter.errors import MegatronSizeError, MegatronStateError
from megatron_adapter.names import MEGATRON_GROUPS, OPTIONAL, hierarchical_name, hybrid_name

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
NCCL_KEYS = ("cga_cluster_size", "max_ctas", "min_ctas", "net_name", "is_high_priority_stream")
"""What Megatron reads of an NCCL configuration file."""
SHARP = "collnet_enable"
"""The NCCL option of a communicator that uses SHARP."""

CONNECT = ("tp", "cp", "dp", "pp")
"""Groups that connect during initialization; the others do at first use, as Megatron's."""

Pick = tuple[int, ...]


@dataclass(frozen=True)
class MegatronSizes:
    """The arguments of Megatron-core's initialization that decide about groups.

    Args:
        world_size: the number of ranks.
        tp, pp, cp, ep: sizes.
        etp: expert tensor parallel size; None: tp.
        instances: of the distributed optimizer.
        order: axes fastest first, as Megatron spells it.
        hierarchical: sizes of the levels of cp, innermost first.
        hybrid: whether dp_cp has groups of every power of two.
        gloo, all_gather: whether those groups are created.
        embedding, position_embedding: positions in a pipeline; () for no such group.
        pipeline_backend: of the pipeline's groups; None: WORLD's.
        backend: WORLD's, which the embeddings keep beside a pipeline with another one.
        nccl: a key of an NCCL configuration file to its options.
        gtp, egtp: over how many ranks weights, and experts' weights, are sharded to be gathered
            again where they are used (Megatron's `gtp_remat` sizes).
        offset: the first rank; None: the grid is the whole world.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    instances: int = 1
    order: str = DEFAULT_ORDER
    hierarchical: tuple[int, ...] = ()
    hybrid: bool = False
    gloo: bool = True
    all_gather: bool = False
    embedding: Pick | None = None
    position_embedding: Pick = (0,)
    pipeline_backend: str | None = None
    backend: str = "nccl"
    nccl: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    gtp: int = 1
    egtp: int = 1
    offset: int | None = None

    def __post_init__(self) -> None:
        for one in fields(self):  # NumPy's integers are sizes as well
            value = getattr(self, one.name)
            index = as_index(value)
            if index is not None and index is not value:
                object.__setattr__(self, one.name, index)
        object.__setattr__(self, "hierarchical", tuple(as_index(n) or n for n in self.hierarchical))

    @property
    def expert_tp(self) -> int:
        """etp; without one, tp."""
        return self.tp if self.etp is None else self.etp

    @property
    def dp(self) -> int:
        """Data-parallel size."""
        return self.world_size // (self.tp * self.pp * self.cp * self.gtp)

    @property
    def edp(self) -> int:
        """Expert data-parallel size."""
        return self.world_size // (self.expert_tp * self.ep * self.pp * self.egtp)

    def check(self) -> None:
        """Refuses what Megatron refuses.

        Raises:
            MegatronSizeError: sizes that do not divide the world, or that `order` lacks.
            MegatronStateError: what Megatron asserts: regions that do not share their
                pipelines, instances or levels that do not divide.
        """
        given = {"tp": self.tp, "pp": self.pp, "cp": self.cp, "ep": self.ep, "etp": self.expert_tp}
        given |= {"gtp": self.gtp, "egtp": self.egtp}
        for name, size in {**given, "distributed optimizer instances": self.instances}.items():
            if type(size) is not int or size < 1:
                raise MegatronSizeError(f"{name}={size!r}: expected a positive integer")
        if self.instances > 1 and max(self.gtp, self.egtp) > 1:
            raise MegatronStateError(
                f"gtp={self.gtp} and egtp={self.egtp} with {self.instances} distributed optimizer "
                "instances: sharded weights go with one instance; leave one of them at 1"
            )
        for names, what in (("tp pp cp gtp", "model"), ("etp ep pp egtp", "expert model")):
            chosen = [n for n in names.split() if "gtp" not in n or given[n] > 1]
            sizes = {name: given[name] for name in chosen}
            product = math.prod(sizes.values())
            if self.world_size % product:
                equation = " · ".join(f"{name}={size}" for name, size in sizes.items())
                raise MegatronSizeError(
                    f"world_size ({self.world_size}) is not divisible by the {what} parallel size "
                    f"{equation} = {product}; nearest that fit: {_fits(sizes, self.world_size)}"
                )
        dense, expert = self.axes()
        before = [math.prod(list(r.values())[: list(r).index("pp")]) for r in (dense, expert)]
        if self.pp > 1 and before[0] != before[1]:
            raise MegatronStateError(
                f"order={self.order!r}: the pipelines of the dense ranks (every {before[0]}th "
                f"rank) and of the experts (every {before[1]}th) differ; put pp last, or give "
                "sizes with the same product before it"
            )
        if self.pp > 1 and not self.order.endswith("pp") and self.edp != self.dp:
            raise MegatronStateError(
                f"order={self.order!r} does not end in pp, so the data-parallel sizes of dense "
                f"layers ({self.dp}) and experts ({self.edp}) must be equal; put pp last"
            )
        for name, size in (("dp · cp", self.dp * self.cp), ("expert data-parallel", self.edp)):
            if size % self.instances:
                raise MegatronStateError(
                    f"{self.instances} distributed optimizer instances do not divide the {name} "
                    f"size {size}; expected a divisor of it"
                )
        if self.pipeline_backend not in (None, "nccl", "ucc"):
            raise MegatronStateError(
                f"pipeline_model_parallel_comm_backend={self.pipeline_backend!r}; expected None, "
                "nccl or ucc"
            )
        if self.hierarchical and math.prod(self.hierarchical) != self.cp:
            raise MegatronStateError(
                f"hierarchical_context_parallel_sizes={list(self.hierarchical)}: their product is "
                f"{math.prod(self.hierarchical)}, not context_parallel_size={self.cp}; "
                "expected sizes that make it"
            )
        if self.hybrid and self.dp * self.cp % 2:
            raise MegatronStateError(
                "hybrid_context_parallel needs an even number of ranks in dp · cp, not "
                f"{self.dp * self.cp}"
            )

    def axes(self) -> tuple[dict[str, int], dict[str, int]]:
        """Axis to size, fastest first, of the dense and the expert region.

        The axes of sharded weights stand next to tp, and behind ep, unless the order names
        `gtp_remat` itself; those of size 1 are left out.
        """
        sizes = {
            "tp": self.tp, "cp": self.cp, "ep": self.ep, "dp": self.dp, "pp": self.pp,
            "gtp_remat": self.gtp,
        }  # fmt: skip
        placed = self.order.lower().split("-")
        for axis in placed:
            if axis not in sizes or placed.count(axis) > 1:
                axes = [axis for axis in sizes if axis != "gtp_remat"]
                raise MegatronSizeError(
                    f"order={self.order!r}: {axis!r} is no axis, or there twice; expected each of "
                    f"{', '.join(axes)} once, such as {DEFAULT_ORDER}{nearest(axis, axes)}"
                )
        orders = _with_gtp(placed, "tp"), _with_gtp(placed, "ep")
        missing = []
        for axis, size in {**sizes, "dp": max(self.dp, self.edp)}.items():
            if axis not in orders[0]:
                if size != 1:
                    raise MegatronSizeError(
                        f"order={self.order!r}: {axis} is missing, and its size is {size}; "
                        "add it to the order"
                    )
                missing.append(axis)
        for order in orders:
            order += missing
        skipped = ("ep",) if self.gtp > 1 else ("ep", "gtp_remat")
        named = {"gtp_remat": "gtp"}
        dense = {named.get(axis, axis): sizes[axis] for axis in orders[0] if axis not in skipped}
        data = {"edp": self.edp}
        if self.instances > 1:
            data = {"intra_edp": self.edp // self.instances, "inter_edp": self.instances}
        parts: dict[str, dict[str, int]] = {
            "tp": {"etp": self.expert_tp}, "cp": {}, "ep": {"ep": self.ep}, "dp": data,
            "pp": {"pp": self.pp}, "gtp_remat": {"egtp": self.egtp} if self.egtp > 1 else {},
        }  # fmt: skip
        expert = {name: size for axis in orders[1] for name, size in parts[axis].items()}
        return dense, expert

    @property
    def axis_names(self) -> frozenset[str]:
        """The axes of both regions."""
        return frozenset(axis for region in self.axes() for axis in region)

    def spec(
        self, *, share: str = DEFAULT_SHARE, connect: str | Sequence[str] = CONNECT
    ) -> GridSpec:
        """The grid with Megatron's groups.

        Args:
            share, connect: as `commgrid.initialize` takes them.

        Raises:
            SpecError: see `check`; or an NCCL option or group that Megatron does not have.
        """
        self.check()
        dense, expert = self.axes()
        groups = self._groups()
        combinations = self._combinations(groups)
        for name, options in self._options().items():
            groups.setdefault(name, {}).update(options)
        config: dict[str, Any] = {
            "axes": dense,
            "order": "-".join(dense),
            "regions": {"expert": {"axes": expert, "order": "-".join(expert)}},
            "create": combinations,
            "connect": connect,
            "share": share,
            "groups": groups,
        }
        if self.offset is None:
            return GridSpec.from_dict(config).resolve(self.world_size)
        ranks = range(self.offset, self.offset + self.world_size)
        return GridSpec.from_dict(config).resolve(ranks=ranks)

    def _combinations(self, groups: Mapping[str, Any]) -> list[str]:
        """The names to create that are combinations of axes, and no rows of the groups table."""
        rows = {*groups, "intra_dp_cp", "embedding", "position_embedding", *OPTIONAL}
        rows |= {part for row in groups.values() for part in row.get("split", ())}
        axes = self.axis_names
        plain = (group.name_on(axes) for group in MEGATRON_GROUPS)
        wanted = [n for n in plain if n not in rows and not n.endswith("_gloo")]
        return [*dict.fromkeys(wanted)] + ["inter_edp"] * (self.instances > 1)

    def _groups(self) -> dict[str, dict[str, Any]]:
        """The rows of the groups table."""
        rows: dict[str, dict[str, Any]] = {}
        several = self.instances > 1
        if self.all_gather:
            rows["dp_cp_ag"] = {"of": "dp_cp", "own": True}
        if several:
            size = self.dp * self.cp // self.instances
            rows["instances"] = {
                "of": "dp_cp", "split": {"_": self.instances, "intra_dp_cp": size},
            }  # fmt: skip
            rows["edp"] = {"of": "inter_edp_intra_edp"}
            rows["intra_dist_opt"] = {"of": "pp_intra_edp_ep_etp"}
        else:
            rows["intra_dp_cp"] = {"of": "dp_cp"}
            rows["intra_edp"] = {"of": "edp"}
            whole = "pp_edp_egtp_ep_etp" if self.egtp > 1 else "pp_edp_ep_etp"
            rows["intra_dist_opt"] = {"of": whole}
        rows |= self._gloo_rows()
        for axis, size, of in (("gtp", self.gtp, "tp"), ("egtp", self.egtp, "etp")):
            if size == 1:  # a group of one rank, as all of Megatron's that have nothing to do
                rest = self.tp if of == "tp" else self.expert_tp
                rows[f"{axis}_of_{of}"] = {"of": of, "split": {"_": rest, axis: 1}}
        both_ends = (0, self.pp - 1) if self.pp > 1 else (0,)
        embedding = both_ends if self.embedding is None else self.embedding
        picks = {"embedding": embedding, "position_embedding": self.position_embedding}
        rows |= {name: {"of": "pp", "pick": list(pick)} for name, pick in picks.items() if pick}
        if self.hierarchical:
            levels = {hierarchical_name(i): size for i, size in enumerate(self.hierarchical)}
            rows["hcp"] = {"of": "cp", "split": dict(reversed(levels.items()))}
        return rows | (self._hybrid_rows() if self.hybrid else {})

    def _gloo_rows(self) -> dict[str, dict[str, Any]]:
        """The twins over gloo; Megatron has none of groups that sharded weights cut smaller."""
        several = ["intra_dp_cp", "intra_edp"] if self.instances > 1 else []
        twins = [name for name in ("dp_cp", "dp", "edp", *several) if self.gloo and self.gtp == 1]
        twins = [name for name in twins if name != "edp" or self.egtp == 1]
        rows: dict[str, dict[str, Any]] = {
            f"{name}_gloo": {"of": name, "own": True, "backend": "gloo"} for name in twins
        }
        if not several:
            rows |= {
                f"intra_{name}_gloo": {"of": f"{name}_gloo"}
                for name in ("dp_cp", "edp") if name in twins
            }  # fmt: skip
        return rows

    def _hybrid_rows(self) -> dict[str, dict[str, Any]]:
        """A group of every power of two below dp · cp: blocks of that many neighbours.

        Ranks in the rest that a size leaves have no group of that size. (Megatron stores the
        smaller group of the rest under the size it does not have.)
        """
        whole = self.dp * self.cp
        rows: dict[str, dict[str, Any]] = {}
        size = 2
        while 2 * size <= whole:
            if whole % size == 0:
                parts = {"_": whole // size, hybrid_name(size): size}
                rows[f"hybrid_{size}_of_dp_cp"] = {"of": "dp_cp", "split": parts}
            else:
                for block in range(whole // size):
                    positions = list(range(block * size, (block + 1) * size))
                    rows[hybrid_name(size, block)] = {"of": "dp_cp", "pick": positions}
            size *= 2
        return rows

    def _options(self) -> dict[str, dict[str, Any]]:
        """Rows that set options: the pipeline's backend, and NCCL's options."""
        axes = self.axis_names
        known = {group.options: group.name_on(axes) for group in MEGATRON_GROUPS if group.options}
        known["hcp"] = "hcp"
        rows: dict[str, dict[str, Any]] = {}
        groups = self._groups()
        exist = {*groups, *self._combinations(groups)}
        # Keys of groups that are others' communicators here say nothing.
        idle = {
            group.options for group in MEGATRON_GROUPS
            if group.without_gtp is not None and group.name_on(axes) != group.name
        }  # fmt: skip
        if self.instances == 1:  # then these are other names of others' communicators
            exist -= {"intra_dp_cp", "intra_edp", "intra_dist_opt"}
        for key, options in self.nccl.items():
            if key not in known:
                raise SpecError(
                    f"NCCL options for {key!r}: Megatron has no such group, expected some of "
                    f"{', '.join(known)}{nearest(str(key), known)}"
                )
            for option in options:
                if option not in (*NCCL_KEYS, SHARP):
                    raise SpecError(
                        f"NCCL options for {key!r}: unknown option {option!r}, expected some of "
                        f"{', '.join(NCCL_KEYS)}{nearest(str(option), NCCL_KEYS)}"
                    )
            net = str(options.get("net_name", "IB"))
            if net.lower() not in ("ib", "socket"):
                raise MegatronSizeError(
                    f"NCCL options for {key!r}: net_name={net!r}; expected IB or socket"
                )
            name = known[key]
            if key in idle:
                continue
            if name == "intra_dp_cp" and self.instances > 1:
                name = "instances"
            if name in exist:
                rows.setdefault(name, {})["nccl"] = dict(options)
        if self.pipeline_backend is not None:
            rows.setdefault("pp", {})["backend"] = self.pipeline_backend
            for name in {"embedding", "position_embedding"} & groups.keys():
                rows.setdefault(name, {})["backend"] = self.backend
        return rows


def _with_gtp(placed: Sequence[str], after: str) -> list[str]:
    """An order with the axis of sharded weights behind another; behind tp where that is missing."""
    found = list(placed)
    if "gtp_remat" not in found:
        anchor = after if after in found else "tp"
        found.insert(found.index(anchor) + 1 if anchor in found else 0, "gtp_remat")
    return found


def _fits(sizes: Mapping[str, int], world: int) -> str:
    """For each size the nearest ones with which the product divides the world."""
    product = math.prod(sizes.values())
    found = []
    for name, size in sizes.items():
        rest = product // size
        good = [one for one in range(1, world // rest + 1) if world % (rest * one) == 0]
        nearest_two = [
            *[one for one in good if one < size][-1:],
            *[g for g in good if g > size][:1],
        ]
        found += [f"{name}={one}" for one in nearest_two]
    return ", ".join([*found, f"a multiple of {product} ranks"])


def read_nccl_config(
    path: str | None, high_priority_stream_groups: Sequence[str] | None
) -> dict[str, dict[str, Any]]:
    """Megatron's NCCL options, of its configuration file and of its list of groups.

    Raises:
        SpecError: the file is not there or no mapping of mappings.
    """
    try:
        given = load_yaml(Path(path)) if path is not None else {}
    except SpecError as error:
        raise SpecError(f"nccl_communicator_config_path={path}: {error}") from error
    for key, options in given.items():
        if not isinstance(options, Mapping):
            raise SpecError(f"{path}: {key}: {options!r}: expected a mapping of NCCL options")
    options = {key: dict(value) for key, value in given.items()}
    for name in high_priority_stream_groups or ():
        options.setdefault(name, {})["is_high_priority_stream"] = True
    return options
