"""What train_gpt says: on the terminal, in --metrics and for TensorBoard, on one rank."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import commgrid
from commgrid import checkpoint
from commgrid.layout.rank_text import describe_ranks
from commgrid.recovery import Recovered
from commgrid.transfer import TransferPlan
from gpt_training.sequences import about


class Log:
    """A run's lines and files; on other ranks than the first it says nothing.

    Args:
        args: the command line's.
        grid: that trains.
        device: this rank's.
    """

    def __init__(
        self, args: argparse.Namespace, grid: commgrid.HyperCommGrid, device: torch.device
    ) -> None:
        self.args, self.grid, self.device = args, grid, device
        self.speaks = grid.get_local_rank() == 0
        self.started = time.perf_counter()
        self.first = self.last = 0
        self.loss: float | None = None
        self.saved: tuple[int, str] | None = None
        self.unsaid: list[float] = []
        self.board: Any = None

    def say(self, text: str) -> None:
        if self.speaks:
            print(text, flush=True)

    # -- before the first step ----------------------------------------------------------

    def begin(self, parameters: int, held: int) -> None:
        """What is trained on what.

        Args:
            parameters: of the whole model.
            held: the most that a rank has of them.
        """
        args, grid = self.args, self.grid
        self.say(f"grid   {axes_of(grid)} ({self.device.type})")
        shared = "" if held == parameters else f", at most {held:,} on a rank"
        mlp = f", {args.experts} experts each" if args.experts else ""
        self.say(
            f"model  {parameters:,} parameters{shared}: {several(args.layers, 'block')} of width "
            f"{args.hidden}{mlp}, {args.dtype}"
        )
        for line in about(args, self.device.type):
            self.say(line)
        self.say(
            f"steps  {args.steps:,} of {self.tokens:,} tokens each: {args.batch_size} sequences of "
            f"{args.seq_len} bytes"
        )

    def resumed(self, step: int, changed: list[str]) -> None:
        """Training goes on after a step, 0 where it begins, with other flags than before."""
        self.first = self.last = step
        if self.args.resume:
            self.say(f"goes on after step {step}")
        if changed and step < self.args.steps:
            self.say(f"with other flags, so not as one run would: {', '.join(changed)}")
        if step:
            self.saved = step, self.args.resume
        if not self.speaks:
            return
        if self.args.metrics:
            forget_after(step, Path(self.args.metrics))
        if self.args.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(self.args.tensorboard, purge_step=step + 1)
        self.started = time.perf_counter()

    def switched(
        self, step: int, grid: commgrid.HyperCommGrid, plan: TransferPlan, seconds: float
    ) -> None:
        """Training goes on on another grid of the same processes."""
        self.grid = grid
        sent = sum(plan.sent.values()) / 1e6
        self.say(
            f"step {step:4}  goes on over {axes_of(grid)}: {sent:,.1f} MB of weights and optimizer "
            f"state sent in {duration(seconds)}"
        )

    def survived(self, grid: commgrid.HyperCommGrid, found: Recovered, seconds: float) -> None:
        """Training goes on after a failure, over the ranks that are left."""
        what = grid.rebuilt
        assert what is not None
        spoke, self.grid = self.speaks, grid
        self.speaks = grid.get_local_rank() == 0
        if self.speaks and not spoke and self.args.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(self.args.tensorboard, purge_step=found.step + 1)
        self.last = found.step
        self.unsaid.clear()
        if self.speaks and self.args.metrics:
            forget_after(found.step, Path(self.args.metrics))
        waits = f"; {describe_ranks(what.spares)} to spare" if what.spares else ""
        without = f"without {describe_ranks(what.gone)}" if what.gone else "with all ranks"
        self.say(
            f"step {found.step:4}  goes on {without} over "
            f"{axes_of(grid)} (was {axes_as(what.before)}): the state of step {found.step} from "
            f"{found.source}, in {duration(seconds)}{waits}"
        )

    def failed(self, step: int, error: Exception) -> None:
        """This rank has failed, and takes part again; said by whichever rank it is."""
        told = f"{type(error).__name__}: {error}".partition("\n")[0]
        print(f"rank {self.grid.rank} failed in step {step}, and takes part again: {told}",
              file=sys.stderr, flush=True)  # fmt: skip

    @property
    def tokens(self) -> int:
        """Of a step."""
        size: int = self.args.batch_size * self.args.seq_len
        return size

    # -- steps --------------------------------------------------------------------------

    def step(self, step: int, loss: float, norm: float, rate: float, seconds: float) -> None:
        """One more step, which took so long."""
        self.last, self.loss = step, loss
        if not self.speaks:
            return
        self.unsaid.append(seconds)
        speed = self.tokens / seconds
        if self.args.metrics:
            row = {"step": step, "loss": loss, "grad_norm": norm, "tokens_per_s": speed}
            with Path(self.args.metrics).open("a") as lines:
                print(json.dumps(row), file=lines)
        self.draw(step, loss=loss, learning_rate=rate, grad_norm=norm, tokens_per_s=speed)
        if step % self.args.log_every == 0 or step in (self.first + 1, self.args.steps):
            speed = self.tokens * len(self.unsaid) / sum(self.unsaid)
            self.unsaid.clear()
            self.say(
                f"step {step:4}  loss {loss:.4f}  lr {rate:.2e}  grad norm {norm:.3f}  "
                f"{speed:,.0f} tokens/s{self.time_left()}"
            )

    def time_left(self) -> str:
        """As this run's steps so far have taken, evaluations and checkpoints with them."""
        done, left = self.last - self.first, self.args.steps - self.last
        if done < 2 or not left:  # the first step is not like the others
            return ""
        return f"  {duration((time.perf_counter() - self.started) / done * left)} left"

    def evaluated(self, loss: float) -> None:
        """The loss on text held out, after the last step."""
        self.say(f"step {self.last:4}  evaluation loss {loss:.4f}")
        self.draw(self.last, evaluation_loss=loss)

    def sample(self, text: str) -> None:
        """What the model has written."""
        self.say(f"--- a sample\n{text}\n---")

    def saved_step(self) -> None:
        """The last step has been saved."""
        self.saved = self.last, self.args.save

    def draw(self, step: int, **figures: float) -> None:
        if self.board is not None:
            for name, value in figures.items():
                self.board.add_scalar(name, value, step)

    # -- the end ------------------------------------------------------------------------

    def end(self) -> None:
        """The last line: what was done, and how to go on."""
        if self.board is not None:
            self.board.close()
        if self.loss is None:
            self.say(f"trained nothing: step {self.first} of --steps {self.args.steps} is done")
            return
        self.say(f"done: {self.what()}; {self.how_to_go_on(self.args.steps + self.last)}")

    def stopped(self, why: str) -> None:
        """The last line of a run that ends before its last step."""
        self.say(f"stopped by {why}: {self.what()}; {self.how_to_go_on(None)}")

    def what(self) -> str:
        took = duration(time.perf_counter() - self.started)
        loss = "" if self.loss is None else f", loss {self.loss:.4f}"
        return f"{several(self.last - self.first, 'step')} in {took}, to step {self.last}{loss}"

    def how_to_go_on(self, steps: int | None) -> str:
        """What was saved where, and the flags that take it up."""
        if self.saved is None:
            return "nothing was saved" + (
                "" if self.args.save else " (--save DIR keeps checkpoints)"
            )
        step, folder = self.saved
        if self.args.save_in_background and folder == self.args.save:  # the last may be half there
            whole = [each for each in checkpoint.steps(folder) if each <= step]
            if not whole:
                return f"nothing is saved in {folder} yet"
            step = whole[-1]
        more = f" --steps {steps}" if steps else ""
        return f"step {step} is saved in {folder}; to go on: --resume {folder}{more}"


