"""install and uninstall, several grids, and what is refused."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commgrid
import megatron_adapter
import megatron_adapter.parallel_state as mpu
from commgrid import CommGridError, GridMismatchError, SpecError
from commgrid.testing import run_on_ranks
from megatron_adapter import (
    AmbiguousGridError,
    MegatronSizeError,
    MegatronStateError,
    MegatronVersionError,
)
from megatron_adapter.installation import unfit
from megatron_adapter.module_code import ModuleCode
from tests.peers import parallel_state as theirs
from tests.peers import parallel_state as user  # stands for a module that imported names earlier

initialize = user.initialize_model_parallel
world_size = user.get_tensor_model_parallel_world_size
tensor_group = user.get_tensor_model_parallel_group


def picture() -> dict[str, Any]:
    """Everything that install could have changed."""
    found: dict[str, Any] = {}
    for name, value in vars(theirs).items():
        if inspect.isfunction(value):
            found[name] = (value, value.__code__, value.__defaults__, vars(value).copy())
        elif name != "__builtins__":
            found[name] = value if not isinstance(value, dict) else dict(value)
    return found


def lifecycle() -> None:
    before = picture()
    for _ in range(2):
        megatron_adapter.install()
        with pytest.raises(AssertionError, match="not initialized"):
            tensor_group()
        initialize(2)  # by a name that was imported before install
        assert world_size() == 2
        assert inspect.signature(initialize) == inspect.signature(theirs.initialize_model_parallel)
        assert tensor_group() is commgrid.get_group("tp")
        assert type(theirs.get_global_memory_buffer()).__module__ == "megatron.core.utils"
        with pytest.raises(MegatronStateError, match="already initialized: grid 'default' is"):
            initialize(2)
        with pytest.raises(MegatronStateError, match="already initialized on grid 'default'"):
            megatron_adapter.initialize_model_parallel(2)
        theirs.destroy_model_parallel()
        assert not theirs.is_initialized()
        assert not commgrid.is_initialized()
        theirs.destroy_model_parallel()
        megatron_adapter.uninstall()
        megatron_adapter.uninstall()
        assert picture() == before

    # Uninstalled while a grid is there: the grid stays, and is found again.
    megatron_adapter.install()
    initialize(2)
    megatron_adapter.uninstall()
    assert picture() == before
    assert mpu.get_tensor_model_parallel_world_size() == 2
    megatron_adapter.install()
    assert world_size() == 2
    commgrid.destroy()  # behind Megatron's back
    assert not theirs.is_initialized()
    assert mpu.get_tensor_model_parallel_group(check_initialized=False) is None
    megatron_adapter.uninstall()
    assert picture() == before


def test_install_uninstall_and_again() -> None:
    run_on_ranks(lifecycle, 2)


def plain_grid() -> None:
    """A grid of commgrid's own: what Megatron has besides is created beside it."""
    grid = commgrid.initialize(tp=2, pp=2)
    groups = dist.distributed_c10d._world.pg_map
    before = len(groups)
    megatron_adapter.install(grid)
    assert tensor_group() is grid.get_group("tp")
    assert theirs.get_pipeline_model_parallel_group() is grid.get_group("pp")
    ranks = dist.get_process_group_ranks
    assert ranks(theirs.get_embedding_group()) == list(grid.get_ranks("pp"))
    assert theirs.get_embedding_group() is not grid.get_group("pp")
    assert ranks(theirs.get_expert_data_parallel_group()) == list(grid.get_ranks("dp_cp"))
    assert dist.get_backend(theirs.get_data_parallel_group_gloo()) == "gloo"
    assert theirs.get_data_parallel_group_gloo() is not grid.get_group("dp")
    assert len(groups) > before
    megatron_adapter.install(grid)  # twice is fine
    theirs.destroy_model_parallel()  # takes what was made beside it, and leaves the grid
    assert len(groups) == before
    assert grid.check()
    megatron_adapter.uninstall()


