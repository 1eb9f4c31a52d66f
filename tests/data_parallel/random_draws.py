"""Description of a randomised run: a model, its sharding and its training, from one seed.

Nothing here knows torch or a grid: a draw is plain values, so that its repr is the whole story.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

STEPS = 6
ORDER = "tp-cp-ep-dp-pp"
WIDTH, INNER, VOCABULARY, LENGTH = 8, 12, 11, 4  # 11: padded on 2 and 4 ranks

# An optimizer divides what rounding leaves of a gradient that should be zero, some 1e-17, by no
# less than eps: 1e-6 keeps that far below what is compared, where the default of 1e-8 would not.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-6},
    "Adam": {"lr": 1e-2, "amsgrad": True, "eps": 1e-6},
    "SGD": {"lr": 5e-2, "momentum": 0.9, "nesterov": True},
    "RMSprop": {"lr": 1e-3, "momentum": 0.5, "eps": 1e-6},
}


@dataclass(frozen=True)
class Cut:
    """How ranks share the model and its data.

    Args:
        world, tp, cp, pp: sizes; dp is the rest. Ranks of cp see other microbatches, as dp's do.
        ep, etp: of the expert region; 0: there is none.
        sequence_parallel: whether activations are sharded over tp outside the layers.
        order: of the axes.
    """

    world: int
    tp: int
    cp: int
    pp: int
    ep: int
    etp: int
    sequence_parallel: bool
    order: str

    @property
    def num_data(self) -> int:
        """How many ranks, or groups of tp and pp ranks, see data of their own."""
        return self.world // self.tp // self.pp


@dataclass(frozen=True)
class Block:
    """A residual part of the model: its output is added to its input.

    Args:
        kind: "mlp" (column, then row layer), "gathered" (the same, each by itself), "linear",
            "norm", "pair" (two linear layers that share their weight) or "moe".
        bias: whether its layers have biases.
        skip_bias: the row layer returns its bias, and the block adds it.
        activation: by its name in torch.nn.functional.
        when: it is used "always", "never", in "some steps", or in the "first microbatch" of each.
        steps: which, for "some steps".
        frozen: names of its parts whose parameters are not trained.
        recompute: its activations are computed again in backward.
        options: of a moe block, further arguments of MoELayer.
    """

    kind: str
    bias: bool = True
    skip_bias: bool = False
    activation: str = "gelu"
    when: str = "always"
    steps: tuple[int, ...] = ()
    frozen: tuple[str, ...] = ()
    recompute: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def is_used(self, step: int, microbatch: int) -> bool:
        """Whether a microbatch of a step passes through it; -1 is one of evaluation."""
        if self.when == "some steps":
            return step in self.steps
        if self.when == "first microbatch":
            return microbatch <= 0
        return self.when == "always"


@dataclass(frozen=True)
class Training:
    """The course of 6 steps.

    Args:
        microbatches: for each step, how many each data rank has.
        counting: "tokens": losses are sums, and `finish` gets the number of tokens; "equal": they
            are means.
        wrapper: "zero1" (ShardedOptimizer over a sharding reducer), "masters" (over another), or
            "plain" (torch's own optimizer).
        optimizer: a name in OPTIMIZERS.
        groups: "one", "two" of other rates, "subset" (some parameters in none), or "apart" (an
            optimizer each).
        overlap: the ShardedOptimizer's.
        bucket_bytes: the reducer's.
        schedule: "" (none), "decay", or "cycle".
        norm: "" (not asked for), "reducer", "function" (of `.grad`), or "clip".
        max_norm: for "clip".
        zero_grad: "optimizer", "model", or "never".
        evaluation: what is done after some steps: any of "model", "part" (one block by itself) and
            "read" (parameters themselves).
        evaluated: after which steps.
        average: "" (none), "ema" (torch's AveragedModel), or "copy" (copy.deepcopy each step).
        resume: "" (no), "rewind" (a saved state is loaded after a step that is not to count), or
            "rebuild" (into a new model, reducer and optimizer), before step 3.
        abandoned: a backward of step 2 is given up: "" (no), "summed", "accumulated" (in no_sync).
        schedule_of_stages: the pipeline's.
    """

    microbatches: tuple[tuple[int, ...], ...]
    counting: str
    wrapper: str
    optimizer: str
    groups: str
    overlap: bool
    bucket_bytes: int
    schedule: str
    norm: str
    max_norm: float
    zero_grad: str
    evaluation: tuple[str, ...]
    evaluated: tuple[int, ...]
    average: str
    resume: str
    abandoned: str
    schedule_of_stages: str


@dataclass(frozen=True)
class Draw:
    """All of it.

    Args:
        seed: from which the rest follows.
        cut: over ranks.
        blocks: of the model, between an embedding and a head.
        path: in which order blocks are passed through; one may come twice.
        embedding: "vocabulary" (sharded) or "plain" (nn.Embedding).
        tied: the head uses the embedding's weight.
        frozen_embedding: which is then not trained.
        training: the steps.
    """

    seed: int
    cut: Cut
    blocks: tuple[Block, ...]
    path: tuple[int, ...]
    embedding: str
    tied: bool
    frozen_embedding: bool
    training: Training


def draw(seed: int) -> Draw:
    """The same for the same seed, wherever it is called."""
    dice = random.Random(f"commgrid {seed}")
    experts = dice.random() < 0.3
    cut = _cut(dice, experts)
    blocks = _blocks(dice, cut, experts)
    path = tuple(range(len(blocks)))
    if cut.pp == 1 and dice.random() < 0.4:
        path += (dice.randrange(len(blocks)),)
    tied = dice.random() < (0.7 if cut.pp > 1 else 0.3)
    frozen_embedding = not tied and cut.pp == 1 and dice.random() < 0.2
    plain = not tied and not cut.sequence_parallel and dice.random() < 0.3
    return Draw(
        seed, cut, blocks, path, "plain" if plain else "vocabulary", tied, frozen_embedding,
        _training(dice, cut, experts),
    )  # fmt: skip


def _divisors(number: int, *candidates: int) -> list[int]:
    return [one for one in candidates if number % one == 0]


def _cut(dice: random.Random, experts: bool) -> Cut:
    world = dice.choices((1, 2, 3, 4, 6, 8), (3, 34, 5, 46, 4, 8))[0]
    pp = 2 if world % 2 == 0 and dice.random() < 0.15 else 1
    tp = dice.choice(_divisors(world // pp, 1, 2, 2, 4))
    cp = dice.choice(_divisors(world // pp // tp, 1, 1, 2))
    ep = etp = 0
    if experts:
        etp = dice.choice(_divisors(world // pp, 1, 1, 2))
        ep = dice.choice(_divisors(world // pp // etp, 1, 2, 2, 4))
    sequence_parallel = tp > 1 and dice.random() < 0.5
    order = dice.choice((ORDER, ORDER, "tp-cp-ep-pp-dp"))
    if experts and pp > 1:
        order = ORDER  # stages of both regions are the same ranks if pp comes last
    return Cut(world, tp, cp, pp, ep, etp, sequence_parallel, order)


def _blocks(dice: random.Random, cut: Cut, experts: bool) -> tuple[Block, ...]:
    count = dice.randint(2, 4)
    kinds = dice.choices(("mlp", "gathered", "linear", "norm", "pair"), (5, 1, 2, 3, 2), k=count)
    if experts:
        kinds[dice.randrange(count)] = "moe"
    return tuple(_block(dice, cut, kind) for kind in kinds)


def _block(dice: random.Random, cut: Cut, kind: str) -> Block:
    if kind == "gathered" and cut.sequence_parallel:
        kind = "mlp"
    parts = {
        "mlp": ("up", "down"), "gathered": ("up", "down"), "linear": ("linear",),
        "norm": ("norm",), "pair": ("first", "second"), "moe": ("moe.experts", "moe.router"),
    }[kind]  # fmt: skip
    when = dice.choices(
        ("always", "never", "some steps", "first microbatch"), (12, 2, 3, 2)
    )[0]  # fmt: skip
    frozen: tuple[str, ...] = ()
    if dice.random() < (0.5 if kind == "moe" else 0.25):
        frozen = (dice.choice(parts),) if kind != "pair" else parts
    options: dict[str, Any] = {}
    if kind == "moe":
        options["softmax_over"] = dice.choice(("chosen", "all"))
        options["gated"] = dice.random() < 0.5
        if dice.random() < 0.5:
            options["shared_ffn_hidden"] = INNER
        if dice.random() < 0.5:
            options |= {"aux_loss": 0.1, "z_loss": 0.01}
    return Block(
        kind,
        bias=dice.random() < 0.7,
        skip_bias=kind == "mlp" and dice.random() < 0.3,
        activation=dice.choice(("gelu", "tanh", "silu")),
        when=when,
        steps=tuple(sorted(dice.sample(range(STEPS), 3))) if when == "some steps" else (),
        frozen=frozen,
        recompute=dice.random() < 0.15,
        options=tuple(options.items()),
    )


def _training(dice: random.Random, cut: Cut, experts: bool) -> Training:
    counting = dice.choice(("tokens", "tokens", "equal"))
    wrapper = dice.choices(("zero1", "masters", "plain"), (5, 2, 3))[0]
    schedule = dice.choice(("", "", "decay", "cycle"))
    resume = dice.choices(("", "rewind", "rebuild"), (6, 2, 2))[0]
    groups = dice.choice(("one", "two", "two", "subset", "apart"))
    norms = ("", "reducer", "clip", "clip", *(["function"] if wrapper == "plain" else []))
    evaluation = tuple(what for what in ("model", "part", "read") if dice.random() < 0.5)
    return Training(
        microbatches=tuple(_step(dice, cut, counting, experts) for _ in range(STEPS)),
        counting=counting,
        wrapper=wrapper,
        optimizer=dice.choice(sorted(OPTIMIZERS)),
        groups="two" if groups == "apart" and wrapper != "plain" else groups,
        overlap=dice.random() < 0.6,
        bucket_bytes=dice.choice((1, 512, 2048, 2**20)),
        schedule=schedule,
        norm=dice.choice(norms),
        max_norm=dice.choice((0.05, 0.3, 100.0)),
        zero_grad=dice.choice(("optimizer", "optimizer", "model", "never")),
        evaluation=evaluation,
        evaluated=tuple(sorted(dice.sample(range(STEPS), 3))) if evaluation else (),
        average=dice.choice(("", "ema", "copy")),
        resume=resume,
        abandoned=dice.choices(("", "summed", "accumulated"), (6, 1, 1))[0],
        schedule_of_stages=dice.choice(("1f1b", "gpipe", "zb-h1")),
    )


def _step(dice: random.Random, cut: Cut, counting: str, experts: bool) -> tuple[int, ...]:
    """Each data rank's microbatches. Experts' ranks wait for each other in each of them."""
    if experts:
        return (dice.randint(1, 3),) * cut.num_data
    if counting == "equal":
        return tuple(dice.randint(1, 3) for _ in range(cut.num_data))
    counts = [dice.choice((0, 1, 1, 2, 3)) for _ in range(cut.num_data)]
    counts[dice.randrange(cut.num_data)] += not any(counts)
    return tuple(counts)


def features(draw: Draw) -> frozenset[str]:
    """Names of the features that this draw has."""
    cut, training = draw.cut, draw.training
    found = {
        "tp 1": cut.tp == 1, "tp 2": cut.tp == 2, "tp 4": cut.tp == 4, "cp": cut.cp > 1,
        "dp": cut.num_data // cut.cp > 1, "pp": cut.pp > 1, "ep": cut.ep > 1, "etp": cut.etp > 1,
        "experts beside tp": cut.ep > 0 and cut.tp > 1,
        "sequence parallel": cut.sequence_parallel,
        "another order": cut.order != ORDER,
        "tied head": draw.tied and cut.pp == 1, "tied over stages": draw.tied and cut.pp > 1,
        "plain embedding": draw.embedding == "plain",
        "frozen embedding": draw.frozen_embedding,
        "a block used twice": len(draw.path) > len(draw.blocks),
        "partial gradients": cut.sequence_parallel
        and any(
            block.kind in ("linear", "norm", "pair") and block.when != "never"
            for block in draw.blocks
        ),
        "microbatches that vary by rank": any(len(set(one)) > 1 for one in training.microbatches),
        "microbatches that vary by step": len(set(training.microbatches)) > 1,
        "a rank without microbatches": any(0 in one for one in training.microbatches),
        training.wrapper: True, training.optimizer: True,
        f"{training.groups} groups": True,
        f"counting {training.counting}": True,
        f"zero_grad {training.zero_grad}": True,
        "overlap": training.overlap and training.wrapper == "zero1" and cut.num_data > 1,
        "no overlap": not training.overlap and training.wrapper == "zero1" and cut.num_data > 1,
        "read after overlap": training.overlap
        and training.wrapper == "zero1"
        and cut.num_data > 1
        and ("read" in training.evaluation or training.average != ""),
        f"gradient norm: {training.norm or 'none'}": True,
        f"schedule: {training.schedule or 'none'}": True,
        f"average: {training.average or 'none'}": True,
        f"resume: {training.resume or 'none'}": True,
        f"given up: {training.abandoned or 'none'}": True,
        **{f"evaluate {what}": True for what in training.evaluation},
    }  # fmt: skip
    for block in draw.blocks:
        found |= {
            block.kind: True, f"used {block.when}": True, "recomputed": block.recompute,
            "no bias": not block.bias, "skipped bias": block.skip_bias,
            "frozen slices": bool({"up", "down"} & set(block.frozen)) and cut.tp > 1,
            "frozen experts": "moe.experts" in block.frozen,
            "other frozen": bool({"linear", "norm", "first"} & set(block.frozen)),
        }  # fmt: skip
        found = {name: True for name, has in found.items() if has}
        for name, value in block.options:
            found[f"{name} {value}" if name == "softmax_over" else name] = bool(value)
    return frozenset(name for name, has in found.items() if has)
