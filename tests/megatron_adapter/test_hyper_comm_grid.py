"""The adapter's HyperCommGrid against megatron-core's own, and where it is stricter."""

from __future__ import annotations

import itertools
import warnings
from datetime import timedelta
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from commgrid import (
    CommGridError,
    GridMismatchError,
    GridNotInitializedError,
    PeerFailedError,
    SpecError,
)
from commgrid.testing import run_on_ranks
from commgrid.torch_compat import groups as torch_groups
from megatron_adapter import HyperCommGrid, MegatronSizeError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    Theirs = pytest.importorskip("megatron.core.hyper_comm_grid").HyperCommGrid

SHAPES: list[tuple[list[int], list[str], int]] = [
    ([2, 2, 2], ["tp", "cp", "dp"], 0),
    ([2, 3, 4], ["tp", "pp", "dp"], 1),
    ([4, 1, 2], ["a", "b", "c"], 3),
    ([6], ["dp"], 2),
]


@pytest.mark.parametrize(("shape", "names", "offset"), SHAPES)
def test_rank_enumerations_are_megatrons(
    shape: list[int], names: list[str], offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "32")
    mine, theirs = HyperCommGrid(shape, names, offset), Theirs(shape, names, offset)
    assert (mine.size, mine.shape, mine.dim_names) == (theirs.size, theirs.shape, theirs.dim_names)
    assert (mine.rank_offset, mine.backend) == (theirs.rank_offset, theirs.backend)
    for count in range(1, len(names) + 1):
        for dims in itertools.permutations(names, count):
            assert mine.get_rank_enum(list(dims)) == theirs.get_rank_enum(list(dims)), dims
    assert mine.get_rank_enum(names[0]) == theirs.get_rank_enum(names[0])


def groups() -> None:
    rank = dist.get_rank()
    mine, theirs = HyperCommGrid([2, 3], ["tp", "dp"], 1), Theirs([2, 3], ["tp", "dp"], 1)
    for dims in ("tp", "dp", ["dp", "tp"]):
        made, expected = mine.create_pg(dims), theirs.create_pg(dims)
        if rank in (0, 7):
            assert made is None
            continue
        assert made is not None
        assert dist.get_process_group_ranks(made) == dist.get_process_group_ranks(expected)
        assert mine.get_pg(dims) is made
        total = torch.ones(1)
        dist.all_reduce(total, group=made)
        assert total == made.size()
    with pytest.raises(KeyError, match="dp-tp of view base has already been created"):
        mine.create_pg(["tp", "dp"])
    mine.register_view("expert", [1, 2, 3], ["etp", "tp", "edp"], ["tp"])
    edp = mine.create_pg("edp", view="expert", timeout=timedelta(seconds=33), group_desc="EDP")
    if 0 < rank < 7:
        assert edp is not None
        assert edp is not mine.get_pg("dp")
        assert edp.group_desc == "EDP"
        assert edp._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=33)
        assert mine.get_pg("tp", view="expert") is mine.get_pg("tp")
    with pytest.raises(KeyError, match="etp of view expert hasn't been created"):
        mine.get_pg("etp", view="expert")
    before = len(dist.distributed_c10d._world.pg_map)
    mine.destroy()
    mine.destroy()
    assert len(dist.distributed_c10d._world.pg_map) == before - (4 if 0 < rank < 7 else 0)
    mine.create_pg("tp")  # and again

    # Grids that overlap do not take each other's ranks for their own.
    small, large = HyperCommGrid([2, 2], ["tp", "dp"]), HyperCommGrid([2, 4], ["tp", "dp"])
    if rank < 4:
        assert small.create_pg("dp") is not None
    assert large.create_pg("dp") is not None

    # Ranks that ask for different groups are told so.
    asked = "tp" if rank % 2 else "dp"
    other = HyperCommGrid([4, 2], ["tp", "dp"])
    with pytest.raises(GridMismatchError, match=r"'HyperCommGrid tp4-dp2': .*groups\.tp\.of is"):
        other.create_pg(asked)


def over_the_same_ranks() -> None:
    """Grids of several shapes at one place, each with groups of the same names and ranks."""
    grids = [HyperCommGrid(shape, ["tp", "cp", "dp"]) for shape in ([1, 1, 4], [2, 1, 2])]
    made = [grid.create_pg(dims) for grid in grids for dims in ("cp", "tp", "dp")]
    assert len(set(map(id, made))) == 6
    for group in made:
        assert group is not None
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert total == group.size()


def test_grids_over_the_same_ranks() -> None:
    # A grid that failed leaves keys in the store.
    run_on_ranks(over_the_same_ranks, 4, check=False)