def test_a_grid_that_was_made_for_something_else() -> None:
    run_on_ranks(plain_grid, 4)


def two_grids() -> None:
    megatron_adapter.install()
    first = megatron_adapter.initialize_model_parallel(2, name="encoder")
    assert world_size() == 2
    second = megatron_adapter.initialize_model_parallel(1, 2, 2, name="decoder")
    for ask in (
        world_size, tensor_group, theirs.get_all_ranks, mpu.get_data_parallel_rank,
        theirs.is_pipeline_first_stage, theirs.destroy_model_parallel,
    ):  # fmt: skip
        with pytest.raises(AmbiguousGridError, match="'encoder', 'decoder' are alive; say whose"):
            ask()
    assert theirs.is_initialized()
    assert theirs.model_parallel_is_initialized()
    assert mpu.is_initialized()
    for grid, tp, stages in ((first, 2, None), (second, 1, 2), ("encoder", 2, None)):
        with megatron_adapter.active(grid) as chosen:
            assert world_size() == mpu.get_tensor_model_parallel_world_size() == tp
            assert tensor_group() is chosen.get_group("tp")
            assert theirs.get_virtual_pipeline_model_parallel_world_size() == stages
    # What is set belongs to the grid that is active.
    with megatron_adapter.active(second):
        theirs.set_tensor_model_parallel_rank(7)
        with megatron_adapter.active(first):
            assert theirs.get_tensor_model_parallel_rank() == first.get_local_rank("tp")
        assert theirs.get_tensor_model_parallel_rank() == 7
        buffer = theirs.get_global_memory_buffer()
    with megatron_adapter.active(first):
        assert theirs.get_global_memory_buffer() is not buffer
    with megatron_adapter.active(second):
        assert theirs.get_global_memory_buffer() is buffer
        assert mpu.get_tensor_model_parallel_rank() == 7
        theirs.destroy_model_parallel()
        assert second.is_destroyed
    assert world_size() == 2  # one is left
    megatron_adapter.uninstall()
    mpu.destroy_model_parallel()
    assert not commgrid.is_initialized("encoder")


def test_two_grids_and_no_choice_is_an_error() -> None:
    run_on_ranks(two_grids, 4)


def chosen_and_gone() -> None:
    """What is chosen and then destroyed is not silently another grid's."""
    first = megatron_adapter.initialize_model_parallel(2, name="first")
    megatron_adapter.initialize_model_parallel(1, name="second")
    megatron_adapter.install(first)
    with megatron_adapter.active("first"):
        commgrid.destroy("first")
        for ask in (world_size, mpu.get_tensor_model_parallel_world_size):
            with pytest.raises(MegatronStateError, match=r"'first', which .* chose here, was des"):
                ask()
    assert world_size() == mpu.get_tensor_model_parallel_world_size() == 1
    before = len(dist.distributed_c10d._world.pg_map)
    for use in (megatron_adapter.install, megatron_adapter.process_group_collection):
        with pytest.raises(MegatronStateError, match="grid 'first' was destroyed"):
            use(first)
    with (
        pytest.raises(MegatronStateError, match="was destroyed"), megatron_adapter.active(first)
    ):  # fmt: skip
        pass
    with (
        pytest.raises(KeyError), megatron_adapter.active("second"),
        megatron_adapter.active("second"),
    ):  # fmt: skip
        raise KeyError
    assert len(dist.distributed_c10d._world.pg_map) == before
    megatron_adapter.uninstall()
    mpu.destroy_model_parallel()


def test_a_choice_that_is_gone() -> None:
    run_on_ranks(chosen_and_gone, 2)


