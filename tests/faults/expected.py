"""What the survivors of each row are to see, and how a row is printed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from tests.faults.jobs import SILENT, STARTING, VICTIMS, Outcome, Row

RAISED = ("exception", "out of memory", "full disk")


def kinds(row: Row) -> set[str]:
    """The classes that may be seen."""
    if row.moment == "in destroy":
        return {"no error"}
    if row.moment == "before initialize":
        return {"PeerTimeoutError"}
    if row.moment in STARTING:
        return {"PeerTimeoutError"} if row.fault in SILENT else {"PeerFailedError"}
    if row.moment == "in a checkpoint save" and row.fault in RAISED:
        return {"CheckpointError"}
    if row.moment == "in a transfer" and row.fault not in SILENT:
        return {"TransferError"}
    return {"PeerTimeoutError", "PeerFailedError"}


def patterns(row: Row) -> list[str]:
    """What every survivor's message has in it."""
    victim = VICTIMS[row.victim]
    who = rf"\b[Rr]ank {victim}\b"
    if row.moment == "in destroy":
        return [r"^$"]
    if row.moment in STARTING:
        return [who, "store at|grid '(WORLD|default)'"]
    if row.moment == "in a transfer":
        return [who, "transfer 'default'"]
    if row.moment == "in a checkpoint save":
        return [who, r"checkpoint\.save|step 2 was not saved"]
    return [who, r"on group '(tp|dp|pp|ep|edp)'|of microbatch \d of stage \d"]


def wrong(outcome: Outcome) -> list[str]:
    """What is not as it should be; []: nothing."""
    row, found = outcome.row, []
    if not outcome.began:
        found.append("torch did not start, so that the victim never came to its moment")
    if outcome.left:
        found.append(f"ranks {outcome.left} were left:\n{outcome.stacks}")
    if len(outcome.survivors) != 7:
        found.append(f"only ranks {sorted(outcome.survivors)} have told")
    for rank, seen in outcome.survivors.items():
        kind = seen.kind or "no error"
        if kind not in kinds(row):
            found.append(f"rank {rank} saw {kind}, not {kinds(row)}: {seen.message}")
        for pattern in patterns(row):
            if not re.search(pattern, seen.message):
                found.append(f"rank {rank}: no {pattern!r} in: {seen.message}")
    return [f"{row}: {each}" for each in found]


def line(outcome: Outcome) -> str:
    """The row as it is printed: fault × moment × victim: what they see × seconds × left."""
    seen = " + ".join(f"{n} {kind}" for kind, n in sorted(outcome.kinds.items()))
    return f"{outcome.row}: {seen} × {outcome.seconds:.1f} s × {len(outcome.left)} left"


def table(outcomes: Iterable[Outcome]) -> str:
    """Markdown: fault and moment, what most survivors saw, the slowest of its victims, left."""
    rows: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        rows.setdefault((outcome.row.moment, outcome.row.fault), []).append(outcome)
    lines = [
        "| moment | fault | what the survivors see | seconds | left |",
        "|---|---|---|---|---|",
    ]
    for (moment, fault), group in rows.items():
        chosen = next((one for one in group if one.row.victim == "middle"), group[0])
        said = Counter(_shown(seen.kind, seen.message) for seen in chosen.survivors.values())
        seconds = max(one.seconds for one in group)
        left = sum(len(one.left) for one in group)
        what = said.most_common(1)[0][0] if said else ""
        lines.append(f"| {moment} | {fault} | {what} | {seconds:.1f} | {left} |")
    return "\n".join(lines)


def _shown(kind: str, message: str) -> str:
    if not kind:
        return "nothing: they end as always"
    text = re.sub(r" \(rank \d was .*; the grid was destroyed on this rank\)$", "", message)
    text = re.sub(r" \(rank \d; the grid was destroyed on this rank\)$", "", text)
    text = re.sub(r"/\S*/checkpoints", "runs", text)
    text = re.sub(r";.*$", "", text.replace("|", "/"))
    return f"`{kind}: {text}`"
