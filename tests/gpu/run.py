"""GPU tests in waves of two slices side by side; what has ended is printed at once.

    python tests/gpu/run.py                          # all waves, one after the other
    python tests/gpu/run.py --wave 1 2               # the first two, within eight minutes
    python tests/gpu/run.py --slice failures nccl    # two slices, side by side
    python tests/gpu/run.py --emulate                # over gloo on the CPU

Several ranks share a GPU if there are fewer. It needs torch, pytest and PyYAML; no network.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.gpu import results
from tests.gpu.results import FOLDER, Result

ROOT = Path(__file__).parents[2]
SECONDS = 235.0
"""Limit of a slice."""
RESULTS = ROOT / "runs" / "gpu.jsonl"

_MEGATRON = f"{FOLDER}test_megatron_gpt_on_gpus.py::test_losses_are_the_same"
SLICES: dict[str, tuple[str, ...]] = {
    "session": ("session_on_gpus",),
    "failures": ("failures_on_gpus",),
    "nccl": ("nccl",),
    "suspend": ("suspend_on_gpus", "heartbeat_on_gpus"),
    "layers": ("attention_kernels", "layers", "initial_weights_on_gpus"),
    "pipeline": ("pipeline_on_gpus", "experts_on_gpus"),
    "watch": ("watch_on_gpus", "order_on_gpus", "survive_on_gpus"),
    "context": ("context_parallel", "observing_on_gpus"),
    "between": ("between_grids_on_gpus", "checkpoints_on_gpus"),
    "overlap": ("overlap_on_gpus",),
    "megatron": tuple(f"{_MEGATRON}[{case}]" for case in ("--tp 2", "--pp 2", "--pp 2 --vpp 2")),
    "megatron_more": tuple(
        f"{_MEGATRON}[{case}]"
        for case in ("--tp 2 --pp 2 --distributed-optimizer", "--experts 4 --ep 2")
    ),
}
"""Files of tests without `test_` and `.py`, or single tests; in the order in which they run."""
WAVES = tuple(zip([*SLICES][::2], [*SLICES][1::2], strict=True))


def tests_of(name: str) -> list[str]:
    """Return pytest's arguments for a slice."""
    return [each if "::" in each else f"{FOLDER}test_{each}.py" for each in SLICES[name]]


def start(name: str, path: Path, emulate: bool) -> subprocess.Popen[bytes]:
    """Start a slice: pytest without the settings of all tests, which need further packages."""
    off = [f"-pno:{plugin}" for plugin in ("benchmark", "cacheprovider", "xdist", "randomly")]
    command = [
        sys.executable, "-m", "pytest", *off, "-p", "tests.gpu.at_once", "--at-once", str(path),
        "--confcutdir", FOLDER, "--no-header", "--no-summary", "-qq",
        "--continue-on-collection-errors", *["--emulate"] * emulate, *tests_of(name),
    ]  # fmt: skip
    # Without a name server a store's server takes 5 s for each client by default.
    environ = {"RES_OPTIONS": "timeout:1 attempts:1", **os.environ}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environ.get("PYTHONPATH")])])
    return subprocess.Popen(command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL)


def run(names: Sequence[str], path: Path, emulate: bool, seconds: float) -> bool:
    """Run slices side by side; return whether each has passed within the limit."""
    started = time.monotonic()
    running = {name: start(name, path, emulate) for name in names}
    passed = True
    for name, process in running.items():
        try:
            code = process.wait(max(0.0, started + seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()  # its ranks end with it
            code = process.wait()
            check = results.unfinished(path, process.pid) or f"slice {name}"
            said = f"not ended when the {seconds:g} s of slice {name} were over"
            stopped = Result(check, "failed", 0.0, said, (), **results.machine(emulate))
            results.append(path, stopped)
            print(stopped, flush=True)
        passed &= code == 0
    print(f"{' and '.join(names)}: {time.monotonic() - started:.0f} s", flush=True)
    return passed


def chosen_groups(given: argparse.Namespace) -> list[tuple[str, ...]]:
    """Return the slices that are to run, those side by side together."""
    if given.slice:
        return [tuple(given.slice[at : at + 2]) for at in range(0, len(given.slice), 2)]
    return [WAVES[number - 1] for number in given.wave]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = range(1, len(WAVES) + 1)
    parser.add_argument("--wave", nargs="+", type=int, choices=numbers, default=[*numbers],
                        metavar="N", help=f"waves 1 to {len(WAVES)} (default all)")  # fmt: skip
    parser.add_argument("--slice", nargs="+", choices=[*SLICES], metavar="NAME",
                        help="slices instead of waves, two at a time")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print waves, slices and their tests")
    parser.add_argument("--emulate", action="store_true", help="over gloo, on the CPU")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit of a slice (235)")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE",
                        help="JSON lines, appended to (default runs/gpu.jsonl)")  # fmt: skip
    parser.add_argument("--write-results", action="store_true",
                        help="only write the table of RESULTS.md from --results")  # fmt: skip
    given = parser.parse_args(arguments)
    if given.list:
        for number, wave in enumerate(WAVES, 1):
            for name in wave:
                print(f"wave {number}  {name:14}{' '.join(tests_of(name))}")
        return 0
    if given.write_results:
        on_gpus = [each for each in results.read(given.results) if each.gpu != "none"]
        results.write(results.rows(on_gpus))
        return 0
    if not given.emulate and not torch.cuda.is_available():
        parser.error("torch.cuda.is_available() is false here; --emulate runs over gloo")
    given.results.parent.mkdir(parents=True, exist_ok=True)
    passed = [
        run(names, given.results, given.emulate, given.seconds) for names in chosen_groups(given)
    ]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