def set_before() -> None:
    """What is set before there is a grid stays, and what is ended is forgotten."""
    for module, begin in (
        (theirs, theirs.initialize_model_parallel), (mpu, mpu.initialize_model_parallel),
    ):  # fmt: skip
        megatron_adapter.install()
        module.set_tensor_model_parallel_world_size(4)
        module.set_virtual_pipeline_model_parallel_world_size(3)
        module.destroy_model_parallel()
        with pytest.raises(AssertionError):
            module.get_tensor_model_parallel_world_size()
        module.set_tensor_model_parallel_world_size(4)
        module.set_virtual_pipeline_model_parallel_world_size(3)
        begin(2)
        assert theirs.get_tensor_model_parallel_world_size() == 4
        assert mpu.get_tensor_model_parallel_world_size() == 4
        assert mpu.get_virtual_pipeline_model_parallel_world_size() == 3
        made = module.create_group([0, 1], timeout=timedelta(seconds=71))
        mpu.update_pg_timeout(timedelta(seconds=77))
        for group in (made, commgrid.get_group("tp"), dist.group.WORLD):
            options = group._get_backend(torch.device("cpu")).options
            assert options._timeout == timedelta(seconds=77)
        dist.destroy_process_group(made)
        module.destroy_model_parallel()
        megatron_adapter.uninstall()


def test_what_is_set_before_initialization_stays() -> None:
    run_on_ranks(set_before, 2)


def patched() -> None:
    """Functions that a user replaced stay the user's, and Megatron's own come back."""
    before = picture()
    megatron_adapter.install()
    original = theirs.destroy_model_parallel
    calls = []

    def mine() -> None:
        calls.append(1)
        original()

    theirs.destroy_model_parallel = mine
    theirs.initialize_model_parallel(2)
    megatron_adapter.initialize_model_parallel(1, name="other")
    with pytest.raises(AmbiguousGridError):
        mine()
    commgrid.destroy("other")
    mine()
    assert calls == [1, 1]
    megatron_adapter.uninstall()
    theirs.destroy_model_parallel = original
    assert picture() == before


def test_functions_that_were_replaced() -> None:
    run_on_ranks(patched, 2)


def part_of_the_world() -> None:
    """A grid on ranks 2 and 3 of 4, with its own timeout, and what is made beside it."""
    if dist.get_rank() < 2:
        return
    grid = commgrid.initialize(tp=2, ranks=range(2, 4), timeout=33)
    before = len(grid._before_destroy)
    for _ in range(3):
        megatron_adapter.install(grid)
        assert theirs.get_tensor_model_parallel_src_rank() == 2
        for group in (tensor_group(), theirs.get_embedding_group()):
            options = group._get_backend(torch.device("cpu")).options
            assert options._timeout == timedelta(seconds=33)
        megatron_adapter.uninstall()
    assert len(grid._before_destroy) == before + 1
    collection = megatron_adapter.process_group_collection(grid)
    megatron_adapter.install(grid)
    mpu.update_pg_timeout(timedelta(seconds=55))  # waits for this grid's ranks alone
    theirs.set_virtual_pipeline_model_parallel_world_size(3)
    buffer = theirs.get_global_memory_buffer()
    megatron_adapter.uninstall()
    megatron_adapter.install(grid)
    assert theirs.get_virtual_pipeline_model_parallel_world_size() is None
    assert theirs.get_global_memory_buffer() is not buffer
    megatron_adapter.uninstall()
    world = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    assert world != timedelta(seconds=55)
    dist.barrier(collection.mp)  # it lives on
    assert dist.get_process_group_ranks(collection.embd) == [dist.get_rank()]
    commgrid.destroy()
    assert len(dist.distributed_c10d._world.pg_map) == 1


def test_a_grid_on_a_part_of_the_world() -> None:
    run_on_ranks(part_of_the_world, 4)


def chosen_grid() -> None:
    commgrid.initialize(name="a")
    commgrid.initialize(name="b")
    with pytest.raises(AmbiguousGridError, match="grids 'a', 'b' are alive; say which one"):
        megatron_adapter.install()
    assert not hasattr(theirs, "_commgrid_targets")
    megatron_adapter.install(commgrid.get_grid("b"))
    assert tensor_group() is commgrid.get_group("tp", "b")
    megatron_adapter.install(commgrid.get_grid("a"))
    with pytest.raises(AmbiguousGridError):
        tensor_group()
    commgrid.destroy("b")
    assert tensor_group() is commgrid.get_group("tp", "a")
    megatron_adapter.uninstall()


