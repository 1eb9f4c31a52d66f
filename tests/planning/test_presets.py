"""Presets beside their own systems: torch's meshes, Megatron's ranks, torchtitan's file,
and the arrays that the others reshape. Groups are compared as sets of ranks, over all ranks."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
import types
import zipfile
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import commgrid
from commgrid import GridSpec, SpecError
from commgrid.cli import main
from commgrid.planning.group import find_name
from commgrid.planning.plan import GroupPlan
from commgrid.planning.presets import PRESETS
from commgrid.testing import run_on_ranks

Groups = set[tuple[int, ...]]


def ours(spec: GridSpec, name: str) -> Groups:
    """All groups of a name."""
    name = find_name(name, spec.definitions, spec.words) or name
    plans = (GroupPlan.for_rank(spec, rank) for rank in range(spec.world_size))
    return {tuple(sorted(plan.groups[name])) for plan in plans}


def as_groups(rows: Iterable[Iterable[int]]) -> Groups:
    return {tuple(sorted(int(rank) for rank in row)) for row in rows}


def of_array(sizes: Mapping[str, int], names: Iterable[str]) -> Groups:
    """Groups over some axes of ranks that lie in an array, the last axis fastest."""
    axes, kept = list(sizes), set(names)
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(product(*map(range, sizes.values()))):
        key = tuple(at for axis, at in zip(axes, place, strict=True) if axis not in kept)
        found.setdefault(key, []).append(rank)
    return as_groups(found.values())


# -- torch ----------------------------------------------------------------------------------

MESHES: dict[str, tuple[dict[str, int], dict[str, int], dict[str, tuple[str, ...]]]] = {
    # sizes for us, the mesh slowest first, and our names of its axes and flattened axes
    "ddp": ({}, {"dp": 16}, {"dp": ("dp",)}),
    "fsdp": ({}, {"fsdp": 16}, {"fsdp": ("fsdp",), "dp_shard": ("fsdp",)}),
    "hsdp": (
        {"dp_shard": 4}, {"dp_replicate": 4, "dp_shard": 4},
        {"dp_replicate": ("dp_replicate",), "dp_shard": ("dp_shard",),
         "dp": ("dp_replicate", "dp_shard")},
    ),
    "tp": ({"tp": 4}, {"dp": 4, "tp": 4}, {"dp": ("dp",), "tp": ("tp",)}),
    "tp_sp": ({"tp": 4}, {"dp": 4, "tp": 4}, {"dp": ("dp",), "tp": ("tp",), "sp": ("tp",)}),
    "ulysses": (
        {"cp": 4}, {"dp": 4, "sp": 4}, {"dp": ("dp",), "sp": ("sp",), "fsdp": ("dp", "sp")},
    ),
    "cp": ({"cp": 4}, {"dp": 4, "cp": 4}, {"dp": ("dp",), "cp": ("cp",), "fsdp": ("dp", "cp")}),
    "dp_cp_tp": (
        {"tp": 2, "cp": 2}, {"dp": 4, "cp": 2, "tp": 2},
        {"dp": ("dp",), "cp": ("cp",), "tp": ("tp",), "fsdp": ("dp", "cp")},
    ),
    "pp": ({"pp": 4}, {"pp": 4, "dp": 4}, {"pp": ("pp",), "dp": ("dp",)}),
    "pp_dp": ({"pp": 4}, {"dp": 4, "pp": 4}, {"pp": ("pp",), "dp": ("dp",)}),
    "transformers": (
        {"tp": 2, "cp": 2, "dp_replicate": 2},
        {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2},
        {"tp": ("tp",), "cp": ("cp",), "dp_shard": ("dp_shard",), "dp_replicate": ("dp_replicate",),
         "dp": ("dp_replicate", "dp_shard"), "dp_shard_cp": ("dp_shard", "cp"),
         "dp_cp": ("dp_replicate", "dp_shard", "cp")},
    ),
    "kempnerforge": (
        {"tp": 2, "pp": 2, "dp_replicate": 2},
        {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "tp": 2},
        {"tp": ("tp",), "pp": ("pp",), "dp_shard": ("dp_shard",),
         "dp_replicate": ("dp_replicate",)},
    ),
}  # fmt: skip


def of_meshes() -> dict[str, dict[str, Groups]]:
    """Groups of each mesh's axes and flattened axes, by our names."""
    found: dict[str, dict[str, Groups]] = {}
    for rank in range(16):
        dist.init_process_group("fake", rank=rank, world_size=16, store=dist.HashStore())
        for preset, (_, sizes, names) in MESHES.items():
            mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
            for name, axes in names.items():
                part: DeviceMesh = mesh[axes if len(axes) > 1 else axes[0]]
                part = part._flatten(f"{name}_") if len(axes) > 1 else part
                ranks = dist.get_process_group_ranks(part.get_group())
                found.setdefault(preset, {}).setdefault(name, set()).add(tuple(sorted(ranks)))
        dist.destroy_process_group()
    return found


