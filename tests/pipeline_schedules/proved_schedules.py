"""Every schedule of this project taken through the check before a run.

    python -m tests.pipeline_schedules.proved_schedules    prints how many, and how many calls

Each of them with two copies of the pipeline whose gradients are averaged, shared weights on the
first and last stage and a norm over all ranks, under `strict`, which includes nccl's and gloo's
rules.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from commgrid.pipeline import Schedule, forward_only, make_schedule
from commgrid.pipeline_schedules.proof import prove
from commgrid.pipeline_schedules.schedule import SCHEDULES

STAGES, MICROBATCHES, CHUNKS = range(1, 9), range(1, 33), range(1, 5)


def schedules(
    stages: Iterable[int] = STAGES, microbatches: Iterable[int] = MICROBATCHES,
    chunks: Iterable[int] = CHUNKS,
) -> Iterator[Schedule]:  # fmt: skip
    """Every schedule in every size that it takes."""
    sizes = [(p, m, v) for p in stages for m in microbatches for v in chunks]
    for p, m, v in sizes:
        yield forward_only(p, m, v)
        yield make_schedule("gpipe", p, m, v)
        if m % p == 0:
            yield make_schedule("interleaved", p, m, v)
        if v == 1:
            yield from (
                make_schedule(name, p, m)
                for name in SCHEDULES if name not in ("gpipe", "interleaved")
            )  # fmt: skip


def prove_all(found: Iterable[Schedule]) -> tuple[int, int]:
    """How many finish, and how many calls they issue; the first that does not is an error."""
    count = calls = 0
    for schedule in found:
        verdict = prove(schedule)
        assert verdict.finishes, f"{schedule}: {verdict}"
        count, calls = count + 1, calls + verdict.calls
    return count, calls


if __name__ == "__main__":
    begin = time.perf_counter()
    count, calls = prove_all(schedules())
    print(
        f"{count:,} schedules of up to {STAGES[-1]} stages, {CHUNKS[-1]} chunks and "
        f"{MICROBATCHES[-1]} microbatches finish: {calls:,} calls, "
        f"{time.perf_counter() - begin:.0f} s"
    )
