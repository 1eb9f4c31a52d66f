"""Every use of what is private to torch: where it stands, and what to do when it goes.

`python -m tests.torch_private` prints the table of docs/torch_versions.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CHECKED = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""The versions of torch that every row was looked up on."""


@dataclass(frozen=True)
class Private:
    """One private name of torch's.

    Args:
        name: as an expression over what `live` gives, such as `group._get_backend`.
        files: the files that use it, below the repository's root.
        then: what to do when it goes.
        first: the first checked version that has it; before it, the code does without.
        nccl: whether only builds with NCCL have it.
    """

    name: str
    files: tuple[str, ...]
    then: str
    first: str = CHECKED[0]
    nccl: bool = False

    @property
    def attribute(self) -> str:
        """The private part of the name, as code spells it."""
        return next(part for part in reversed(self.name.split(".")) if part.startswith("_"))


def live() -> dict[str, Any]:
    """What the names of the table begin with; torch.distributed is up, with gloo."""
    import torch
    import torch._subclasses
    import torch.distributed as dist
    import torch.distributed.checkpoint.filesystem
    import torch.distributed.tensor._redistribute
    import torch.testing._internal.distributed.fake_pg
    from torch import nn
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    group = dist.group.WORLD
    assert group is not None
    return {
        "torch": torch,
        "nn": nn,
        "c10d": c10d,
        "group": group,
        "gloo": group._get_backend(torch.device("cpu")),
        "Gloo": c10d.ProcessGroupGloo,
        "DeviceMesh": DeviceMesh,
        "mesh": init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b")),
    }


_WORLD = "commgrid/runtime/torch_world.py"
_STANDBY = "commgrid/runtime/torch_standby.py"
_GROUPS = "commgrid/runtime/torch_groups.py"
_GLOO = "commgrid/runtime/torch_gloo.py"
_NCCL = "commgrid/runtime/torch_nccl.py"
_TRANSFERS = "commgrid/runtime/torch_transfers.py"
_SUSPEND = "commgrid/runtime/torch_suspend.py"
_CALLS = "commgrid/runtime/torch_calls.py"
_PATCHES = "commgrid/runtime/torch_patches.py"
_ARCHIVE = "commgrid/runtime/torch_archive.py"
_MESH = "commgrid/runtime/device_mesh.py"
_SHARDING = "commgrid/sharding.py"
_KEPT = "commgrid/data_parallel/kept.py"
_KERNEL = "commgrid/context_parallel/kernels.py"

