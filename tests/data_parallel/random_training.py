"""A draw trained on a rank of its grid, as a careful user of commgrid would write it.

A third of the draws is written as a careless one would: `misuse_of`. Each is right, or refused on
every rank.
"""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import commgrid
from commgrid import CommGridError
from commgrid.data_parallel import (
    GradientReducer,
    ShardedOptimizer,
    clip_gradients,
    gradient_norm,
)
from commgrid.expert import set_loss_scale
from commgrid.pipeline import Pipeline
from tests.data_parallel.random_draws import LENGTH, OPTIMIZERS, STEPS, Draw, draw
from tests.data_parallel.random_models import (
    Batch,
    Cuts,
    Model,
    ParallelKit,
    batch_of,
    cuts_of,
    full_weights,
    parameter_groups,
    probe_of,
    scheduler_of,
    slice_of,
)

_GROUPS = ("group tp", "group dp")

GIVEN_UP = 2
"""The step with a backward that is given up, where the draw has one."""
RESUMED = 3
"""The step before which a saved state is loaded, where the draw does that."""


MISUSED = 1
"""The step in which a careless program does something else once."""
MISUSES = (
    "finish twice", "identity hooks", "gradients reassigned", "zeros kept", "torch's clipping",
    "clipping before finish", "other batches along tp", "no finish", "group tp", "group dp",
)  # fmt: skip