def test_which_grid_is_installed() -> None:
    run_on_ranks(chosen_grid, 2)


def refused() -> None:
    def fails(kind: type[Exception], said: str, **given: Any) -> None:
        for function in (megatron_adapter.initialize_model_parallel, theirs_installed):
            with pytest.raises(kind, match=said) as caught:
                function(**given)
            assert isinstance(caught.value, CommGridError)

    def theirs_installed(**given: Any) -> None:
        megatron_adapter.install()
        try:
            theirs.initialize_model_parallel(**given)
        finally:
            megatron_adapter.uninstall()

    tp, pp = "tensor_model_parallel_size", "pipeline_model_parallel_size"
    fails(
        RuntimeError,
        r"world_size \(2\) is not divisible .* tp=3 · pp=1 · cp=1 = 3; nearest that fit: tp=2,",
        **{tp: 3},
    )
    fails(RuntimeError, "expert model parallel size etp=1 · ep=4 · pp=1 = 4",
          expert_model_parallel_size=4)  # fmt: skip
    fails(RuntimeError, "virtual_pipeline_model_parallel_size=2 needs",
          virtual_pipeline_model_parallel_size=2)  # fmt: skip
    fails(RuntimeError, "order='tp-dq': 'dq' is no axis.*did you mean 'dp'", order="tp-dq")
    fails(RuntimeError, "order='dp-pp': tp is missing, and its size is 2", order="dp-pp", **{tp: 2})
    fails(RuntimeError, "tp=0: expected a positive integer", **{tp: 0})
    fails(AssertionError, "3 distributed optimizer instances do not divide",
          num_distributed_optimizer_instances=3)  # fmt: skip
    fails(AssertionError, "their product is 2, not context_parallel_size=1",
          hierarchical_context_parallel_sizes=[2])  # fmt: skip
    fails(AssertionError, "even number of ranks", hybrid_context_parallel=True, **{tp: 2})
    fails(AssertionError, "only with use_sharp=True", sharp_enabled_group="dp")
    fails(AssertionError, "expected dp or dp_replica", use_sharp=True, sharp_enabled_group="tp")
    fails(AssertionError, "expected None, nccl or ucc", pipeline_model_parallel_comm_backend="mpi")
    fails(AssertionError, r"get_embedding_ranks answered \[5\] for the pipeline",
          get_embedding_ranks=lambda ranks: [5])  # fmt: skip
    fails(SpecError, "'dp-cp': Megatron has no such group.*did you mean 'dp_cp'",
          high_priority_stream_groups=["dp-cp"])  # fmt: skip
    mine = 1 if dist.get_rank() == 0 else 2
    with pytest.raises(GridMismatchError):
        megatron_adapter.initialize_model_parallel(**{pp: mine})
    assert not commgrid.is_initialized()
    assert not mpu.is_initialized()


def test_what_megatron_refuses_is_refused_with_its_exceptions() -> None:
    run_on_ranks(refused, 2)


def test_before_initialization() -> None:
    for module in (mpu, theirs):
        with pytest.raises(AssertionError):
            module.get_data_parallel_group()
        assert module.get_data_parallel_world_size() == 0
        assert not module.is_initialized()
    with pytest.raises(MegatronStateError, match=r"call torch.distributed.init_process_group"):
        megatron_adapter.initialize_model_parallel()
    mpu.destroy_model_parallel()
    mpu.set_tensor_model_parallel_world_size(4)
    assert mpu.get_tensor_model_parallel_world_size() == 4
    assert mpu.get_expert_tensor_parallel_world_size() == 4
    mpu.set_tensor_model_parallel_world_size(None)


