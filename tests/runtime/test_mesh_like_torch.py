"""A grid's mesh beside the one that torch makes itself: method by method, on the same eight ranks.

Each call of CALLS is made on both, in one order, since flattening changes what later calls find.
What torch's mesh answers, the grid's answers too; where torch's raises, the grid's raises the same,
but for names that the grid has and torch's mesh does not.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, checkpoint, device_mesh
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    empty,
    zeros,
)
from torch.testing._internal.distributed import fake_pg  # noqa: F401 -- the backend "fake"

import commgrid
from commgrid.testing import run_on_ranks
from tests.sizes import some

MESHES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "one dim": ({}, ("dp",)),
    "two": ({"tp": 2}, ("dp", "tp")),
    "tp slowest": ({"tp": 2, "order": "dp-tp"}, ("tp", "dp")),
    "three": ({"tp": 2, "cp": 2}, ("dp", "cp", "tp")),
    "three, other names": (
        {"dp": 1, "y": 2, "rows": 2, "x": 2, "order": "y-rows-x"}, ("x", "rows", "y"),
    ),
    "with one of size 1": ({"tp": 4}, ("pp", "dp", "tp")),
    "transposed": ({"tp": 2}, ("tp", "dp")),
    "transposed, three": ({"tp": 2, "cp": 2}, ("cp", "tp", "dp")),
}  # fmt: skip


def pair(given: dict[str, Any], names: tuple[str, ...]) -> tuple[DeviceMesh, DeviceMesh]:
    """The mesh of a new grid, and torch's over the same ranks in the same places."""
    grid = commgrid.initialize(**given)
    slowest = [axis for axis in reversed(grid.spec.regions[0].axes) if axis in names]
    ranks = torch.arange(8).view([grid.shape[axis] for axis in slowest])
    ranks = ranks.permute([slowest.index(axis) for axis in names])
    if tuple(slowest) == names:
        return grid.device_mesh(*names), init_device_mesh(
            "cpu", tuple(ranks.shape), mesh_dim_names=names
        )
    # torch gives a dim that is the whole world WORLD's order; these have rising groups.
    return grid.device_mesh(*names), DeviceMesh("cpu", ranks, mesh_dim_names=names)


def plain(value: Any) -> Any:
    """What two meshes' answers can be compared by."""
    if isinstance(value, DeviceMesh):
        return {
            "said": repr(value), "names": value.mesh_dim_names, "ranks": value.mesh.tolist(),
            "coordinate": value.get_coordinate(), "root": repr(value._get_root_mesh()),
            "groups": plain(value.get_all_groups()),
            "local": [value.get_local_rank(i) for i in range(value.ndim)],
        }  # fmt: skip
    if isinstance(value, ProcessGroup):
        return dist.get_process_group_ranks(value)
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


def pickled(mesh: DeviceMesh) -> DeviceMesh:
    return pickle.loads(pickle.dumps(mesh))  # type: ignore[no-any-return]


def current(mesh: DeviceMesh) -> Any:
    with mesh as inside:
        found = _mesh_resources.get_current_mesh()
        held = zeros(8, placements=[Replicate()] * mesh.ndim)  # of the mesh that it is within
        return inside is mesh, found is mesh, held.device_mesh == mesh


def refuses(mesh: DeviceMesh) -> Any:
    """A name that was flattened to is taken, for anything but the same."""
    first, *others = mesh.mesh_dim_names or ()
    mesh._flatten("taken")
    return mesh[first]._flatten("taken") if others else mesh[first]._flatten(first)