def test_groups_are_those_of_torchs_meshes() -> None:
    theirs = run_on_ranks(of_meshes, 1, backend=None)[0]
    for preset, (sizes, _, names) in MESHES.items():
        spec = GridSpec.from_preset(preset, **sizes).resolve(16)
        for name in names:
            assert ours(spec, name) == theirs[preset][name], (preset, name)


# -- Megatron, DeepSpeed, nanotron, torchtitan ------------------------------------------------


@pytest.mark.parametrize(("tp", "cp", "pp", "ep", "etp"), [(2, 2, 2, 4, 1), (4, 1, 2, 2, 2)])
def test_megatrons_ranks(tp: int, cp: int, pp: int, ep: int, etp: int) -> None:
    from tests.peers import RankGenerator

    order, dp = "tp-cp-ep-dp-pp", 32 // (tp * cp * pp)
    spec = GridSpec.from_preset("megatron", tp=tp, cp=cp, pp=pp, ep=ep, etp=etp).resolve(32)
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    for name in ("tp", "cp", "dp", "pp", "dp-cp", "tp-pp", "tp-cp", "tp-dp-cp"):
        assert ours(spec, name.replace("-", "_")) == as_groups(dense.get_ranks(name)), name
    edp = 32 // (etp * ep * pp)
    expert = RankGenerator(tp=etp, ep=ep, dp=edp, pp=pp, cp=1, order=order)
    for name, theirs in (("etp", "tp"), ("ep", "ep"), ("edp", "dp"), ("ep_etp", "tp-ep")):
        assert ours(spec, name) == as_groups(expert.get_ranks(theirs)), name


def test_deepspeeds_topology() -> None:
    """`PipeModelDataParallelTopology` lays ranks out as pipe, data, model, the last fastest."""
    spec = GridSpec.from_preset("deepspeed", tp=2, pp=4).resolve(16)
    sizes = {"pipe": 4, "data": 2, "model": 2}
    for name, axes in (
        ("pipe", ["pipe"]), ("data", ["data"]), ("model", ["model"]), ("tp", ["model"]),
        ("ds_model", ["pipe", "model"]),
    ):  # fmt: skip
        assert ours(spec, name) == of_array(sizes, axes), name


def test_nanotrons_arrays() -> None:
    spec = GridSpec.from_preset("nanotron", tp=2, cp=2, pp=2).resolve(16)
    sizes = {"ep": 1, "pp": 2, "dp": 2, "cp": 2, "tp": 2}
    for name, axes in (
        ("tp", ["tp"]), ("cp", ["cp"]), ("dp", ["dp"]), ("pp", ["pp"]), ("mp", ["pp", "tp"]),
        ("tp_and_cp", ["cp", "tp"]),
    ):  # fmt: skip
        assert ours(spec, name) == of_array(sizes, axes), name
    spec = GridSpec.from_preset("nanotron_moe", tp=2, cp=1, pp=2, ep=4, etp=1).resolve(16)
    for name in ("tp", "pp", "dp"):
        assert ours(spec, name) == of_array({"dp": 4, "pp": 2, "cp": 1, "tp": 2}, [name]), name
    for name in ("etp", "ep", "epp", "edp"):
        sizes = {"edp": 2, "epp": 2, "ep": 4, "etp": 1}
        assert ours(spec, name) == of_array(sizes, [name]), name


def of_torchtitan(path: str, sizes: dict[str, int]) -> dict[str, Groups]:
    """Its own ParallelDims; what its file imports beside torch has no part in ranks."""
    stand_ins: dict[str, dict[str, Any]] = {
        "spmd_types": {},
        "torchtitan": {},
        "torchtitan.config": {},
        "torchtitan.config.configs": {"ParallelismConfig": object},
        "torchtitan.tools": {},
        "torchtitan.tools.logging": {"logger": logging.getLogger("torchtitan")},
        "torchtitan.tools.utils": {"device_type": "cpu"},
    }
    for name, attributes in stand_ins.items():
        module = types.ModuleType(name)
        module.__dict__.update(attributes)
        sys.modules[name] = module
    spec = importlib.util.spec_from_file_location("parallel_dims", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["parallel_dims"] = module
    spec.loader.exec_module(module)
    found: dict[str, Groups] = {}
    for rank in range(16):
        dist.init_process_group("fake", rank=rank, world_size=16, store=dist.HashStore())
        for backend, names in (
            ("partial_dtensor", ("fsdp", "batch", "loss", "cp", "tp", "pp", "ep", "efsdp")),
            ("full_dtensor", ("dp_shard", "dp_replicate")),
        ):
            dims = module.ParallelDims(**sizes, world_size=16, spmd_backend=backend)
            dims.build_mesh()
            for name in names:
                group = dims._single_axis_meshes[name].mesh.flatten().tolist()
                found.setdefault(name, set()).add(tuple(sorted(group)))
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize(
    "sizes",
    [
        {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2, "pp": 1, "ep": 4},
        {"dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 2, "pp": 2, "ep": 2},
    ],
    ids=str,
)
def test_torchtitans_own_parallel_dims(sizes: dict[str, int], tmp_path: Path) -> None:
    try:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", tmp_path,
             "torchtitan==0.3.0"],
            check=True, timeout=300, capture_output=True,
        )  # fmt: skip
    except subprocess.SubprocessError as error:
        pytest.skip(f"needs a download of torchtitan 0.3.0, which failed: {error}")
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        file = packed.extract("torchtitan/distributed/parallel_dims.py", tmp_path)
    theirs = run_on_ranks(of_torchtitan, 1, file, sizes, backend=None)[0]
    spec = GridSpec.from_preset("torchtitan", **sizes).resolve(16)
    assert set(theirs) == {
        "fsdp", "batch", "loss", "cp", "tp", "pp", "ep", "efsdp", "dp_shard", "dp_replicate",
    }  # fmt: skip
    for name, groups in theirs.items():
        assert ours(spec, name) == groups, name


