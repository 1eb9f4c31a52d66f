"""Train a small byte-level GPT with tensor, sequence, context, pipeline, expert and data
parallelism.

    torchrun --standalone --nproc-per-node 8 examples/train_gpt.py --tp 2 --sequence-parallel
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --pp 4 --schedule zb-h1
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --experts 8 --ep 4
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --cp 4 --seq-len 1024 --packed
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --fsdp --dp-replicate 2
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --switch step=100:tp=4
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --save runs/1 --save-every 100
    srun --no-kill examples/train_gpt.py --tp 2 --survive    # goes on without ranks that fail
    torchrun … --max-restarts 3 examples/train_gpt.py --save runs/1 --save-every 100 --resume runs/1
    python examples/train_gpt.py --steps 20                  # one process, no launcher
    python examples/train_gpt.py --resume runs/1 --steps 0 --sample "The statement "

Every rank draws the same weights and the same batches from --seed, so the loss curve does
not depend on how the job is cut: not on --tp, --cp, --cp-comm, --dp, --sequence-parallel, --zero1,
--fsdp, --pp, --chunks, --schedule, --microbatches, --ep or --etp. (It does with --dropout, since
ranks drop other elements, and with --capacity-factor and --aux-loss-coef, which look at the tokens
of a rank.) Nor does it depend on where --resume takes up what --save has saved, on how that job was
cut, or on --switch, which goes on on another grid. The text is Python's own documentation, unless
--data names a file.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from contextlib import AbstractContextManager, ExitStack

if not sys.warnoptions:
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch's; no rank needs it

import commgrid
from commgrid import CommGridError
from commgrid.failures import named_failures, told_when_stopped
from gpt_training import flags
from gpt_training.checks import check_files, check_sizes, check_switches
from gpt_training.data import Text, evaluation_batches, global_batch, read_text, split_text
from gpt_training.grid import make_grid, switch
from gpt_training.log import Log
from gpt_training.model import count_parameters
from gpt_training.sample import generate
from gpt_training.survival import FAILURES, survive
from gpt_training.trainer import Trainer, learning_rate, own_device


def train(args: argparse.Namespace) -> bool:
    """The whole job on this rank, from the grid to the last line.

    Returns:
        Whether this rank took the last step; False: it had no place then.
    """
    grid = make_grid(args)
    if grid is None:  # a spare rank
        took_last = wait_for_a_place(args)
        commgrid.shutdown()
        return took_last
    check_sizes(args, grid, grid.spec)
    check_switches(args, grid)
    text = split_text(read_text(args.data, args.seq_len), args)
    check_files(args, grid, own_device())
    log = Log(args, grid, own_device())
    with told_when_stopped(log.stopped):
        with named_failures(grid, lambda: "the start"):
            job = Job(Trainer(args, grid), log, text)
            log.begin(*count_parameters(job.trainer.model))
        try:
            took_last = job.begin()
        except Exception as error:
            if log.loss is not None:  # else there is nothing to go on from
                log.stopped(type(error).__name__)
            raise
    commgrid.shutdown()
    return took_last


class Job:
    """All steps, with the looks at the text held out, checkpoints and switches between them.

    Args:
        trainer: the first one; a switch makes another, and so does --survive after a failure.
        log: told of everything.
        text: to train on, and to evaluate on.
        done: the step that was taken last.
    """

    def __init__(self, trainer: Trainer, log: Log, text: Text, done: int = 0) -> None:
        self.trainer, self.log, self.text, self.done = trainer, log, text, done
        self.args = trainer.args
        self.switches = dict(self.args.switches)
        self.failed: set[int] = set()
        """Steps in which this rank itself has failed, with --survive."""

    def begin(self) -> bool:
        """From the first step, or from where --resume says; as `go_on`."""
        if self.args.resume:
            with self.named("loading a checkpoint"):
                self.done = self.trainer.resume()
        self.log.resumed(self.done, self.trainer.changed)
        if self.args.survive:
            self.keep()
        return self.go_on()

    def go_on(self) -> bool:
        """The steps that are left, to the last line; with --survive, through failures.

        Returns:
            Whether this rank took the last one.
        """
        with ExitStack() as in_use:
            while not self.all_steps(in_use):
                # Its memory is needed, and others may wait for connections that it holds.
                del self.trainer
                found = survive(self.args, self.log)
                if found is None:  # others go on without this rank, or have ended
                    return False
                self.trainer, self.log, self.done = found
            if self.args.sample is not None:
                with self.named("the sample"):
                    self.log.sample(generate(self.trainer))
        self.log.end()
        return True

    def all_steps(self, in_use: ExitStack) -> bool:
        """The steps that are left; with --survive, False where a rank has failed."""
        try:
            while self.done < self.args.steps:
                self.step(self.done + 1, in_use)
            if self.args.eval_every:
                self.evaluate()
        except FAILURES:
            if not self.args.survive:
                raise
            return False
        except Exception as error:  # this rank's own
            step = self.done + 1
            # What all ranks raise alike, or this one in the same step again, comes again.
            if not self.args.survive or isinstance(error, CommGridError) or step in self.failed:
                raise
            self.failed.add(step)
            self.log.failed(step, error)
            return False
        return True

    def step(self, step: int, in_use: ExitStack) -> None:
        """One step, and what comes before and after it."""
        args, log = self.args, self.log
        due = [number for number in self.switches if number < step]
        if due:
            self.trainer = switch(self.trainer, self.switches[due[-1]], step - 1, log, in_use)
            for number in due:
                del self.switches[number]
        started = time.perf_counter()
        with self.named(f"step {step}"):
            loss, norm = self.trainer.step(step, global_batch(self.text.training, step, args))
        self.done = step
        log.step(step, loss, norm, learning_rate(step, args), time.perf_counter() - started)
        if args.eval_every and step % args.eval_every == 0 and step < args.steps:
            self.evaluate()
        if args.survive and step % args.survive == 0:
            self.keep()
        if args.save and (step % args.save_every == 0 or step == args.steps):
            with self.named(f"saving step {step}"):
                self.trainer.save(step)
            log.saved_step()

    def evaluate(self) -> None:
        """The loss on text held out."""
        with self.named(f"evaluating step {self.log.last}"):
            batches = evaluation_batches(self.text.held_out, self.args)
            self.log.evaluated(self.trainer.evaluate(batches))

    def keep(self) -> None:
        """Keeps the state in memory, for when other ranks are gone."""
        with self.named(f"keeping step {self.done}"):
            self.trainer.keep(self.done)

    def named(self, doing: str) -> AbstractContextManager[None]:
        """Within it every rank's failure is an error on all others that names it."""
        return named_failures(self.trainer.grid, lambda: doing)


def wait_for_a_place(args: argparse.Namespace) -> bool:
    """With --survive, a spare rank's part: it trains once another one is gone; as `train`."""
    found = survive(args) if args.survive else None
    if found is None:
        return False
    trainer, log, done = found
    text = split_text(read_text(args.data, args.seq_len), args)
    return Job(trainer, log, text, done).go_on()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line's flags, or those of a list."""
    return flags.parse(argv, description=__doc__)


def main() -> None:
    """train_gpt, whose errors are a line each."""
    try:
        train(parse())
    except commgrid.CommGridError as error:
        sys.exit(flags.last_words(error))


if __name__ == "__main__":
    main()