def calls(names: tuple[str, ...]) -> dict[str, Callable[[DeviceMesh], Any]]:
    """What is asked of a mesh, in order."""
    first, last = names[0], names[-1]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    asked: dict[str, Callable[[DeviceMesh], Any]] = {
        "repr": repr,
        "itself": lambda m: m,
        "sizes": lambda m: [m.size(), m.shape, m.ndim, *(m.size(i) for i in range(m.ndim))],
        "device": lambda m: m.device_type,
        "rank": lambda m: (m.get_rank(), m.get_coordinate(), m._is_current_rank_part_of_mesh()),
        "own root": lambda m: m._get_root_mesh() is m,
        "equal": lambda m: (m == m[names], hash(m) == hash(m[names]), m != m[first]),
        "group, no dim": lambda m: m.get_group(),
        "local rank, no dim": lambda m: m.get_local_rank(),
        "group of none": lambda m: m.get_group("none"),
        "none": lambda m: m["none"],
        "both, backwards": lambda m: m[last, first],
        "twice": lambda m: m[first, first],
        "pickled": pickled,
        "pickled slice": lambda m: pickled(m[first]),
        "copied": copy.deepcopy,
        "context": current,
        "submeshes": lambda m: [s.mesh for s in m._get_all_submeshes(last)],
        "from_group": lambda m: DeviceMesh.from_group(m.get_group(first), "cpu"),
        "from_groups": lambda m: DeviceMesh.from_group(
            m.get_all_groups(), "cpu", m.mesh, mesh_dim_names=names
        ),
        "joined": lambda m: DeviceMesh._concatenate([m[name] for name in names]),
        "joined backwards": lambda m: DeviceMesh._concatenate([m[n] for n in reversed(names)]),
        "joined twice": lambda m: DeviceMesh._concatenate([m[first], m[first]]),
        "unflattened": lambda m: m._unflatten(first, (m.size(0), 1), ("outer", "inner")),
        "unflattened last": lambda m: m._unflatten(m.ndim - 1, (m.size(m.ndim - 1),), ("again",)),
        "slice of unflattened": lambda m: m._unflatten(0, (1, m.size(0)), ("o", "i"))["i"],
        "unflattened wrongly": lambda m: m._unflatten(first, (3, 5), ("outer", "inner")),
        "unflattened none": lambda m: m._unflatten("none", (1, 2), ("outer", "inner")),
        "unflattened beyond": lambda m: m._unflatten(7, (1, 2), ("outer", "inner")),
        "flattened to a dim's name": lambda m: m._flatten(last),
        "flattened": lambda m: m._flatten(),
        "flattened again": lambda m: m._flatten() is m._flatten(),
        "flattened to a name": lambda m: m._flatten("everyone"),
        "group of flattened": lambda m: m.get_group("everyone"),
        "group of flattened, of a slice": lambda m: m[first].get_group("everyone"),
        "slice of flattened": lambda m: m["everyone"],
        "slice of flattened, of a slice": lambda m: m[first]["everyone"],
        "flattened and one of it": lambda m: m["everyone", last],
        "dim by name": lambda m: m._get_mesh_dim_by_name(last),
        "taken": refuses,
        "flat of a slice": lambda m: m[first]._flatten("alone"),
        "slice of flat slice": lambda m: m["alone"],
        "grid's name of others": lambda m: m[first]._flatten("dp_cp"),
        "slice of that": lambda m: m["dp_cp"],
        "pickled at the end": pickled,
    }
    for name in names:
        asked[f"{name}"] = lambda m, n=name: m[n]
        asked[f"{name} of a tuple"] = lambda m, n=name: m[(n,)]
        asked[f"group of {name}"] = lambda m, n=name: m.get_group(n)
        asked[f"local rank of {name}"] = lambda m, n=name: m.get_local_rank(n)
        asked[f"root of {name}"] = lambda m, n=name: m[n]._get_root_mesh() is m
        asked[f"place of {name}"] = lambda m, n=name: m[n]._get_root_mesh_dim()
    for a, b in pairs:
        asked[f"{a} {b}"] = lambda m, a=a, b=b: m[a, b]
        asked[f"{a} {b} of a list"] = lambda m, a=a, b=b: m[[a, b]]
        asked[f"{b} of {a} {b}"] = lambda m, a=a, b=b: m[a, b][b]
        asked[f"{a} {b} flattened"] = lambda m, a=a, b=b: m[a, b]._flatten()
        asked[f"{a} {b} flattened, sliced"] = lambda m, a=a, b=b: m[f"{a}_{b}"]
        asked[f"{a} {b} by another name"] = lambda m, a=a, b=b: m[a, b]._flatten(f"{b}_{a}_too")
        asked[f"{a} {b} flattened, group"] = lambda m, a=a, b=b: m.get_group(f"{a}_{b}")
        for other in names:
            if other not in (a, b):
                both = sorted((f"{a}_{b}", other), key=lambda n: names.index(n.split("_")[0]))
                asked[f"{' and '.join(both)}"] = lambda m, both=tuple(both): m[both]
    return asked


@contextlib.contextmanager
def unconnected() -> Iterator[None]:
    """Within it torch's meshes make their groups with a backend that connects nobody.

    Nothing is sent on them here, and gloo connects all pairs of each of several hundred.
    """
    made = device_mesh.new_group

    def new_group(*given: Any, **named: Any) -> Any:
        return made(*given, **{**named, "backend": "fake", "pg_options": None})

    device_mesh.new_group = new_group
    try:
        yield
    finally:
        device_mesh.new_group = made