def misuse_of(draw: Draw) -> str | None:
    """The careless act of a draw; None: it has none."""
    if draw.seed % 3 != 1:
        return None
    act, cut = MISUSES[draw.seed // 3 % len(MISUSES)], draw.cut
    if act == "torch's clipping" and cut.pp > 1:
        return None  # not noticed: each stage clips alone, and stages have no copies to compare
    everyone_has_some = all(draw.training.microbatches[MISUSED])
    if act in ("clipping before finish", "no finish") and not everyone_has_some:
        return None  # ranks without a gradient go on and wait for the others
    if act == "group tp" and cut.tp == 1:
        return None  # a group of one rank says that no data is to be averaged
    return act


@dataclass
class Found:
    """The results of a run on one rank.

    Args:
        data_rank: which data it trained with.
        losses: of each step, of its own data; None where another stage has them.
        norms: of each step that asked.
        evaluations: after which step, of what (a data rank's loss, a block, a parameter), and the
            numbers, with how they are sliced.
        parameters, averages: slices at the end, and of the EMA or the copy of each step.
        cuts: how parameters are sliced.
        refused: the error of a careless program.
    """

    data_rank: int
    refused: str | None = None
    losses: list[float | None] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    evaluations: list[tuple[int, str, Tensor, Cuts]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    averages: list[dict[str, Tensor]] = field(default_factory=list)
    cuts: dict[str, Cuts] = field(default_factory=dict)


def train_all(seeds: list[int]) -> list[Found]:
    """On each rank: one draw after the other, each on a grid of its own."""
    found = []
    for seed in seeds:
        this = draw(seed)
        try:
            found.append(train(this))
        except Exception as error:
            raise AssertionError(f"draw {seed}: {this}") from error
        gc.collect()  # a refused run's reducer, which is in cycles with its error
    return found


def train(draw: Draw) -> Found:
    """Six steps of a draw on this rank."""
    cut = draw.cut
    options: dict[str, Any] = {"ep": cut.ep, "etp": cut.etp} if cut.ep else {}
    if cut.pp > 1:
        options["groups"] = {"embedding": {"of": "pp", "pick": ["first", "last"]}}
    commgrid.initialize(tp=cut.tp, cp=cut.cp, pp=cut.pp, order=cut.order, **options)
    try:
        return _Run(draw).through()
    except CommGridError as error:
        if misuse_of(draw) is None:
            raise
        return Found(0, refused=f"{type(error).__name__}: {error}")
    finally:
        commgrid.destroy()


class _Run:
    """A model with its reducer and optimizers, and what is done with them."""

    def __init__(self, draw: Draw) -> None:
        self.draw, self.plan, self.misuse = draw, draw.training, misuse_of(draw)
        self.grid = commgrid.get_grid()
        self.found = Found(self.grid.get_local_rank("dp_cp"))
        self._build()
        self.found.cuts = cuts_of(self.model)
        self.ema: AveragedModel | None = None
        if self.plan.average == "ema":
            self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.7))

    def _build(self) -> None:
        draw, plan, stages = self.draw, self.plan, self.draw.cut.pp
        kit = ParallelKit(draw.cut.sequence_parallel)
        self.model = Model(draw, kit, self.grid.get_local_rank("pp"), stages)
        full, cuts = full_weights(draw), cuts_of(self.model)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(slice_of(full[name], cuts[name]))
        if self.misuse == "identity hooks":
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.register_hook(lambda gradient: gradient.clone())
        group = self.misuse.removeprefix("group ") if self.misuse in _GROUPS else "dp_cp"
        self.reducer = GradientReducer(
            self.model, group, shard=plan.wrapper == "zero1", bucket_bytes=plan.bucket_bytes
        )
        self.sharded: ShardedOptimizer | None = None
        groups = parameter_groups(draw, self.model)
        kind, options = getattr(torch.optim, plan.optimizer), OPTIMIZERS[plan.optimizer]
        self.optimizers: list[torch.optim.Optimizer]
        if plan.wrapper != "plain":
            self.sharded = ShardedOptimizer(
                self.reducer, kind, groups=groups, overlap=plan.overlap, **options
            )
            self.optimizers = [self.sharded]
        elif plan.groups == "apart":
            self.optimizers = [kind([group], **options) for group in groups]
        else:
            self.optimizers = [kind(groups, **options)]
        made = [scheduler_of(draw, optimizer) for optimizer in self.optimizers]
        self.schedulers = [scheduler for scheduler in made if scheduler is not None]

    def through(self) -> Found:
        """All steps, and what is left after them."""
        for step in range(STEPS):
            self.model.step = step
            if step == RESUMED and self.plan.resume:
                self._resume(step)
            if step == GIVEN_UP and self.plan.abandoned:
                self._give_up(step)
            loss, norm = self._step("train", step)
            self.found.losses.append(loss)
            self.found.norms += [] if norm is None else [norm]
            for scheduler in self.schedulers:
                scheduler.step()
            self._average()
            if step in self.plan.evaluated:
                self._evaluate(step)
        state = self.model.state_dict()  # waits by itself
        self.found.parameters = {name: state[name].clone() for name in self.found.cuts}
        return self.found

    # -- a step -------------------------------------------------------------------------

    def _step(self, use: str, step: int) -> tuple[float | None, float | None]:
        number = self.plan.microbatches[step][self.found.data_rank]
        batches = [batch_of(self.draw, use, step, self.found.data_rank, i) for i in range(number)]
        act = self.misuse if use == "train" and step == MISUSED else None
        if act == "other batches along tp" and self.grid.get_local_rank("tp"):
            batches = [
                batch_of(self.draw, "spoil", step, self.found.data_rank, i) for i in range(number)
            ]
        loss = self._backward(batches)
        count = sum(int((target >= 0).sum()) for _, target in batches)
        given = count if self.plan.counting == "tokens" else None
        if act == "clipping before finish":
            try:
                self.reducer.clip_gradients(self.plan.max_norm)
            except CommGridError:
                self.reducer.zero_grad()  # sums may be under way
                raise
        for _ in range({"no finish": 0, "finish twice": 2}.get(act or "", 1)):
            self.reducer.finish(given)
        if act == "gradients reassigned":
            for parameter in self.model.parameters():
                parameter.grad = None if parameter.grad is None else parameter.grad.clone()
        if act == "torch's clipping" and self.plan.norm == "clip":
            norm: float | None = clip_grad_norm_(self.model.parameters(), self.plan.max_norm).item()
        else:
            norm = self._norm()
        for optimizer in self.optimizers:
            optimizer.step()
        if act == "zeros kept" and self.plan.zero_grad:
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=False)
        elif self.plan.zero_grad == "optimizer":
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        elif self.plan.zero_grad == "model":
            self.model.zero_grad()
        return loss, norm

    def _backward(self, batches: list[Batch]) -> float | None:
        """The sum of this rank's losses; None where it is not on the last stage."""

        def loss_of(logits: Tensor, target: Tensor) -> Tensor:
            loss = self.model.kit.loss(logits, target)
            return loss if self.plan.counting == "tokens" else loss / target.numel() / len(batches)

        if self.plan.counting != "tokens" and batches:
            set_loss_scale(self.model, 1 / len(batches))
        if self.draw.cut.pp > 1:
            if not batches:
                return 0.0 if self.model.is_last else None
            pipeline = Pipeline(
                self.model, self.plan.schedule_of_stages, num_microbatches=len(batches),
                loss=loss_of, reducer=self.reducer,
            )  # fmt: skip
            losses = pipeline.step(
                [tokens for tokens, _ in batches],
                [target for _, target in batches],
                kwargs=[{"microbatch": i} for i in range(len(batches))],
            )
            return None if losses is None else losses.sum().item()
        total = 0.0
        for i, (tokens, target) in enumerate(batches):
            with self.reducer.no_sync() if i < len(batches) - 1 else nullcontext():
                loss = loss_of(self.model(tokens, i), target)
                loss.backward()
            total += loss.item()
        return total

    def _norm(self) -> float | None:
        if self.plan.norm == "clip":
            if self.plan.wrapper == "plain" and self.draw.seed % 2:
                return clip_gradients(self.model, self.plan.max_norm).item()
            return self.reducer.clip_gradients(self.plan.max_norm).item()
        if self.plan.norm == "function":
            return gradient_norm(self.model).item()
        return self.reducer.gradient_norm().item() if self.plan.norm else None

    def _give_up(self, step: int) -> None:
        """A backward whose gradients are dropped, on all ranks."""
        batches = [batch_of(self.draw, "spoil", step, self.found.data_rank, 0)]
        accumulated = self.plan.abandoned == "accumulated"
        with self.reducer.no_sync() if accumulated else nullcontext():
            self._backward(batches)
        if self.sharded is not None:
            self.sharded.zero_grad()
        else:
            self.reducer.zero_grad()

    def _resume(self, step: int) -> None:
        """Saves everything, takes a step that is not to count, and loads it again."""
        saved = copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            }
        )
        self._step("spoil", step)
        if self.plan.resume == "rebuild":
            self.reducer.close()
            self._build()
            self.model.step = step
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        for scheduler, state in zip(self.schedulers, saved["schedulers"], strict=True):
            scheduler.load_state_dict(state)

    # -- between steps ------------------------------------------------------------------

    def _wait(self) -> None:
        """Called before parameters are read, as with overlap they are gathered during forward."""
        if self.sharded is not None and self.plan.overlap:
            self.sharded.wait()

    def _average(self) -> None:
        if self.ema is not None:
            self._wait()
            self.ema.update_parameters(self.model)
            self._keep(self.ema.module)
        elif self.plan.average == "copy":
            self._wait()
            self._keep(copy.deepcopy(self.model))

    def _keep(self, model: nn.Module) -> None:
        self.found.averages.append(
            {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        )

    @torch.no_grad()
    def _evaluate(self, step: int) -> None:
        rank, cut = self.found.data_rank, self.draw.cut
        kept = self.found.evaluations
        if "part" in self.plan.evaluation:  # first: the part waits for its own weights itself
            index, part = next(iter(self.model.blocks.items()))
            part.eval()
            probe = probe_of(self.draw)
            cuts: Cuts = ()
            if cut.sequence_parallel:
                cuts = ((0, self.grid.get_local_rank("tp"), cut.tp),)
            kept.append((step, f"block {index}", part(slice_of(probe, cuts)).clone(), cuts))
            part.train()
        if "read" in self.plan.evaluation:
            self._wait()
            for name, parameter in self.model.named_parameters():
                kept.append((step, name, parameter.detach().clone(), self.found.cuts[name]))
        if "model" in self.plan.evaluation:
            self.model.eval()
            loss = self._forward(batch_of(self.draw, "evaluate", step, rank, 0))
            if loss is not None:
                kept.append((step, f"loss of data rank {rank}", loss, ()))
            self.model.train()

    def _forward(self, batch: Batch) -> Tensor | None:
        tokens, target = batch
        assert len(tokens) == LENGTH
        if self.draw.cut.pp == 1:
            return self.model.kit.loss(self.model(tokens), target)
        pipeline = Pipeline(self.model, num_microbatches=1, loss=self.model.kit.loss)
        losses = pipeline.evaluate([tokens], [target])
        return None if losses is None else losses.sum()
