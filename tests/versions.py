"""The tests on several versions of torch and Python: makes the environments, runs, prints a table.

No other run includes it, since an environment takes up to 6 GB and some minutes. The results, with
dates, are in tests/torch_compat/VERSIONS.md.

    python tests/versions.py --torch 2.11.0 2.15.0            the core on both
    python tests/versions.py --torch 2.15.0 --short           everything, as pytest runs it
    python tests/versions.py --torch 2.15.0 --full            everything, as pytest --full does
    python tests/versions.py --torch 2.15.0 --only tests/runtime/test_grid.py
    python tests/versions.py --table                          the results of earlier runs

Each path is a pytest process of its own: where one hangs or dies, the others still report, and
--only goes on with a run that was interrupted. A version comes as the index has it: the CPU build
where there is one (`2.13.0+cpu`), else the CUDA build, with no GPU needed.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
TORCH = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
NEEDED = ("numpy", "pyyaml")
"""Beside the group `test`: torch installs without the first, commgrid without its requirements."""
# Not about torch.
NOT_CORE = ("test_quality.py", "test_sizes.py")
ROOMS = (
    "layout", "planning", "store", "torch_compat", "health", "recording", "runtime", "grid_pairs",
    "collectives", "equality", "parameters", "launching", "tensor_parallel", "data_parallel",
    "expert", "pipeline_schedules", "pipeline",
)  # fmt: skip
CORE = tuple(f"tests/{room}" for room in ROOMS)
FULL = ("commgrid", "megatron_adapter", "tests")


@dataclass
class Found:
    """The results of one path in one environment."""

    environment: str
    path: str
    passed: int = 0
    seconds: float = 0.0
    date: str = ""
    skipped: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


def main() -> int:
    args = arguments()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    folder = Path(args.envs).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / "results.json"
    if not args.table:
        for python in args.python:
            for version in args.torch:
                interpreter = environment(folder, version, python)
                label = describe(interpreter)
                print(f"== {label}", flush=True)
                for path in args.only or paths(args.full or args.short):
                    found = run(interpreter, label, path, args)
                    keep(results, found)
                    print(f"   {path}: {told(found)}", flush=True)
    rows = read(results)
    print(as_markdown(rows))
    return 1 if any(row.failed for row in rows) else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--torch", nargs="+", default=TORCH, help=f"versions (default: {' '.join(TORCH)})")
    add("--python", nargs="+", default=[sys.executable], help="interpreters (default: this one)")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--core", action="store_true", help="what touches torch most (default)")
    chosen.add_argument("--short", action="store_true", help="everything, as pytest runs it")
    chosen.add_argument("--full", action="store_true", help="everything, with pytest --full")
    chosen.add_argument("--only", nargs="+", help="these paths alone")
    chosen.add_argument("--table", action="store_true", help="run nothing, print earlier results")
    add("--envs", default=str(ROOT / ".versions"), help="where environments and results are kept")
    add("--jobs", type=int, default=1, help="pytest processes for each path (default: 1)")
    add("--timeout", type=float, default=1800, help="seconds for each path (default: 1800)")
    return parser.parse_args()


def paths(everything: bool) -> tuple[str, ...]:
    """The paths to run, a process each."""
    if everything:
        return FULL
    files = sorted((ROOT / "tests").glob("test_*.py"))
    return (*(f"tests/{file.name}" for file in files if file.name not in NOT_CORE), *CORE)


# -- environments -----------------------------------------------------------------------


def environment(folder: Path, version: str, python: str) -> str:
    """The interpreter of an environment with this torch; makes it if need be.

    A configuration of pip's may cap torch, or name builds of it: it is left out. commgrid comes
    without its requirements, which name a range of torch; pytest finds its plugin there.
    """
    asked = "import sys; print('%d.%d' % sys.version_info[:2])"
    number = subprocess.check_output([python, "-c", asked], text=True).strip()
    made = folder / f"torch-{version}-python-{number}"
    interpreter = made / "bin" / "python"
    if (made / "ready").exists():
        return str(interpreter)
    subprocess.run([python, "-m", "venv", str(made)], check=True)
    install(interpreter, f"torch=={version}", *NEEDED)
    for package in group("test"):  # without one of the peers, the tests that compare are skipped
        try:
            install(interpreter, f"torch=={version}", package)
        except subprocess.CalledProcessError as error:
            print(f"   {package} does not install beside torch {version}: {error}", flush=True)
    install(interpreter, "--no-deps", "--editable", str(ROOT))
    (made / "ready").touch()
    return str(interpreter)


def group(name: str) -> list[str]:
    """The packages of a dependency group, with those of the groups that it includes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    lines = project["dependency-groups"][name]
    return [
        package
        for line in lines
        for package in ([line] if isinstance(line, str) else group(line["include-group"]))
    ]


