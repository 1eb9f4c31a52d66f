"""train_gpt's --switch: other grids for the steps after some, as they are typed."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

CUT = (
    "tp", "dp", "pp", "cp", "cp_comm", "sequence_parallel", "zero1", "fsdp", "dp_replicate",
    "schedule", "chunks", "microbatches", "ep", "etp",
)  # fmt: skip
"""The flags that say how a job is cut, which a switch gives anew; all others stay."""


def read_switches(
    args: argparse.Namespace,
    parser: argparse.ArgumentParser,
    finish: Callable[[argparse.Namespace, str], None],
) -> dict[int, argparse.Namespace]:
    """For each step with a switch after it, all flags of the steps that follow.

    Args:
        args: the flags as they were given.
        parser: of them; `error` refuses a switch.
        finish: checks flags and fills in what follows from them, told what messages begin with.
    """
    found: dict[int, argparse.Namespace] = {}
    for text in args.switch or []:

        def wrong(message: str, text: str = text) -> None:
            parser.error(f"--switch {text}: {message}")

        head, _, cut = text.partition(":")
        number = head.removeprefix("step=")
        if not head.startswith("step=") or not number.isdecimal() or not cut:
            wrong("expected step=N:FLAGS, such as step=10:tp=4,dp=2,zero1")
        step = int(number)
        if not 0 < step < args.steps:
            wrong(f"expected a step from 1 to {args.steps - 1}, with steps of --steps after it")
        if step in found:
            wrong(f"there is one after step {step} already")
        after = copy.copy(args)
        for flag in CUT:
            setattr(after, flag, parser.get_default(flag))
        for item in cut.split(","):
            set_flag(after, item, parser, wrong)
        finish(after, f"--switch {text}: ")
        found[step] = after
    return dict(sorted(found.items()))


def set_flag(
    args: argparse.Namespace,
    item: str,
    parser: argparse.ArgumentParser,
    wrong: Callable[[str], None],
) -> None:
    """Sets one flag of a switch, `tp=4` or `zero1`, checked as if it had been typed."""
    name, has_value, value = item.strip().partition("=")
    flag = name.replace("-", "_")
    actions = {action.dest: action for action in parser._actions}
    if flag not in CUT:
        wrong(f"{name!r} is none of {', '.join(CUT).replace('_', '-')}")
    action = actions[flag]
    if action.nargs == 0:
        if has_value:
            wrong(f"{name} takes no value")
        setattr(args, flag, True)
        return
    if not has_value:
        wrong(f"{name} needs a value, as {name}=2")
    try:
        setattr(args, flag, parser._get_values(action, [value]))
    except argparse.ArgumentError as error:
        wrong(f"{name}: {error.message}")
