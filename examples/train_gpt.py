"""Train a small byte-level GPT with tensor, sequence, context, pipeline, expert and data
parallelism.

    torchrun --standalone --nproc-per-node 8 examples/train_gpt.py --tp 2 --sequence-parallel
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --pp 4 --schedule zb-h1
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --experts 8 --ep 4
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --cp 4 --seq-len 1024 --packed
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --fsdp --dp-replicate 2
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --switch step=100:tp=4
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --save runs/1 --save-every 100
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
from contextlib import ExitStack
from functools import partial

import commgrid
import gpt_flags
from commgrid.runtime.failures import named_failures
from gpt_checks import check_files, check_sizes, check_switches
from gpt_data import Text, evaluation_batches, global_batch, read_text, split_text
from gpt_grid import make_grid, switch
from gpt_log import Log
from gpt_model import count_parameters
from gpt_sample import generate
from gpt_stop import told_when_stopped
from gpt_trainer import Trainer, learning_rate, own_device


def train(args: argparse.Namespace) -> None:
    """The whole job on this rank, from the grid to the last line."""
    grid = make_grid(args)
    if grid is None:  # a spare rank
        commgrid.shutdown()
        return
    check_sizes(args, grid, grid.spec)
    check_switches(args, grid)
    text = split_text(read_text(args.data, args.seq_len), args)
    check_files(args, grid, own_device())
    log = Log(args, grid, own_device())
    with told_when_stopped(log.stopped):
        with named_failures(grid, lambda: "the start"):
            trainer = Trainer(args, grid)
            log.begin(*count_parameters(trainer.model))
        try:
            with ExitStack() as in_use:
                run(trainer, log, text, in_use)
        except Exception as error:
            if log.loss is not None:  # else there is nothing to go on from
                log.stopped(type(error).__name__)
            raise
    commgrid.shutdown()


def run(trainer: Trainer, log: Log, text: Text, in_use: ExitStack) -> None:
    """All steps, with the looks at the text held out, checkpoints and switches between them."""
    args, done = trainer.args, 0
    if args.resume:
        with named_failures(trainer.grid, lambda: "loading a checkpoint"):
            done = trainer.resume()
    log.resumed(done, trainer.changed)
    left = dict(args.switches)
    for step in range(done + 1, args.steps + 1):
        due = [number for number in left if number < step]
        if due:
            trainer = switch(trainer, left[due[-1]], step - 1, log, in_use)
            for number in due:
                del left[number]
        started = time.perf_counter()
        with named_failures(trainer.grid, partial("step {}".format, step)):
            loss, norm = trainer.step(step, global_batch(text.training, step, args))
        log.step(step, loss, norm, learning_rate(step, args), time.perf_counter() - started)
        if args.eval_every and step % args.eval_every == 0 and step < args.steps:
            evaluate(trainer, log, text)
        if args.save and (step % args.save_every == 0 or step == args.steps):
            with named_failures(trainer.grid, partial("saving step {}".format, step)):
                trainer.save(step)
            log.saved_step()
    if args.eval_every:
        evaluate(trainer, log, text)
    if args.sample is not None:
        with named_failures(trainer.grid, lambda: "the sample"):
            log.sample(generate(trainer))
    log.end()


def evaluate(trainer: Trainer, log: Log, text: Text) -> None:
    """The loss on text held out."""
    with named_failures(trainer.grid, partial("evaluating step {}".format, log.last)):
        log.evaluated(trainer.evaluate(evaluation_batches(text.held_out, trainer.args)))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line's flags, or those of a list."""
    return gpt_flags.parse(argv, description=__doc__)


def main() -> None:
    """train_gpt, whose errors are a line each."""
    try:
        train(parse())
    except commgrid.CommGridError as error:
        sys.exit(gpt_flags.last_words(error))


if __name__ == "__main__":
    main()
