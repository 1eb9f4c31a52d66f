"""Pictures of a benchmark's rows, or of the losses of runs.

python tests/benchmarks/draw.py --benchmark startup.json --rows "creation calls" -o startup.svg
python tests/benchmarks/draw.py --metrics a.jsonl b.jsonl -o curves.svg
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from commgrid.errors import CommGridError
from commgrid.viz.figure import SUFFIXES, check_suffix, drawing, save
from tests.benchmarks.benchmark_picture import as_text, draw_benchmark, read_benchmark
from tests.benchmarks.curves_picture import draw_curves, read_curves


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--benchmark", type=Path, metavar="FILE",
        help="output of a script here with --json: ours beside its peers",
    )  # fmt: skip
    what.add_argument(
        "--metrics", nargs="+", type=Path, metavar="FILE",
        help="files of train_gpt --metrics: loss curves on one plot",
    )  # fmt: skip
    parser.add_argument(
        "--rows", nargs="+", default=[], metavar="TEXT",
        help="only the benchmark's rows whose case or metric holds one of these",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help=".svg, .png or .pdf"
    )
    args = parser.parse_args(argv)
    if args.rows and args.metrics:
        parser.error("--rows goes with --benchmark")
    try:
        check_suffix(args.output, SUFFIXES)
        with drawing():
            if args.benchmark is not None:
                rows = read_benchmark(args.benchmark, args.rows)
                save(draw_benchmark(rows), args.output)
                print(as_text(rows))
            else:
                save(draw_curves(read_curves(args.metrics)), args.output)
    except CommGridError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