# -- as a user has them ---------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_prints_as_the_yaml_of_the_same_grid(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["presets", name]) == 0
    path = tmp_path / "grid.yaml"
    path.write_text(capsys.readouterr().out)
    assert GridSpec.from_yaml(path).resolve(64) == GridSpec.from_preset(name).resolve(64)
    assert main(["plan", "--preset", name, "--world-size", "64"]) == 0
    assert main(["plan", str(path), "--world-size", "64"]) == 0
    planned = capsys.readouterr().out
    assert planned[: len(planned) // 2] == planned[len(planned) // 2 :]


def test_kempnerforges_axes_of_size_1_have_no_group_but_dp_shard() -> None:
    spec = GridSpec.from_preset("kempnerforge", tp=4, dp_shard=1, dp_replicate=-1).resolve(8)
    assert set(spec.created_names) == {"tp", "dp_shard", "dp_replicate"}


def on_a_preset() -> None:
    grid = commgrid.initialize(preset="hsdp", dp_shard=2, groups={"fsdp": "dp_shard"})
    assert grid.size("dp_shard") == 2
    assert grid.size("dp_replicate") == 2
    assert grid.get_group("fsdp") is grid.get_group("dp_shard")
    commgrid.destroy()
    grid = commgrid.initialize(preset="deepspeed", tp=2, share="region")
    assert grid.get_ranks("model") == grid.get_ranks("tp")
    assert grid.spec.share == "region"
    commgrid.shutdown()


def test_a_grid_is_started_from_a_preset() -> None:
    run_on_ranks(on_a_preset, 4, backend=None, launcher="torchrun")


def test_values_of_a_file_are_changed_without_copying_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text("axes: {tp: 8, dp: -1}\ngroups: {dp: {timeout: 60}}\n")
    given = [
        "plan", str(path), "--world-size", "16", "--json", "--set", "axes.tp=2", "--set",
        "groups.dp.nccl.max_ctas=4", "--set", "create=[tp, dp]",
    ]  # fmt: skip
    assert main(given) == 0
    out = capsys.readouterr().out
    assert '"max_ctas": 4' in out
    assert '"timeout": 60' in out
    wanted = GridSpec.from_dict({
        "axes": {"tp": 2, "dp": -1}, "create": ["tp", "dp"],
        "groups": {"dp": {"timeout": 60, "nccl": {"max_ctas": 4}}},
    })  # fmt: skip
    changes = {"axes.tp": 2, "create": ["tp", "dp"], "groups.dp.nccl.max_ctas": 4}
    assert GridSpec.from_yaml(path, changes=changes) == wanted


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--preset", "hsp"], "did you mean 'hsdp'?"),
        (["--preset", "hsdp", "--tp", "2"], "preset 'hsdp' has no such axis"),
        (["--preset", "tp", "--set", "axes.tp=x"], "preset 'tp': axes.tp='x'"),
        (["--preset", "tp", "--set", "axes.tp.x=2"], "axes.tp is 8, which has no keys"),
        (["--preset", "tp", "--set", "axes.tp"], "expected KEY=VALUE"),
        (["--preset", "tp", "--set", "axes={"], "the value is not plain YAML"),
        (["--preset", "tp", "grid.yaml"], "--preset tp beside grid.yaml"),
        (["--tp", "2", "--set", "axes.tp=4"], "--tp beside --set axes.tp: give one of them"),
        (["--preset", "hsdp", "--world-size", "12"], "dp_shard=8"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--world-size", "16", *given]) == 2
    assert said in capsys.readouterr().err


def test_a_preset_beside_a_config() -> None:
    with pytest.raises(SpecError, match="preset='tp' beside config=: give one of them"):
        commgrid.initialize(preset="tp", config={"axes": {"dp": -1}})


def test_an_axis_of_another_region_is_no_dp_there() -> None:
    """dp_replicate of an expert region got a dp_shard beside it, of size -1."""
    spec = GridSpec.from_preset("torchtitan", dp_replicate=2, ep=2).resolve(8)
    assert [axis for axis, _ in spec.regions[1].sizes] == ["ep", "efsdp", "dp_replicate", "pp"]
