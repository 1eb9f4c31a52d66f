"""The zoo: grids by name, with the axes, order and group names that other systems give them.

A preset is the mapping that a YAML file holds, with one size open, so that it fits any number of
ranks; sizes are laid over it, and it prints as YAML to start one's own from.

    commgrid.initialize(preset="hsdp", dp_shard=8)
    commgrid plan --preset megatron --tp 8 --pp 4 --ep 8 --world-size 1024
    commgrid presets hsdp > grid.yaml
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from commgrid.errors import SpecError
from commgrid.planning.names import nearest
from commgrid.planning.yaml_io import changed


@dataclass(frozen=True)
class Preset:
    """A grid that others use.

    Args:
        name: what it is called.
        summary: what it is for, in a line.
        source: whose order and names these are, and where they say so.
        config: as a YAML file holds it, one size open.
        drops_ones: the axes that have groups even at size 1; others of size 1 have none, and no
            combination has, as in the system. None: all have.
    """

    name: str
    summary: str
    source: str
    config: Mapping[str, Any]
    drops_ones: tuple[str, ...] | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that sizes may be given for, of all regions."""
        found = list(self.config["axes"])
        for region in self.config.get("regions", {}).values():
            found += [name for name in region["axes"] if name not in found]
        return tuple(found)

    def with_sizes(
        self, sizes: Mapping[str, Any], changes: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The mapping for `GridSpec.from_dict`, some of its sizes others.

        Args:
            sizes: by axis.
            changes: other values by key, as `{"axes.tp": 2}`.

        Raises:
            SpecError: a size of an axis that it does not have.

        Example:
            >>> PRESETS["hsdp"].with_sizes({"dp_shard": 4})["axes"]
            {'dp_shard': 4, 'dp_replicate': -1}
        """
        made: dict[str, Any] = copy.deepcopy(dict(self.config))
        regions = [made, *made.get("regions", {}).values()]
        for name, size in sizes.items():
            # An axis of two regions is written in the first, to which the other refers.
            region = next((one for one in regions if name in one["axes"]), None)
            if region is None:
                raise SpecError(
                    f"{name}={size}: preset {self.name!r} has no such axis, but "
                    f"{', '.join(self.axes)}{nearest(name, self.axes)}; for further ones start "
                    f"from its YAML: commgrid presets {self.name}"
                )
            region["axes"][name] = size
        made = changed(made, changes or {})
        axes = {axis for region in regions for axis in region["axes"]} | made["axes"].keys()
        if set(made.get("groups", {})) & axes:  # a group gives way to an axis of its name
            made["groups"] = {n: row for n, row in made["groups"].items() if n not in axes}
        if self.drops_ones is not None and "create" not in (changes or {}):
            made["create"] = [
                name for name, n in made["axes"].items() if n != 1 or name in self.drops_ones
            ]
        return made


def _preset(
    name: str, summary: str, source: str, drops_ones: tuple[str, ...] | None = None, **config: Any
) -> Preset:
    return Preset(name, summary, source, MappingProxyType(config), drops_ones)


_TORCH = "torch: init_device_mesh"

_ALL = (
    _preset(
        "ddp", "copies of the model, which average their gradients",
        f"{_TORCH}((n,), ('dp',)), DistributedDataParallel",
        axes={"dp": -1}, order="dp",
    ),
    _preset(
        "fsdp", "the model in shards over all ranks",
        f"{_TORCH}((n,), ('fsdp',)), fully_shard",
        axes={"dp_shard": -1}, order="dp_shard", groups={"fsdp": "dp_shard"},
    ),
    _preset(
        "hsdp", "shards within a node, copies across",
        f"{_TORCH}((n / 8, 8), ('dp_replicate', 'dp_shard')), fully_shard",
        axes={"dp_shard": 8, "dp_replicate": -1}, order="dp_shard-dp_replicate",
    ),
    _preset(
        "tp", "layers cut within a node, copies across",
        f"{_TORCH}((n / 8, 8), ('dp', 'tp')), parallelize_module",
        axes={"tp": 8, "dp": -1}, order="tp-dp",
    ),
    _preset(
        "tp_sp", "tp, with the activations between cut along the sequence over the same ranks",
        "Megatron-LM, --sequence-parallel (arXiv 2205.05198)",
        axes={"tp": 8, "dp": -1}, order="tp-dp", groups={"sp": "tp"},
    ),
    _preset(
        "ulysses", "sequences within a node, which exchange heads; weights in shards over all",
        "DeepSpeed-Ulysses (arXiv 2309.14509): initialize_mesh_device((dp, sp), …)",
        axes={"cp": 8, "dp": -1}, order="cp-dp", groups={"sp": "cp", "fsdp": "dp_cp"},
    ),
    _preset(
        "cp", "sequences cut within a node; weights in shards over all",
        f"{_TORCH}((n / 8, 8), ('dp', 'cp')), context_parallel",
        axes={"cp": 8, "dp": -1}, order="cp-dp", groups={"fsdp": "dp_cp"},
    ),
    _preset(
        "dp_cp_tp", "layers and sequences cut, weights in shards over dp and cp",
        f"{_TORCH}((dp, cp, tp), ('dp', 'cp', 'tp'))",
        axes={"tp": 8, "cp": 2, "dp": -1}, order="tp-cp-dp", groups={"fsdp": "dp_cp"},
    ),
    _preset(
        "pp", "stages far apart, copies of a stage next to each other",
        "Megatron-core's default order, tp-cp-ep-dp-pp",
        axes={"pp": 4, "dp": -1}, order="dp-pp",
    ),
    _preset(
        "pp_dp", "stages next to each other, copies of a stage far apart",
        "Megatron-core's --use-tp-pp-dp-mapping, tp-cp-ep-pp-dp",
        axes={"pp": 4, "dp": -1}, order="pp-dp",
    ),
    _preset(
        "megatron", "tp, cp, dp, pp, and experts over ranks of tp, cp and dp",
        "Megatron-core: parallel_state.initialize_model_parallel",
        axes={"tp": 1, "cp": 1, "dp": -1, "pp": 1}, order="tp-cp-dp-pp",
        regions={"expert": {
            "axes": {"etp": "tp", "ep": 1, "edp": -1, "pp": "pp"}, "order": "etp-ep-edp-pp",
        }},
    ),
    _preset(
        "torchtitan", "HSDP with tp, cp and pp, and experts over ranks of tp, cp and dp_shard",
        "torchtitan 0.3: distributed/parallel_dims.py",
        axes={"tp": 1, "cp": 1, "dp_shard": -1, "dp_replicate": 1, "pp": 1},
        order="tp-cp-dp_shard-dp_replicate-pp",
        regions={"expert": {
            "axes": {"ep": 1, "efsdp": -1, "dp_replicate": "dp_replicate", "pp": "pp"},
            "order": "ep-efsdp-dp_replicate-pp",
        }},
        groups={"batch": "dp", "fsdp": "dp_shard_cp", "loss": "dp_cp"},
    ),
    _preset(
        "transformers", "HSDP with tp and cp, as Trainer and Accelerate have it",
        "Accelerate: parallelism_config.py",
        axes={"tp": 1, "cp": 1, "dp_shard": -1, "dp_replicate": 1},
        order="tp-cp-dp_shard-dp_replicate",
    ),
    _preset(
        "kempnerforge", "HSDP with tp and pp in one order; axes of size 1 have no group",
        "KempnerForge: distributed/setup.py",
        drops_ones=("dp_shard",),
        axes={"tp": 1, "dp_shard": -1, "dp_replicate": 1, "pp": 1},
        order="tp-dp_shard-dp_replicate-pp",
    ),
    _preset(
        "deepspeed", "pipe, data and model, as its pipelines have them",
        "DeepSpeed: runtime/pipe/topology.py, PipeModelDataParallelTopology",
        axes={"tp": 1, "dp": -1, "pp": 1}, order="tp-dp-pp",
        groups={"model": "tp", "data": "dp", "pipe": "pp", "ds_model": "pp_tp"},
    ),
    _preset(
        "nanotron", "tp, cp, dp, pp",
        "nanotron: parallel/context.py",
        axes={"tp": 1, "cp": 1, "dp": -1, "pp": 1}, order="tp-cp-dp-pp",
        groups={"mp": "pp_tp", "tp_and_cp": "cp_tp"},
    ),
    _preset(
        "nanotron_moe", "tp, cp, pp, dp, and experts cut on their own",
        "nanotron: parallel/context.py, with MoE; its ep_tp, ep_pp, ep_dp are etp, epp, edp",
        axes={"tp": 1, "cp": 1, "pp": 1, "dp": -1}, order="tp-cp-pp-dp",
        regions={"expert": {
            "axes": {"etp": 1, "ep": 1, "epp": "pp", "edp": -1}, "order": "etp-ep-epp-edp",
        }},
    ),
)  # fmt: skip

PRESETS: Mapping[str, Preset] = MappingProxyType({preset.name: preset for preset in _ALL})
"""All of them, by name."""


def find_preset(name: str) -> Preset:
    """The preset of a name.

    Raises:
        SpecError: there is none.
    """
    if not isinstance(name, str) or name not in PRESETS:
        raise SpecError(
            f"preset={name!r}: expected one of {', '.join(PRESETS)}{nearest(str(name), PRESETS)}"
        )
    return PRESETS[name]
