"""Megatron's sizes for a grid that was described in another way."""

from __future__ import annotations

from dataclasses import replace

from commgrid.errors import SpecError
from commgrid.planning.spec import GridSpec
from megatron_adapter.names import hierarchical_name, hybrid_name
from megatron_adapter.spec import MegatronSizes


def sizes_of(spec: GridSpec, world_size: int) -> MegatronSizes:
    """What Megatron would be told for a grid that was described elsewhere.

    Raises:
        SpecError: the grid has axes or a region that Megatron has no words for.
    """
    dense, *others = spec.regions
    shape = spec.shape
    wrong = [axis for axis in dense.axes if axis not in ("tp", "gtp", "cp", "dp", "pp")]
    expert = [r for r in others if r.name == "expert"]
    for region in others:
        data = {*region.axes} - {"etp", "ep", "egtp", "pp"}
        plain = {"etp", "ep", "pp"} <= {*region.axes} and (
            data in ({"edp"}, {"intra_edp", "inter_edp"})
        )
        wrong += [] if region.name == "expert" and plain else [f"region {region.name}"]
    if wrong or not {"tp", "pp"} <= {*dense.axes}:
        raise SpecError(
            f"Megatron cannot express a grid with {', '.join(wrong) or 'these axes'}; it has tp, "
            "gtp, cp, dp and pp, and a region `expert` with etp, ep, egtp, edp and pp"
        )
    placed = ["gtp_remat" if axis == "gtp" else axis for axis in dense.axes]
    if expert:
        axes = list(expert[0].axes)
        follower = {"edp": "dp", "intra_edp": "dp", "inter_edp": "dp", "etp": "tp", "pp": "pp"}
        after = (a for a in axes[axes.index("ep") + 1 :] if a in follower and shape[a] > 1)
        place = next((placed.index(follower[axis]) for axis in after), len(placed))
        placed.insert(place, "ep")
    else:
        placed.insert(placed.index("dp"), "ep")
    levels: list[int] = []
    while hierarchical_name(len(levels)) in spec.definitions:
        definition = spec.definitions[hierarchical_name(len(levels))]
        levels.append(definition.size(shape))
    sizes = MegatronSizes(
        world_size=world_size,
        tp=shape["tp"], pp=shape["pp"], cp=shape.get("cp", 1), ep=shape.get("ep", 1),
        etp=shape.get("etp", shape["tp"]), instances=shape.get("inter_edp", 1),
        order="-".join(axis for axis in placed if axis != "gtp_remat"), hierarchical=tuple(levels),
        hybrid=not spec.definitions.keys().isdisjoint((hybrid_name(2), hybrid_name(2, 0))),
        all_gather="dp_cp_ag" in spec.definitions,
        gtp=shape.get("gtp", 1), egtp=shape.get("egtp", 1),
    )  # fmt: skip
    wrong_order = _other_order(spec, sizes)
    if wrong_order is not None and "gtp_remat" in placed:  # its place may be one of both regions
        sizes = replace(sizes, order="-".join(placed))
        wrong_order = _other_order(spec, sizes)
    if wrong_order is not None:
        raise SpecError(wrong_order)
    return sizes


def _other_order(spec: GridSpec, sizes: MegatronSizes) -> str | None:
    """The error for a grid whose regions are not in Megatron's single order."""
    for mine, theirs in zip(spec.regions, sizes.spec().regions, strict=False):
        layouts = [[one for one in region.numbers if one[1] > 1] for region in (mine, theirs)]
        if layouts[0] != layouts[1]:
            orders = ["-".join(axis for axis, _ in layout) for layout in layouts]
            return (
                f"Megatron cannot express region {mine.name!r} in the order {orders[0]}; both its "
                f"regions have one order, in which this one is {orders[1]}"
            )
    return None
