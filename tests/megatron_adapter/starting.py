"""How Megatron's training scripts and Megatron-Bridge start, with the line that a user adds.

megatron.training's own functions run, on gloo with stand-ins for CUDA. Megatron-Bridge does not
install here; its calls are made as it makes them, with the arguments that it gives.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.hyper_comm_grid import HyperCommGrid as Theirs
from megatron.core.process_groups_config import ProcessGroupCollection

import commgrid
import megatron_adapter
from commgrid.testing import run_on_ranks
from examples import megatron_gpt
from tests.megatron_adapter.answers import answers, differences, plain
from tests.megatron_adapter.modules import run_on_gloo
from tests.megatron_adapter.test_functions import UNUSED
from tests.peers import parallel_state as theirs

SIZES = {
    "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2,
    "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1,
}  # fmt: skip


def compare(start: Callable[[], None]) -> None:
    """The same answers with Megatron's groups, after `install()`, and after `install(grid)`."""
    found = []
    for before in (lambda: None, megatron_adapter.install, _installed_grid):
        before()
        start()
        dist.barrier()
        found.append(answers(theirs, theirs))
        if before is not _installed_grid:
            assert commgrid.is_initialized() == (before is megatron_adapter.install)
        theirs.destroy_model_parallel()
        megatron_adapter.uninstall()
        commgrid.shutdown()
        vars(theirs).update(UNUSED)
    assert differences(found[1], found[0]) == []
    # What is installed has all that Megatron may have, twins over gloo among it.
    assert [line for line in differences(found[2], found[0]) if "gloo" not in line] == []


def _installed_grid() -> None:
    """A grid as a file would describe it."""
    expert = {"axes": {"etp": 1, "ep": 2, "edp": 2, "pp": 2}, "order": "etp-ep-edp-pp"}
    grid = commgrid.initialize(
        config={"axes": {"tp": 2, "dp": 2, "pp": 2}, "order": "tp-dp-pp",
                "regions": {"expert": expert}}
    )  # fmt: skip
    megatron_adapter.install(grid)


def training() -> None:
    """`initialize_megatron`, which the training scripts call."""
    run_on_ranks(_training, 8, timeout=300, check=False)


def _training() -> None:
    run_on_gloo()
    cuda: Any = torch.cuda
    cuda.device_count = lambda: 1  # it makes no groups without a device
    cuda.set_device = lambda _: None
    from megatron.core import num_microbatches_calculator, rerun_state_machine
    from megatron.training import arguments, global_vars, initialize

    initialize._compile_dependencies = lambda: None  # of its data sets

    def start() -> None:
        if "parsed_args" in inspect.signature(initialize.initialize_megatron).parameters:
            _by_command_line(initialize)
        else:
            _by_arguments(arguments, global_vars, initialize)
        rerun_state_machine.destroy_rerun_state_machine()
        num_microbatches_calculator.unset_num_microbatches_calculator()
        global_vars.destroy_global_vars()

    compare(start)


def _by_command_line(initialize: Any) -> None:
    """To 0.17 it parses and checks the command line itself, and asks what GPU there is."""
    cuda: Any = torch.cuda
    cuda.get_device_properties = lambda *_: SimpleNamespace(major=8, minor=0)
    given = {
        **SIZES, "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "seq_length": 8,
        "max_position_embeddings": 8, "micro_batch_size": 1, "lr": 0.001, "train_iters": 1,
        "tokenizer_type": "NullTokenizer", "vocab_size": 64, "num_experts": 2,
        "distributed_backend": "gloo", "transformer_impl": "local",
    }  # fmt: skip
    flags = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    flags = [part.replace("_", "-") if part.startswith("--") else part for part in flags]
    flags += ["--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion"]
    flags += ["--no-persist-layer-norm", "--disable-gloo-process-groups"]
    told = {"RANK": str(dist.get_rank()), "WORLD_SIZE": "8"}
    with mock.patch.object(sys, "argv", ["train.py", *flags]), mock.patch.dict(os.environ, told):
        assert initialize.initialize_megatron(allow_no_cuda=True) is None


def _by_arguments(arguments: Any, global_vars: Any, initialize: Any) -> None:
    with mock.patch.object(sys, "argv", ["train.py"]):
        args = arguments.parse_args()
    vars(args).update(SIZES, rank=dist.get_rank(), world_size=8, num_experts=None)
    args.use_gloo_process_groups = False
    args.gtp_weight_remat_size = args.expert_gtp_weight_remat_size = 1  # as its checks do
    args.virtual_pipeline_model_parallel_size = None
    global_vars.set_args(args)
    assert initialize.initialize_megatron(allow_no_cuda=True) is None


def bridge() -> None:
    """Megatron-Bridge's `torch_dist_init`, with Megatron's state."""
    run_on_ranks(_bridge, 8, timeout=300, check=False)


def _bridge() -> None:
    megatron_gpt.run_without_cuda()
    given = {
        **SIZES, "virtual_pipeline_model_parallel_size": None,
        "pipeline_model_parallel_comm_backend": None, "context_parallel_size": 1,
        "hierarchical_context_parallel_sizes": None, "num_distributed_optimizer_instances": 1,
        "distributed_timeout_minutes": 10, "nccl_communicator_config_path": None,
        "order": "tp-cp-ep-dp-pp", "get_embedding_ranks": None,
        "get_position_embedding_ranks": None, "create_gloo_process_groups": False,
        "use_sharp": False, "high_priority_stream_groups": [], "sharp_enabled_group": None,
    }  # fmt: skip
    assert given.keys() <= inspect.signature(theirs.initialize_model_parallel).parameters.keys()
    collections = []

    def start() -> None:
        if not theirs.model_parallel_is_initialized():
            theirs.initialize_model_parallel(**given)
        made = ProcessGroupCollection.use_mpu_process_groups()
        collections.append({one.name: plain(getattr(made, one.name)) for one in fields(made)})

    compare(start)
    assert collections[0] == collections[1] == collections[2]


def decentralized() -> None:
    """Megatron-Bridge's `use_decentralized_pg`: a dense grid and one of the experts."""
    run_on_ranks(_decentralized, 8, timeout=300, check=False)


def _decentralized() -> None:
    wanted = (
        ((2, 1, 2, 2), ("tp", "cp", "dp", "pp"),
         ("tp", "cp", "pp", "dp", "tp pp", "tp cp", "tp dp cp", "dp cp")),
        ((1, 2, 1, 2, 2), ("tp", "ep", "inner_dp", "outer_dp", "pp"),
         ("ep", "tp", "tp ep", "tp ep pp", "inner_dp outer_dp", "inner_dp", "outer_dp",
          "tp ep inner_dp pp")),
    )  # fmt: skip
    for shape, names, groups in wanted:
        grids = [
            kind(list(shape), list(names)) for kind in (Theirs, megatron_adapter.HyperCommGrid)
        ]
        for group in groups:
            one, other = (plain(grid.create_pg(group.split())) for grid in grids)
            assert one == other
            assert one is not None
        assert grids[0]._gen_rank_enum(["pp"]) == grids[1]._gen_rank_enum(["pp"])