def as_megatrons_programs_ask() -> None:
    """Sizes of NumPy, whether a rank is in it, and the name that Megatron's bridges ask by."""
    sizes = [numpy.int64(2), 2]
    mine, theirs = (kind(sizes, ["tp", "dp"], numpy.int64(1)) for kind in (HyperCommGrid, Theirs))
    assert mine.shape == [2, 2]
    assert all(type(size) is int for size in (*mine.shape, mine.size, mine.rank_offset))
    assert mine._gen_rank_enum(["dp"]) == theirs._gen_rank_enum(["dp"]) == [[1, 3], [2, 4]]
    assert mine.is_current_rank_in_grid() == (dist.get_rank() in range(1, 5))
    with pytest.raises(SpecError, match="tp has size True"):
        HyperCommGrid([True, 2], ["tp", "dp"])


def test_what_megatrons_programs_ask_of_a_grid() -> None:
    run_on_ranks(as_megatrons_programs_ask, 6)


def one_fails() -> None:
    grid = HyperCommGrid([1, 2], ["tp", "dp"])
    before = len(dist.distributed_c10d._world.pg_map)
    create = torch_groups.create_group

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such device")

    if dist.get_rank() == 1:
        torch_groups.create_group = broken
    kind = CommGridError if dist.get_rank() == 1 else PeerFailedError
    with pytest.raises(kind, match="no such device"):
        grid.create_pg("tp")
    assert len(dist.distributed_c10d._world.pg_map) == before
    torch_groups.create_group = create
    assert grid.create_pg("tp") is not None  # the second try


def test_a_rank_that_fails_is_told_to_the_others() -> None:
    run_on_ranks(one_fails, 2)


def test_torchs_options_and_names_that_are_no_identifiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The options go to torch as they are; a dim is called as the program likes."""
    dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
    create, told = torch_groups.create_group, []

    def watched(*given: Any, **more: Any) -> Any:
        told.append((given[1], given[2], more.pop("backend_options")))
        return create(*given, **more, backend_options=None)

    monkeypatch.setattr(torch_groups, "create_group", watched)
    grid = HyperCommGrid([2, 2, 2], ["axis0", "2nd", "d p"])
    mine = object()
    grid.create_pg("axis0", pg_options=mine)
    for dims, desc in ((["axis0", "d p"], None), ("2nd", None), ("d p", "axis1 or so")):
        made = grid.create_pg(dims, group_desc=desc)
        assert made is not None
        assert dist.get_process_group_ranks(made) in grid.get_rank_enum(dims)
    assert [(name, list(ranks)) for name, ranks, _ in told] == [
        ("axis0_", [4, 5]), ("d_p_axis0", [0, 1, 4, 5]), ("_2nd", [5, 7]), ("axis1_or_so", [1, 5]),
    ]  # fmt: skip
    assert [options for *_, options in told] == [mine, None, None, None]
    grid.destroy()
    assert len(dist.distributed_c10d._world.pg_map) == 1
    dist.destroy_process_group()


def test_groups_are_megatrons() -> None:
    run_on_ranks(groups, 8, check=False)  # its last grids are left alive


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"shape": [2], "dim_names": ["a", "b"]}, ValueError, r"len\(shape\) \[2\] != len"),
    ({"shape": [2, 2], "dim_names": ["a", "a"]}, ValueError, "'a' is no name, or there twice"),
    ({"shape": [2, 0], "dim_names": ["a", "b"]}, ValueError, "b has size 0; expected 1 or more"),
    ({"shape": [9], "dim_names": ["a"]}, RuntimeError, "over sized: it has 9 ranks .* has 8"),
    ({"shape": [2], "dim_names": ["a"], "rank_offset": -1}, ValueError, "rank_offset=-1"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "kind", "said"), WRONG)
def test_what_is_refused(
    given: dict[str, Any], kind: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(kind, match=said) as caught:
        HyperCommGrid(**given)
    assert isinstance(caught.value, SpecError | MegatronSizeError)


def test_dims_and_views_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(GridNotInitializedError, match="set WORLD_SIZE"):
        HyperCommGrid([1], ["a"])
    monkeypatch.setenv("WORLD_SIZE", "8")
    grid = HyperCommGrid([2, 4], ["tp", "dp"])
    for dims, said in (
        (("tp", "dp"), "expected the name of a dim, or a list"),
        ([], "expected the name of a dim"), (["tp", "tp"], "there twice"),
        ("tq", "'tq' is no dim.*did you mean 'tp'"),
    ):  # fmt: skip
        with pytest.raises(SpecError, match=said):
            grid.get_rank_enum(dims)  # type: ignore[arg-type]
    for view, said in (
        ((["tp", "dp"], [2, 2], None), "has 4 ranks, and the grid 8"),
        ((["x", "dp"], [4, 2], ["dp"]), "groups of dp are .*cannot be shared"),
        ((["x"], [8], ["dp"]), "shared dim 'dp' is not once in both"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            grid.register_view("v", view[1], view[0], view[2])
    grid.register_view("v", [8], ["ep"])
    with pytest.raises(ValueError, match="registered already"):
        grid.register_view("v", [8], ["ep"])
    for kind in (KeyError, SpecError):
        with pytest.raises(kind, match=r"^view='w' is not registered, expected one of base, v"):
            grid.get_rank_enum("ep", view="w")