def no_words_for_it() -> None:
    wide = {"axes": {"row": 2, "column": 1}, "order": "row-column"}
    hybrid = {"axes": {"dp_shard": 2, "dp_replicate": 1}}
    for config, said in ((wide, "a grid with row, column"), (hybrid, "dp_shard")):
        grid = commgrid.initialize(config=config)
        with pytest.raises(SpecError, match=f"Megatron cannot express.*{said}|{said}"):
            megatron_adapter.install(grid)
        assert not hasattr(theirs, "_commgrid_targets")
        commgrid.destroy()
    for axes, said in (
        ({"edp": 1, "ep": 2, "etp": 1, "pp": 1}, ""),
        ({"edp": 2, "pp": 1}, "region expert"),
    ):  # fmt: skip
        region = {"expert": {"axes": axes, "order": "-".join(axes)}}
        grid = commgrid.initialize(config={"axes": {"tp": 2}, "regions": region})
        if said:
            with pytest.raises(SpecError, match=said):
                megatron_adapter.install(grid)
        commgrid.destroy()
    for name, row in (
        ("embedding", {"of": "pp", "pick": ["last"]}), ("dp_gloo", {"of": "dp"}),
        ("dp_cp_ag", {"of": "tp", "own": True}), ("hcp_0", {"of": "tp"}),
    ):  # fmt: skip
        other = commgrid.initialize(pp=2, groups={name: row})
        with pytest.raises(SpecError, match=f"groups.{name} of grid 'default' is not what Megat"):
            megatron_adapter.install(other)
        commgrid.destroy()
    with pytest.raises(MegatronStateError, match="was destroyed"):
        megatron_adapter.install(other)
    theirs.initialize_model_parallel(2)
    with pytest.raises(MegatronStateError, match="initialized already, by its own groups"):
        megatron_adapter.install()


def test_grids_that_cannot_be_installed() -> None:
    run_on_ranks(no_words_for_it, 2)


def regions() -> None:
    """The experts' order must be one that Megatron has for both regions."""

    def grid(order: str, **axes: int) -> commgrid.HyperCommGrid:
        region = {"expert": {"axes": {"etp": 1, "pp": 1, **axes}, "order": order}}
        dense = {"tp": 2, "dp": 4}
        return commgrid.initialize(config={"axes": dense, "order": "tp-dp", "regions": region})

    ranks = dist.get_process_group_ranks
    for order in ("etp-ep-edp-pp", "edp-ep-etp-pp", "ep-edp-etp-pp"):
        made = grid(order, ep=2, edp=4)
        megatron_adapter.install(made)
        assert ranks(theirs.get_expert_model_parallel_group()) == list(made.get_ranks("ep"))
        twin = theirs.get_expert_data_parallel_group_gloo()
        assert ranks(twin) == list(made.get_ranks("edp"))
        megatron_adapter.uninstall()
        commgrid.destroy()
    made = grid("edp-etp-ep-pp", ep=2, edp=2, etp=2)
    with pytest.raises(SpecError, match="'expert' in the order edp-etp-ep; both its"):
        megatron_adapter.install(made)


def test_the_experts_order() -> None:
    run_on_ranks(regions, 8)


VENDOR = """
_RING_GROUP, _RING_LISTS, _RINGS, _LOG = None, [], [1, 2], {}
def _make_rings():
    global _RING_GROUP
    _RING_GROUP = _RINGS
    _RING_LISTS.append(_RINGS)
def get_ring_group():
    assert _RING_GROUP is not None, "no rings"
    return _RING_GROUP
"""
MAKES_RINGS = ("  _set_global_memory_buffer()\n", "  _set_global_memory_buffer(); _make_rings()\n")
"""In Megatron's own `initialize_model_parallel`."""


def copied(more: str, *edits: tuple[str, str]) -> types.ModuleType:
    """Megatron's parallel state as a vendor may have changed it."""
    made = types.ModuleType("megatron.core.parallel_state")
    vars(made).update(__package__="megatron.core", __file__=theirs.__file__)
    text = Path(str(theirs.__file__)).read_text()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    exec(compile(text + more, str(theirs.__file__), "exec"), vars(made))
    return made