def axes_of(grid: commgrid.HyperCommGrid) -> str:
    """Such as `tp 2 · dp 2 on 4 ranks`."""
    axes = axes_as(grid.shape)
    return f"{f'{axes} on ' if axes else ''}{several(grid.world_size, 'rank')}"


def axes_as(shape: Mapping[str, int]) -> str:
    """Such as `tp 2 · dp 2`."""
    return " · ".join(f"{axis} {size}" for axis, size in shape.items() if size > 1)


def several(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def forget_after(step: int, metrics: Path) -> None:
    """Leaves the rows up to a step, since those after it come again."""
    rows = metrics.read_text().splitlines() if step and metrics.exists() else []
    if rows and not rows[-1].endswith("}"):  # half a row, of a process that was killed
        rows.pop()
    kept = [row for row in rows if json.loads(row)["step"] <= step]
    metrics.write_text("".join(f"{row}\n" for row in kept))


def duration(seconds: float) -> str:
    """In words.

    >>> duration(0.42), duration(12.3), duration(200), duration(7500), duration(200_000)
    ('0.4 s', '12 s', '3 min 20 s', '2 h 05 min', '2 d 07 h')
    """
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    for above, below, size, part in (("min", "s", 60, 1), ("h", "min", 3600, 60)):
        if whole < size * (60 if above == "min" else 24):
            return f"{whole // size} {above} {whole % size // part:02} {below}"
    return f"{whole // 86400} d {whole % 86400 // 3600:02} h"
