"""Train train_gpt's model in Ray actors, and go on from the last checkpoint when one of them dies.

    python examples/ray_train.py --workers 4 --tp 2 --save runs/1 --save-every 100
    python examples/ray_train.py --address auto --workers 16 --gpus 1 --tp 8 --save /shared/runs/1
    python examples/ray_train.py --workers 4 --tp 2 --survive    # the other actors go on

Each worker is an actor of a placement group, and a rank. Flags that are not listed here are
train_gpt's. Without --address Ray is started on this machine, and ended with the job; `auto` is the
cluster that `ray start` has made. Rank 0's actor serves the store that ranks meet at, on its own
node; the others reach it there, and then each other.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import commgrid
import train_gpt
from commgrid import checkpoint
from gpt_training.flag_types import count, positive
from gpt_training.flags import last_words
from gpt_training.grid import grid_arguments

LAST_WORDS_SECONDS = 30.0
"""How long the others get to say who was missing, once a worker has failed."""

STOPPED: list[str] = []
"""The signal that ended the driver; Ray passes on a KeyboardInterrupt without what is in it."""


class Worker:
    """What an actor does: one rank of the job."""

    def place(self) -> tuple[str, str, int, int]:
        """Its node's number and address, its process, and a free port of the node."""
        from ray import get_runtime_context
        from ray.util import get_node_ip_address

        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        node: str = get_runtime_context().get_node_id()
        return node, get_node_ip_address(), os.getpid(), port

    def train(self, variables: Mapping[str, str], flags: Sequence[str]) -> tuple[bool, str | None]:
        """The job on this rank.

        Returns:
            Whether it took the last step, and what went wrong, in one line.
        """
        os.environ.update(variables)
        try:
            return train_gpt.train(train_gpt.parse(list(flags))), None
        except commgrid.CommGridError as error:
            return False, f"{type(error).__name__}: {error}"
        except SystemExit as error:  # which would end the actor
            return not error.code, f"{error.code}" if error.code else None


@dataclass
class Rank:
    """A worker as the driver knows it."""

    actor: Any
    node: str
    address: str
    pid: int
    port: int

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.address}"


def main() -> None:
    """Starts the job, and starts it again while it fails."""
    args, flags = parse()
    ray = import_ray()
    code: int | None = 0
    try:
        start_ray(ray, args)
        signal.signal(signal.SIGTERM, stop)  # in place of Ray's, which aborts
        code = train(ray, args, flags)
    except KeyboardInterrupt:
        code = None
    finally:
        ray.shutdown()
    if code is None:
        name = STOPPED[0] if STOPPED else "SIGINT"
        to_go_on = " ".join(again(flags)[len(flags) :])
        how = f"to go on: {to_go_on}" if to_go_on else "nothing was saved"
        print(f"stopped by {name}; {how}", file=sys.stderr)
        code = 128 + signal.Signals[name]
    sys.exit(code)


def train(ray: Any, args: argparse.Namespace, flags: list[str]) -> int:
    """All starts of the job; the exit code."""
    group = reserve(ray, args)
    try:
        for start in range(1, args.restarts + 2):
            wrong = run(ray, group, args, again(flags) if start > 1 else flags)
            if not wrong:
                return 0
            print("\n".join(wrong), file=sys.stderr)
            print(f"start {start} of {args.restarts + 1} has failed", file=sys.stderr, flush=True)
        return 1
    finally:
        ray.util.remove_placement_group(group)