def test_a_vendors_module_is_taken_while_known_getters_read_known_state() -> None:
    for more in (
        "",
        VENDOR,
        VENDOR + "def get_tensor_model_parallel_rank():\n  return _RINGS and _LOG.get('x') or "
        "_MPU_TENSOR_MODEL_PARALLEL_RANK",
        "def get_data_parallel_group(with_context_parallel=True): return _DATA_PARALLEL_GROUP",
        "del get_embedding_group",
        "import functools\nfor one in (get_context_parallel_rank, destroy_model_parallel):\n"
        "  globals()[one.__name__] = functools.wraps(one)(lambda *a, of=one, **k: of(*a, **k))",
        "def has_separate_all_gather_group(): return False",
        "get_tp_group = get_tensor_model_parallel_group",
    ):
        module = copied(more, *[MAKES_RINGS] * ("_make_rings" in more))
        assert unfit(module, ModuleCode(module)) == [], more


def test_a_module_whose_known_getters_would_answer_wrongly_is_refused() -> None:
    tp = "function get_tensor_model_parallel_rank reads {}, which only Megat"
    for more, said in (
        ("def get_tensor_model_parallel_rank(): return _RING_GROUP.rank()",
         tp.format("_RING_GROUP")),
        ("def get_tensor_model_parallel_rank(): return [r() for r in _RING_LISTS]",
         tp.format("_RING_LISTS")),
        ("def _ask(): return _RING_GROUP\ndef _say(): return _ask()\n"
         "def get_tensor_model_parallel_rank(): return _say()", tp.format("_RING_GROUP")),
        ("def set_tensor_model_parallel_rank(rank):\n  global _RING_GROUP\n  _RING_GROUP = rank",
         "function set_tensor_model_parallel_rank reads _RING_GROUP"),
        ("def model_parallel_is_initialized(): return _LOG.get('groups')", "reads none of the"),
        ("from os.path import join as destroy_model_parallel", "destroy_model_parallel was repl"),
        ("del initialize_model_parallel", "function initialize_model_parallel is missing"),
    ):  # fmt: skip
        module = copied(VENDOR + more, MAKES_RINGS)
        found = unfit(module, ModuleCode(module))
        assert any(said in line for line in found), (more, found)
        assert all(len(line) < 200 for line in found)


def test_a_megatron_that_cannot_be_installed_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theirs, "destroy_model_parallel", lambda: None)
    with pytest.raises(MegatronVersionError, match="destroy_model_parallel was replaced by"):
        megatron_adapter.install()
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", None)
    with pytest.raises(ImportError, match=r"cannot be imported.*pip install megatron-core==0.16.1"):
        megatron_adapter.install()


def same_errors() -> None:
    """Sizes that Megatron itself refuses get the same kind of exception."""
    cases: list[dict[str, Any]] = [
        {"tensor_model_parallel_size": 3},
        {"expert_model_parallel_size": 3},
        {"virtual_pipeline_model_parallel_size": 2},
        {"num_distributed_optimizer_instances": 3},
        {"pipeline_model_parallel_size": 2, "context_parallel_size": 2, "order": "tp-cp-pp-dp"},
        {"sharp_enabled_group": "dp"},
        {"order": "tp-pp"},
    ]
    for given in cases:
        kinds = []
        for function in (theirs.initialize_model_parallel, mpu.initialize_model_parallel):
            try:
                function(**given)
            except (AssertionError, RuntimeError) as error:
                kinds.append((isinstance(error, AssertionError), isinstance(error, RuntimeError)))
            reset: Callable[[], None] = theirs.destroy_model_parallel
            reset()
        assert len(kinds) == 2, given
        assert kinds[0] == kinds[1], given


def test_the_kinds_of_errors_are_megatrons() -> None:
    assert issubclass(MegatronSizeError, RuntimeError)
    run_on_ranks(same_errors, 4)