def outcome(call: Callable[[DeviceMesh], Any], mesh: DeviceMesh) -> tuple[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # slices of flattened names are to go some day
        try:
            return "answered", plain(call(mesh))
        except Exception as error:
            return "raised", type(error).__name__


def compared(given: dict[str, Any], names: tuple[str, ...]) -> int:
    """How many calls torch's mesh answered, and ours alike."""
    with unconnected():
        ours, theirs = pair(given, names)
    answered = 0
    for asked, call in calls(names).items():
        with unconnected():
            expected = outcome(call, theirs)
        found = outcome(call, ours)
        if expected[0] == "answered":
            answered += 1
        elif found[0] == "answered":
            continue  # a name that the grid has
        assert found == expected, f"{names}: {asked}"
    dist.barrier()  # gloo hangs a rank that connects a flattened group while another destroys it
    commgrid.destroy()
    return answered


def test_every_method_answers_as_torchs() -> None:
    """Ranks of their own for each mesh: what is left of one makes connecting the next slower."""
    for which in some(list(MESHES), 2):
        assert min(run_on_ranks(compared, 8, *MESHES[which])) >= 35


def tensors(given: dict[str, Any], names: tuple[str, ...], folder: str) -> None:
    ours, theirs = pair(given, names)
    full = torch.arange(35.0).view(5, 7)  # which 2, 4 and 8 divide unevenly
    spread: list[list[Any]] = [
        [Shard(0)] * ours.ndim,
        [Shard(1), *[Shard(0)] * (ours.ndim - 1)],
        [Replicate()] * (ours.ndim - 1) + [Shard(0)],
        [Replicate()] * ours.ndim,
    ]
    made = [(distribute_tensor(full, ours, p), distribute_tensor(full, theirs, p)) for p in spread]
    for source, (mine, others) in enumerate(made):
        assert torch.equal(mine.to_local(), others.to_local())
        assert torch.equal(mine.full_tensor(), full)
        for target, placements in enumerate(spread):
            moved = mine.redistribute(placements=placements)
            wanted = made[target][1].to_local()
            assert torch.equal(moved.to_local(), wanted), (names, spread[source], placements)
    parts = [
        DTensor.from_local(full * (dist.get_rank() + 1), mesh, [Partial()] * mesh.ndim)
        for mesh in (ours, theirs)
    ]
    for placements in spread:
        mine, others = (part.redistribute(placements=placements) for part in parts)
        assert torch.equal(mine.to_local(), others.to_local()), (names, placements)
    assert torch.equal(parts[0].full_tensor(), full * 36)
    assert torch.equal((made[0][0] @ made[0][0].t()).full_tensor(), full @ full.t())
    saved = {"ours": made[0][0], "theirs": made[0][1]}
    checkpoint.save(saved, checkpoint_id=folder)
    for placements in spread:  # each loads what the other wrote
        loaded = {
            "ours": empty(5, 7, device_mesh=theirs, placements=placements),
            "theirs": empty(5, 7, device_mesh=ours, placements=placements),
        }
        checkpoint.load(loaded, checkpoint_id=folder)
        for one in loaded.values():
            assert torch.equal(one.full_tensor(), full)
    file = Path(folder) / f"whole-{dist.get_rank()}"
    torch.save(made[0][0], file)
    again = torch.load(file, weights_only=False)
    assert again.device_mesh == ours
    assert torch.equal(again.full_tensor(), full)
    commgrid.destroy()


def all_tensors(folder: str) -> None:
    for which in some(["three", "two", "tp slowest", "with one of size 1", "transposed"], 1):
        tensors(*MESHES[which], f"{folder}/{which}")


@pytest.mark.full
def test_dtensors_move_save_and_load_as_on_torchs(tmp_path: Path) -> None:
    run_on_ranks(all_tensors, 8, str(tmp_path))


def test_every_public_method_is_compared() -> None:
    public = {name for name in vars(DeviceMesh) if not name.startswith("_")}
    compared_here = {
        "device_type", "mesh", "mesh_dim_names", "get_group", "get_all_groups", "from_group",
        "size", "ndim", "shape", "get_rank", "get_local_rank", "get_coordinate",
    }  # fmt: skip
    assert public - compared_here <= {"abort"}  # 2.15's, which ends the grid's groups