def parse() -> tuple[argparse.Namespace, list[str]]:
    """This program's flags, and train_gpt's, which are looked through before anything starts."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All other flags are train_gpt's: python examples/train_gpt.py --help",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--workers", type=positive, metavar="N", required=True, help="actors, each of them a rank")
    add("--address", metavar="A", help="of a cluster, or auto (default: Ray on this machine)")
    add("--cpus", type=positive, metavar="N", default=1, help="CPUs for each worker (default 1)")
    add("--gpus", type=count, metavar="N", default=0, help="GPUs for each worker (default 0)")
    add(
        "--restarts", type=count, metavar="N", default=3,
        help="how often the job starts again after a failure (default 3)",
    )  # fmt: skip
    add(
        "--patience", type=positive, metavar="S", default=300,
        help="seconds to wait until the cluster has room (default 300)",
    )  # fmt: skip
    args, flags = parser.parse_known_args()
    given = train_gpt.parse(flags)
    try:
        commgrid.GridSpec.build(**grid_arguments(given)).resolve(args.workers)
    except commgrid.SpecError as error:
        sys.exit(last_words(error))
    return args, flags


def import_ray() -> Any:
    try:
        import ray
        import ray.util
    except ImportError as error:
        sys.exit(f"Ray is not installed here ({error}); pip install ray")
    return ray


def stop(number: int, _: object) -> NoReturn:
    STOPPED.append(signal.Signals(number).name)
    raise KeyboardInterrupt


def start_ray(ray: Any, args: argparse.Namespace) -> None:
    """A cluster, or one of this machine with room for all workers."""
    if args.address is None:
        rooms = {"num_cpus": args.workers * args.cpus}
        ray.init(address="local", include_dashboard=False, **rooms)
        return
    try:
        ray.init(address=args.address)
    except ConnectionError as error:
        sys.exit(
            f"--address {args.address}: no Ray cluster answers there ({error}); start one with "
            "`ray start --head`, or leave the flag out"
        )


def reserve(ray: Any, args: argparse.Namespace) -> Any:
    """Room for all workers at once, on as few nodes as have it.

    When a node dies, Ray looks for other places for what was there.
    """
    each = {"CPU": args.cpus, **({"GPU": args.gpus} if args.gpus else {})}
    group = ray.util.placement_group([each] * args.workers, strategy="PACK")
    if not group.wait(args.patience):
        has = {name: ray.cluster_resources().get(name, 0) for name in each}
        ray.util.remove_placement_group(group)
        sys.exit(
            f"--workers {args.workers}: in {args.patience} s there was no room for so many of "
            f"{each}; the cluster has {has} in all; give fewer, or a larger --patience"
        )
    return group


def run(ray: Any, group: Any, args: argparse.Namespace, flags: list[str]) -> list[str]:
    """The job in new actors, which are gone afterwards; what went wrong, in lines."""
    ranks: list[Rank] = []
    try:
        ranks += start_workers(ray, group, args)
        print("ranks  " + ", ".join(f"{i}: {rank}" for i, rank in enumerate(ranks)), flush=True)
        variables = launch_variables(ranks)
        jobs = {
            rank.actor.train.remote(own, flags): i
            for i, (rank, own) in enumerate(zip(ranks, variables, strict=True))
        }
        return watch(ray, ranks, jobs, survives=bool(train_gpt.parse(flags).survive))
    finally:
        for rank in ranks:
            ray.kill(rank.actor)


def start_workers(ray: Any, group: Any, args: argparse.Namespace) -> list[Rank]:
    """Actors in rank order: those of a node are neighbours, as tensor parallelism wants them."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    actor = ray.remote(Worker)
    actors = [
        actor.options(
            num_cpus=args.cpus, num_gpus=args.gpus, max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=i
            ),
        ).remote()
        for i in range(args.workers)
    ]  # fmt: skip
    places = ray.get([each.place.remote() for each in actors])
    ranks = [Rank(one, *place) for one, place in zip(actors, places, strict=True)]
    order = {rank.node: i for i, rank in reversed(list(enumerate(ranks)))}
    return sorted(ranks, key=lambda rank: order[rank.node])


def launch_variables(ranks: Sequence[Rank]) -> list[dict[str, str]]:
    """What commgrid.initialize reads in each worker; torchrun would set the same."""
    seen: Counter[str] = Counter()
    made = []
    for i, rank in enumerate(ranks):
        made.append(
            {
                "RANK": str(i),
                "WORLD_SIZE": str(len(ranks)),
                "LOCAL_RANK": str(seen[rank.node]),
                "MASTER_ADDR": ranks[0].address,
                "MASTER_PORT": str(ranks[0].port),
            }
        )
        seen[rank.node] += 1
    return made


def watch(
    ray: Any, ranks: Sequence[Rank], jobs: dict[Any, int], survives: bool = False
) -> list[str]:
    """Until all have ended, or some seconds after the first has failed; what went wrong.

    With --survive the others go on after a failure, so that nothing is wrong where any rank has
    taken the last step; those that are left then get some seconds.
    """
    dead: list[str] = []
    said: dict[int, str] = {}
    done = False
    pending, until = list(jobs), None
    while pending and (until is None or time.monotonic() < until):
        ended, pending = ray.wait(pending, timeout=1.0)
        for job in ended:
            i = jobs[job]
            try:
                took_last, wrong = ray.get(job)
                done = done or took_last
                if wrong is not None:
                    said[i] = wrong
            except ray.exceptions.RayActorError:
                dead.append(f"rank {i} ({ranks[i]}) has died")
                if survives:
                    print(dead[-1], file=sys.stderr, flush=True)
            except ray.exceptions.RayTaskError as error:
                said[i] = f"{error}"
        if until is None and (done if survives else dead or said):
            until = time.monotonic() + LAST_WORDS_SECONDS
    told = {text: i for i, text in reversed(said.items())}  # once what all say
    last = [f"rank {i}: {text}" for text, i in list(told.items())[-1:]]
    if survives and done:
        print("\n".join(last), end="\n" if last else "", file=sys.stderr, flush=True)
        return []
    if pending:
        dead.append(f"{len(pending)} ranks did not end in {LAST_WORDS_SECONDS:g} s")
    if survives and not (dead or said):
        dead.append("no rank took the last step: who had a place is gone")
    return [*dead, *last]


def again(flags: list[str]) -> list[str]:
    """train_gpt's flags of a start after a failure: from the last checkpoint, where one is kept."""
    saved = train_gpt.parse(flags).save
    kept = saved is not None and checkpoint.steps(saved)
    return [*flags, "--resume", saved] if kept else flags


if __name__ == "__main__":
    main()
