"""One pipeline's program over the stages of several grids."""

from __future__ import annotations

from commgrid.errors import SpecError
from commgrid.pipeline_schedules.schedule import Schedule


def split_schedule(schedule: Schedule, *stages: int) -> tuple[Schedule, ...]:
    """The parts of one schedule that the stages of several grids run, one grid after the other.

    Each grid's `Pipeline` is given its part, and between grids the modules of the last stage before
    and of the first one after call a bridge, once in each forward. All stages then compute in the
    order of the whole schedule, such as 1F1B over all of them, and a bridge's call waits for the
    other side's, as a message between two of its stages would. The grids are on separate ranks.

    Args:
        schedule: over all stages, of one chunk each.
        stages: of each grid, in order.

    Raises:
        SpecError: a schedule of several chunks a stage, or sizes that are not its stages.

    Example:
        >>> from commgrid.pipeline import make_schedule
        >>> whole = make_schedule("1f1b", 3, 4)
        >>> for part in split_schedule(whole, 1, 2):
        ...     print(part.num_stages, *part.orders[0])
        1 F0 F1 F2 B0 F3 B1 B2 B3
        2 F0 F1 B0 F2 B1 F3 B2 B3
    """
    if schedule.num_chunks != 1:
        raise SpecError(
            f"{schedule} has {schedule.num_chunks} chunks a stage, so that activations would cross "
            "from the last grid back to the first; expected a schedule of one"
        )
    if min(stages, default=0) < 1 or sum(stages) != schedule.num_stages:
        raise SpecError(
            f"stages={stages}: expected how many of the {schedule.num_stages} stages of {schedule} "
            "each grid has, 1 or more"
        )
    parts, first = [], 0
    for count in stages:
        orders = tuple(
            tuple(type(action)(stage, action.chunk, action.microbatch) for action in order)
            for stage, order in enumerate(schedule.orders[first : first + count])
        )
        name = f"{schedule.name}, stages {first} to {first + count - 1} of {schedule.num_stages}"
        part = Schedule(name, count, schedule.num_microbatches, 1, orders, schedule.backwards)
        parts.append(part)
        first += count
    return tuple(parts)