ROWS = (
    # -- groups and the store ----------------------------------------------------------------
    Private(
        "c10d._new_process_group_helper",
        (_GROUPS,),
        "new_group(use_local_synchronization=True) with a name of ours, once it takes one",
    ),
    Private(
        "c10d._world",
        (_WORLD, _STANDBY, _GROUPS, _GLOO, _SUSPEND, "commgrid/testing/leftovers.py"),
        "keep backend, store and ranks of the groups we make ourselves; of others ask "
        "get_backend_config and get_process_group_ranks",
    ),
    Private(
        "c10d._get_default_group",
        (_WORLD, _STANDBY, _GROUPS, _GLOO),
        "dist.group.WORLD",
    ),
    Private(
        "c10d._get_default_store",
        (_WORLD, "commgrid/testing/process.py"),
        "start torch.distributed on a store of ours, and ask a user who started it for one",
    ),
    Private(
        "c10d._get_default_timeout",
        (_WORLD, _GROUPS),
        "c10d's constants default_pg_timeout and default_pg_nccl_timeout",
    ),
    Private(
        "group._get_backend",
        (_WORLD, _GROUPS, _GLOO, _TRANSFERS, _SUSPEND),
        "dist.get_backend_impl, which 2.15 has",
    ),
    Private(
        "group._device_types",
        (_WORLD, _GLOO, _SUSPEND),
        "the devices that dist.get_backend_config names",
    ),
    Private(
        "gloo._set_default_timeout",
        (_WORLD,),
        "nothing: only where there is no dist.set_timeout, before 2.14",
    ),
    Private(
        "torch._C._distributed_c10d.HashStore",
        (_WORLD, _GLOO, _SUSPEND),
        "dist.HashStore, which is it; its annotations are only here",
    ),
    Private(
        "torch._C._distributed_c10d.PrefixStore",
        (_WORLD, _STANDBY, _GROUPS),
        "dist.PrefixStore, likewise",
    ),
    Private(
        "torch._C._distributed_c10d.TCPStore",
        (_WORLD, _STANDBY),
        "dist.TCPStore, likewise",
    ),
    # -- gloo that connects at first use -----------------------------------------------------
    Private(
        "Gloo._Options",
        (_GLOO,),
        "the options that torch makes public, or leave instead_of_gloo out: gloo then connects all",
    ),
    Private("Gloo._Options._devices", (_GLOO,), "as Gloo._Options"),
    Private("Gloo._Options._threads", (_GLOO,), "as Gloo._Options"),
    Private(
        "Gloo._Options._timeout",
        (_GLOO, _NCCL),
        "as Gloo._Options; NCCL's options have it too, where torch warns if it differs",
    ),
    Private(
        "c10d.Backend._plugins",
        (_GLOO,),
        "Backend.register_backend, and a group whose backend is called by another name than gloo",
    ),
    Private("c10d.Backend._BackendPlugin", (_GLOO,), "as c10d.Backend._plugins"),
    Private("group._register_backend", (_GLOO,), "leave `adopt` out, likewise"),
    Private("group._set_default_backend", (_GLOO,), "leave `adopt` out, likewise"),
    Private(
        "c10d._FR_SELF_RECORDING_BACKENDS",
        (_GLOO,),
        "nothing: the flight recorder would then hold gloo's collectives twice",
        first="2.15",
    ),
    Private(
        "c10d.ProcessGroupNCCL._get_sequence_number_for_group",
        (_GROUPS,),
        "a watch that does not say who has not come to a collective",
        nccl=True,
    ),
    Private(
        "c10d.ProcessGroupNCCL._is_initialized",
        (_NCCL,),
        "Communicator.connected says only what the exchange of ranks has connected",
        nccl=True,
    ),
    # -- groups that are given up for a while ------------------------------------------------
    Private(
        "torch._C._distributed_c10d",
        (_SUSPEND,),
        "the five below, under c10d",
    ),
    Private(
        "torch._C._distributed_c10d._dump_fr_trace",
        (_SUSPEND,),
        "suspend without asking whether collectives are under way; their handles then fail",
    ),
    Private(
        "torch._C._distributed_c10d._dump_nccl_trace",
        (_SUSPEND,),
        "as _dump_fr_trace, of NCCL's",
        nccl=True,
    ),
    Private(
        "torch._C._distributed_c10d._register_process_group",
        (_SUSPEND,),
        "whatever then says which group a name means; without it DTensor finds none meanwhile",
    ),
    Private(
        "torch._C._distributed_c10d._unregister_process_group",
        (_SUSPEND, _GROUPS),
        "as _register_process_group; and dist.destroy_process_group, which can hang after an abort",
    ),
    Private(
        "torch._C._distributed_c10d._resolve_process_group",
        (_SUSPEND,),
        "dist.get_group_by_name or the like; else handles that were kept end with a suspension",
    ),
    Private(
        "group._allgather_base", (_SUSPEND, _CALLS), "nothing: it is then called by its public name"
    ),
    Private(
        "group._reduce_scatter_base",
        (_SUSPEND, _CALLS, "commgrid/runtime/torch_fake.py"),
        "as group._allgather_base",
    ),
    Private(
        "torch.testing._internal.distributed.fake_pg.FakeStore",
        ("commgrid/runtime/torch_world.py",),
        "wherever the fake backend is then; else `commgrid audit --dry` has no world to record in",
    ),
    Private("group._start_coalescing", (_SUSPEND,), "as group._allgather_base"),
    # -- meshes and DTensor ------------------------------------------------------------------
    Private(
        "DeviceMesh._init_one_process_group",
        (_PATCHES,),
        "whatever then creates a flattened axis's group, or a way to hand one over",
    ),
    Private("mesh._flatten", (_MESH,), "as torch flattens by then"),
    Private(
        "mesh._flatten_mapping",
        (_MESH, _PATCHES),
        "ask the root for a flattened axis by its name; names are no longer offered",
    ),
    Private("mesh._get_root_mesh", (_MESH, _PATCHES), "the mesh that it was cut from"),
    Private(
        "mesh._root_mesh",
        (_MESH, _PATCHES),
        "make every mesh by from_group, which is a root; meshes then meet by torch's rules alone",
    ),
    Private(
        "mesh._pg_registry",
        (_MESH,),
        "compiled code finds groups as torch does by then; without it, in its own mesh only",
    ),
    Private(
        "DeviceMesh._create_flatten_mesh",
        (_PATCHES,),
        "names are no longer offered: whoever wants one flattens",
    ),
    Private("DeviceMesh._concatenate", (_MESH,), "as torch joins slices of a root by then"),
    Private(
        "torch.distributed.tensor._redistribute",
        (_PATCHES, _SHARDING),
        "ShardingSpec.plan raises CommGridError; redistribute goes on",
    ),
    Private(
        "torch.distributed.tensor._redistribute._gen_transform_infos", (_SHARDING,), "likewise"
    ),
    Private(
        "torch.distributed.tensor._redistribute._optimize_transform_infos",
        (_PATCHES, _SHARDING),
        "likewise, where the test of uneven gathers passes without `mend_uneven_gathers`",
    ),
    Private(
        "torch.distributed.tensor._dtensor_spec.DTensorSpec", (_SHARDING,), "likewise: plan only"
    ),
    Private(
        "torch.distributed.tensor._dtensor_spec.TensorMeta", (_SHARDING,), "likewise: plan only"
    ),
    # -- tensors and modules -----------------------------------------------------------------
    Private(
        "nn.Module()._parameters",
        (
            "commgrid/parameters.py",
            "commgrid/data_parallel/reducer.py",
            "commgrid/data_parallel/sharded_optimizer.py",
        ),
        "named_parameters(recurse=False, remove_duplicate=False)",
    ),
    Private(
        "nn.Module()._non_persistent_buffers_set",
        ("commgrid/checkpoint/model_state.py", "commgrid/observe/audit/observer.py"),
        "the buffers that state_dict has",
    ),
    Private(
        "nn.Module._apply",
        ("commgrid/expert/router.py",),
        "give the router's bias a buffer that keeps its dtype some other way",
    ),
    Private(
        "torch._C._disabled_torch_function_impl",
        (_KEPT,),
        "a __torch_function__ that calls the function within DisableTorchFunctionSubclass",
    ),
    Private(
        "torch.Tensor._make_wrapper_subclass",
        (_KEPT,),
        "torch.utils' wrapper subclass by then; torchao and DTensor need one too",
    ),
    Private(
        "torch._C._will_engine_execute_node",
        ("commgrid/tensor_parallel/main_grad.py", "commgrid/tensor_parallel/matmul.py"),
        "take torch.autograd.grad for backward, as Megatron-core's layers do",
    ),
    Private(
        "torch._C._current_graph_task_id",
        ("commgrid/expert/router.py",),
        "a flag that checkpoint's context_fn sets",
    ),
    Private(
        "torch._subclasses.FakeTensor",
        ("commgrid/tensor_parallel/init.py",),
        "torch._subclasses.fake_tensor, or compare the class's name",
    ),
    Private(
        "torch._assert_async",
        ("commgrid/tensor_parallel/embedding.py", "commgrid/expert/dispatch.py"),
        "torch.ops.aten._assert_async.msg",
    ),
    Private(
        "torch._grouped_mm",
        ("commgrid/expert/experts.py",),
        "nn.functional.grouped_mm, or the loop over experts beside it",
    ),
    Private(
        "torch._amp_foreach_non_finite_check_and_unscale_",
        ("commgrid/data_parallel/scaler.py",),
        "multiply and isfinite of each gradient",
    ),
    Private(
        "torch.Tensor._values",
        ("commgrid/data_parallel/scaler.py",),
        "values() of the coalesced gradient",
    ),
    Private(
        "torch._foreach_copy_", ("commgrid/data_parallel/sharded_optimizer.py",), "a loop of copy_"
    ),
    Private("torch._foreach_div_", ("commgrid/data_parallel/reducer.py",), "a loop of div_"),
    Private("torch._foreach_mul_", ("commgrid/data_parallel/reducer.py",), "a loop of mul_"),
    Private("torch._foreach_norm", ("commgrid/data_parallel/verdict.py",), "a loop of norm"),
    Private(
        "torch._foreach_zero_",
        ("commgrid/data_parallel/arrivals.py", _KEPT),
        "a loop of zero_",
    ),
    # -- bridges --------------------------------------------------------------------------------
    Private(
        "torch.Tensor._version",
        ("commgrid/bridge/links.py",),
        "nothing: changes in place are not noticed",
    ),
    # -- attention ------------------------------------------------------------------------------
    Private(
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
        (_KERNEL,),
        "its successor that gives the log-sum-exp, or `_Products` beside it",
    ),
    Private(
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
        (_KERNEL,),
        "its successor that gives the log-sum-exp, or `_Products` beside it",
    ),
    Private(
        "torch.ops.aten._flash_attention_forward",
        (_KERNEL,),
        "its successor that gives the log-sum-exp, or `_Products` beside it",
    ),
    Private(
        "torch.ops.aten._flash_attention_backward",
        (_KERNEL,),
        "its successor that gives the log-sum-exp, or `_Products` beside it",
    ),
    Private(
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        (_ARCHIVE,),
        "torch's own writer for saves in the background too, which costs training more",
    ),
    Private(
        "torch.ops.aten._scaled_dot_product_cudnn_attention",
        (_KERNEL,),
        "flash attention, which takes twice the time there",
    ),
    Private(
        "torch.ops.aten._scaled_dot_product_cudnn_attention_backward",
        (_KERNEL,),
        "flash attention, which takes twice the time there",
    ),
    Private(
        "torch._fused_sdp_choice",
        (_KERNEL,),
        "flash attention, which takes twice the time there",
    ),
    Private(
        "torch.ops.aten._scaled_dot_product_efficient_attention",
        (_KERNEL,),
        "its successor that gives the log-sum-exp, or `_Products` beside it",
    ),
    Private(
        "torch.ops.aten._scaled_dot_product_efficient_attention_backward",
        (_KERNEL,),
        "its successor that gives the log-sum-exp, or `_Products` beside it",
    ),
)


def as_markdown() -> str:
    """The table of the documentation page."""
    lines = ["| name | used in | when it goes |", "|---|---|---|"]
    for row in ROWS:
        files = ", ".join(f"`{file.removeprefix('commgrid/')}`" for file in row.files)
        since = "" if row.first == CHECKED[0] else f" (from {row.first} on)"
        lines.append(f"| `{row.name}`{since} | {files} | {row.then} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(as_markdown())
