"""Other grids in one program, as they are typed: train_gpt's --switch, refit's --generate."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

CUT = (
    "tp", "dp", "pp", "cp", "cp_comm", "sequence_parallel", "zero1", "fsdp", "dp_replicate",
    "schedule", "chunks", "microbatches", "ep", "etp",
)  # fmt: skip
"""The flags that say how a job is cut, which a switch gives anew; all others stay."""


Finish = Callable[[argparse.Namespace, str], None]
"""Checks flags and fills in what follows from them, told what messages begin with."""


def read_switches(
    args: argparse.Namespace, parser: argparse.ArgumentParser, finish: Finish
) -> dict[int, argparse.Namespace]:
    """For each step with a switch after it, all flags of the steps that follow.

    Args:
        args: the flags as they were given.
        parser: of them; `error` refuses a switch.
        finish: is called for each.
    """
    found: dict[int, argparse.Namespace] = {}
    for text in args.switch or []:
        begin = f"--switch {text}: "
        head, _, cut = text.partition(":")
        number = head.removeprefix("step=")
        if not head.startswith("step=") or not number.isdecimal() or not cut:
            parser.error(f"{begin}expected step=N:FLAGS, such as step=10:tp=4,dp=2,zero1")
        step = int(number)
        if not 0 < step < args.steps:
            parser.error(
                f"{begin}expected a step from 1 to {args.steps - 1}, with steps of --steps after it"
            )
        if step in found:
            parser.error(f"{begin}there is one after step {step} already")
        found[step] = cut_anew(args, cut, parser, finish, begin)
    return dict(sorted(found.items()))


def cut_anew(
    args: argparse.Namespace,
    cut: str,
    parser: argparse.ArgumentParser,
    finish: Finish,
    begin: str,
    also: tuple[str, ...] = (),
) -> argparse.Namespace:
    """All flags of the same job on another grid.

    Args:
        args: the flags as they were given.
        cut: the other grid's, `tp=4,dp=2,zero1`; those of `CUT` that are left out are as if they
            were not given.
        parser, finish: as `read_switches`'.
        begin: of messages.
        also: flags that may be given beside those of `CUT`.
    """
    found = copy.copy(args)
    for flag in CUT:
        setattr(found, flag, parser.get_default(flag))
    actions = {action.dest: action for action in parser._actions}
    for item in cut.split(","):
        name, has_value, value = item.strip().partition("=")
        flag = name.replace("-", "_")
        if flag not in (*CUT, *also):
            known = ", ".join((*CUT, *also)).replace("_", "-")
            parser.error(f"{begin}{name!r} is none of {known}")
        if actions[flag].nargs == 0:
            if has_value:
                parser.error(f"{begin}{name} takes no value")
            setattr(found, flag, True)
            continue
        if not has_value:
            parser.error(f"{begin}{name} needs a value, as {name}=2")
        try:  # as if it had been typed
            setattr(found, flag, parser._get_values(actions[flag], [value]))
        except argparse.ArgumentError as error:
            parser.error(f"{begin}{name}: {error.message}")
    finish(found, begin)
    return found