def install(interpreter: Path, *packages: str) -> None:
    free = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_CONSTRAINT": ""}
    command = [str(interpreter), "-m", "pip", "install", "--quiet", *packages]
    subprocess.run(command, check=True, env=free)


def describe(interpreter: str) -> str:
    """Such as `torch 2.15.0+cu132, Python 3.11.7`."""
    script = (
        "import platform, torch; v = torch.__version__; c = torch.version.cuda; "
        "v += '' if '+' in v else f'+cu{c}' if c else '+cpu'; "
        "print(f'torch {v}, Python {platform.python_version()}')"
    )
    return subprocess.check_output([interpreter, "-c", script], text=True).strip()


# -- running ----------------------------------------------------------------------------


def run(interpreter: str, label: str, path: str, args: argparse.Namespace) -> Found:
    """Run pytest on one path; a process that dies or is not done in time is a failure."""
    report = Path(args.envs).resolve() / f"report-{os.getpid()}.xml"
    report.unlink(missing_ok=True)
    command = [interpreter, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command += [path, *(["--full"] if args.full else [])]
    command += ["-n", str(args.jobs), "--dist", "loadfile"] if args.jobs > 1 else []
    found = Found(label, path, date=datetime.now(UTC).date().isoformat())
    started = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=args.timeout,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode not in (0, 1, 5):
            found.failed.append(f"{path}: exit code {done.returncode}: {done.stdout[-300:]}")
    except subprocess.TimeoutExpired:
        found.failed.append(f"{path}: not done after {args.timeout:g} s")
    found.seconds = round(time.monotonic() - started, 1)
    if report.exists():
        count(ElementTree.parse(report).getroot(), found)
        report.unlink()
    return found


def count(root: ElementTree.Element, found: Found) -> None:
    """Add the counts of a JUnit report."""
    skipped: Counter[str] = Counter()
    for case in root.iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        skip = case.find("skipped")
        wrong = [node for node in case if node.tag in ("failure", "error")]
        if wrong:
            said = " ".join((wrong[0].get("message") or "").split())
            found.failed.append(f"{name}: {said[:200]}")
        elif skip is not None:
            skipped[skip.get("message") or "no reason"] += 1
        else:
            found.passed += 1
    found.skipped = dict(skipped)


# -- results ----------------------------------------------------------------------------


def read(results: Path) -> list[Found]:
    if not results.exists():
        return []
    return [Found(**row) for row in json.loads(results.read_text())]


def keep(results: Path, found: Found) -> None:
    """Put it among the results, in place of an earlier one of the same path."""
    key = (found.environment, found.path)
    with open(results.with_suffix(".lock"), "w") as lock:  # runs beside each other share them
        fcntl.flock(lock, fcntl.LOCK_EX)
        others = [row for row in read(results) if (row.environment, row.path) != key]
        results.write_text(json.dumps([asdict(row) for row in [*others, found]], indent=1))


def told(found: Found) -> str:
    skips = sum(found.skipped.values())
    said = f"{found.passed} passed, {skips} skipped, {len(found.failed)} failed"
    return f"{said} in {found.seconds:.0f} s" + "".join(f"\n      {why}" for why in found.failed)


def as_markdown(rows: Iterable[Found]) -> str:
    """A row for each environment, and below it why tests were skipped or failed."""
    by_environment: dict[str, list[Found]] = {}
    for row in rows:
        by_environment.setdefault(row.environment, []).append(row)
    lines = ["| environment | paths | passed | skipped | failed | minutes | last run |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for label in sorted(by_environment):
        own = by_environment[label]
        skips = sum(sum(row.skipped.values()) for row in own)
        minutes = sum(row.seconds for row in own) / 60
        lines.append(
            f"| {label} | {len(own)} | {sum(row.passed for row in own)} | {skips} | "
            f"{sum(len(row.failed) for row in own)} | {minutes:.0f} | "
            f"{max(row.date for row in own)} |"
        )
    reasons = reasons_of(by_environment)
    lines += ["", "Skipped:", "", *reasons] if reasons else []
    failures = [f"- {row.environment}: {why}" for row in rows for why in row.failed]
    lines += ["", "Failed:", "", *failures] if failures else []
    return "\n".join(lines)


def reasons_of(by_environment: Mapping[str, Iterable[Found]]) -> list[str]:
    """Each reason to skip, with how many tests it took where."""
    found: dict[str, dict[str, int]] = {}
    for label, own in sorted(by_environment.items()):
        version = re.sub(r"torch ([\d.]+)\S*, Python (\d+\.\d+).*", r"\1 (\2)", label)
        for row in own:
            for reason, times in row.skipped.items():
                counts = found.setdefault(reason, {})
                counts[version] = counts.get(version, 0) + times
    return [
        f"- {reason}: " + ", ".join(f"{times} on {version}" for version, times in counts.items())
        for reason, counts in sorted(found.items())
    ]


if __name__ == "__main__":
    sys.exit(main())
