"""Bugs that train, written into copies of two programs: each is found, and its culprit named."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.audit.audited import MEGATRON, TEXT, TRAIN, part, with_bug


@dataclass(frozen=True)
class Bug:
    """A change of a program's text, and what an audit is to say of it.

    Args:
        name: what it is.
        grid: on which it shows.
        file, old, new: what is replaced.
        found: the first finding's name, axes and kind.
        flags: of the program beside the usual ones.
    """

    name: str
    grid: str
    file: str
    old: str
    new: str
    found: tuple[str, tuple[str, ...], str]
    flags: str = ""
    script: str = "train_gpt.py"
    reference: str = "dp=1"
    more: dict[str, tuple[str, str]] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


TRAIN_GPT = [
    Bug(
        "a norm's gradient is not summed over tp",
        "tp=2 --sequence-parallel",
        "gpt_training/model.py",
        'return mark_parameters(made, partial="tp") if args.sequence_parallel else made',
        "return made",
        ("norm.weight", ("tp",), "not reduced"),
    ),
    Bug(
        "dp instead of dp_cp",
        "dp=2 cp=2",
        "gpt_training/trainer.py",
        "GradientReducer(self.model, shard=args.zero1)",
        'GradientReducer(self.model, "dp", shard=args.zero1)',
        ("head.weight", ("cp",), "wrong group"),
    ),
    Bug(
        "gradients are not summed over dp at all",
        "dp=2",
        "gpt_training/trainer.py",
        "GradientReducer(self.model, shard=args.zero1)",
        'GradientReducer(self.model, "cp", shard=args.zero1)',
        ("head.weight", ("dp",), "not reduced"),
    ),
    Bug(
        "tied embeddings whose copies are not summed",
        "pp=2",
        "gpt_training/model.py",
        "        if args.tie_embeddings:  # first",
        "        if False:  # first",
        ("tokens.weight", ("pp",), "not reduced"),
        flags="--tie-embeddings",
    ),
    Bug(
        "dropout seeded alike",
        "dp=2",
        "gpt_training/trainer.py",
        "set_random_seed(args.seed)  # of",
        "torch.manual_seed(args.seed)  # of",
        ("drop", ("dp",), "seeded alike"),
        flags="--dropout 0.1",
    ),
    Bug(
        "dropout seeded unlike",
        "tp=2",
        "gpt_training/trainer.py",
        "set_random_seed(args.seed)  # of",
        "torch.manual_seed(args.seed + grid.rank)  # of",
        ("drop", ("tp",), "seeded unlike"),
        flags="--dropout 0.1",
    ),
    Bug(
        "a batch is not shared out",
        "dp=2",
        "gpt_training/data.py",
        'batch.chunk(grid.size("dp"))[grid.get_local_rank("dp")]',
        'batch.chunk(grid.size("dp"))[0]',
        ("input 0", ("dp",), "not sharded"),
    ),
    Bug(
        "each rank draws its own batch",
        "dp=2",
        "gpt_training/data.py",
        "args.seed * 1_000_003 + step)",
        "(args.seed + commgrid.get_grid().rank) * 1_000_003 + step)",
        ("input 0", ("dp",), "batch"),
    ),
    Bug(
        "a loss is not averaged",
        "dp=2",
        "gpt_training/trainer.py",
        'self.reducer.finish(count=tokens / self.grid.size("dp_cp"))',
        'self.reducer.finish(count=tokens / self.grid.size("dp_cp") ** 2)',
        ("of every parameter", ("dp",), "not averaged"),
    ),
    Bug(
        "norms are reduced twice",
        "dp=2",
        "gpt_training/trainer.py",
        'self.reducer.finish(count=tokens / self.grid.size("dp_cp"))',
        'self.reducer.finish(count=tokens / self.grid.size("dp_cp"))\n'
        "            for name, parameter in self.model.named_parameters():\n"
        '                if "norm" in name:\n'
        '                    group = self.grid.get_group("dp")\n'
        "                    torch.distributed.all_reduce(parameter.grad, group=group)",
        ("norm.weight", ("dp",), "reduced twice"),
    ),
    Bug(
        "a router is not synchronised",
        "tp=2 --sequence-parallel",
        "gpt_training/model.py",
        "self.mlp = experts(args) if args.experts else MLP(args)",
        "self.mlp = experts(args) if args.experts else MLP(args)\n"
        "        if args.experts:\n"
        "            for part in self.mlp.router.modules():\n"
        '                vars(part).pop("_commgrid_mark", None)',
        ("blocks.1.mlp.router.weight", ("tp",), "not reduced"),
        flags="--experts 2",
    ),
    Bug(
        "weights that begin differently on replicas",
        "dp=2",
        "gpt_training/trainer.py",
        "        self.pipeline = Pipeline(",
        "        with torch.no_grad():\n"
        "            self.chunks[0].positions.weight.add_(grid.rank * 1e-3)\n"
        "        self.pipeline = Pipeline(",
        ("positions.weight", ("dp",), "seed"),
    ),
    Bug(
        "a bias is added on every tp rank",
        "tp=2",
        "gpt_training/model.py",
        "return self.down(F.gelu(self.up(x)))",
        'return self.down(F.gelu(self.up(x))) + self.down.bias * (commgrid.size("tp") - 1)',
        ("blocks.1.mlp.down.bias", ("tp",), "reduced twice"),
    ),
    Bug(
        "positions are not offset under cp",
        "cp=2",
        "gpt_training/data.py",
        "sharding.position_ids(rank, device)",
        "sharding.position_ids(0, device)",
        ("positions", ("cp",), "forward"),
    ),
    Bug(
        "positions are not offset under sequence parallelism",
        "tp=2 --sequence-parallel",
        "gpt_training/model.py",
        "positions[first : first + len(x)]",
        "positions[: len(x)]",
        ("positions", ("tp",), "forward"),
    ),
    Bug(
        "targets of another rank",
        "cp=2",
        "gpt_training/data.py",
        "sharding.shard(targets, rank)",
        "sharding.shard(targets, 0)",
        ("", ("cp",), "loss"),
    ),
    Bug(
        "a learning rate of each rank's own",
        "dp=2",
        "gpt_training/trainer.py",
        'group["lr"] = learning_rate(step, self.args)',
        'group["lr"] = learning_rate(step, self.args) * (1 + self.grid.rank)',
        ("tokens.weight", ("dp",), "copies"),
    ),
]

MEGATRON_GPT = [
    Bug(
        "a norm's gradient is not summed over tp",
        "tp=2 --sequence-parallel",
        "megatron_gpt.py",
        "parameter.sequence_parallel = config.sequence_parallel",
        "parameter.sequence_parallel = False",
        ("decoder.final_layernorm.weight", ("tp",), "not reduced"),
    ),
    Bug(
        "gradients are never reduced",
        "dp=2 --microbatches 2",
        "megatron_gpt.py",
        "config.finalize_model_grads_func = partial(finalize_model_grads, **handed)",
        "config.finalize_model_grads_func = lambda *_, **__: None",
        ("decoder.final_layernorm.weight", ("dp",), "not reduced"),
    ),
    Bug(
        "a wrong embedding group",
        "pp=2",
        "megatron_gpt.py",
        "    parallel_state.initialize_model_parallel(**sizes)\n",
        "    parallel_state.initialize_model_parallel(\n"
        "        **sizes, get_embedding_ranks=lambda ranks: [ranks[0]]\n    )\n",
        ("embedding.word_embeddings.weight", ("pp",), "not reduced"),
    ),
    Bug(
        "expert gradients over dp",
        "dp=2 ep=2 --microbatches 2",
        "megatron_gpt.py",
        "        ddp = DistributedDataParallelConfig(",
        "        for parameter in model.parameters():\n"
        "            parameter.allreduce = True\n"
        "        ddp = DistributedDataParallelConfig(",
        ("decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight", ("dp",), "wrong group"),
        flags="--experts 2",
    ),
    Bug(
        "a batch is not shared out",
        "dp=2 --microbatches 2",
        "megatron_gpt.py",
        "data = [batches(args, step, dp.rank()) for _ in chunks]",
        "data = [batches(args, step, 0) for _ in chunks]",
        ("input 0", ("dp",), "not sharded"),
    ),
]


def audited(bug: Bug, folder: Path) -> None:
    script = with_bug(bug.script, {bug.file: (bug.old, bug.new), **bug.more}, folder / "bug")
    usual = f"{TRAIN} {TEXT}" if bug.script == "train_gpt.py" else MEGATRON
    found = part(
        bug.reference, bug.grid, folder, script, f"{usual} {bug.flags}".split(), steps=1,
        same_weights=bug.script != "train_gpt.py",
    )  # fmt: skip
    assert found.findings, "it was not found"
    first = found.findings[0]
    assert (first.name, first.axes, first.kind) == bug.found, "\n".join(
        each.text for each in found.findings[:5]
    )


@pytest.mark.full("*")
@pytest.mark.parametrize("bug", TRAIN_GPT, ids=str)
def test_a_bug_in_train_gpt_is_named(bug: Bug, tmp_path: Path) -> None:
    audited(bug, tmp_path)


@pytest.mark.full("*")
@pytest.mark.parametrize("bug", MEGATRON_GPT, ids=str)
def test_a_bug_in_a_megatron_gpt_is_named(bug: Bug, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    from dataclasses import replace

    audited(replace(bug, script="megatron_gpt.py"), tmp_path)
