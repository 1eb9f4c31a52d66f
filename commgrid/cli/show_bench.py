"""`commgrid show --bench`: measured collectives beside a cluster's prediction."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commgrid.advisor.collectives import collective_time
from commgrid.advisor.fitting import Measured
from commgrid.cli.grid_options import read_cluster
from commgrid.errors import SpecError
from commgrid.viz.costs_picture import draw_costs
from commgrid.viz.json_lines import filled, read_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    """The flag."""
    parser.add_argument(
        "--bench", type=Path, metavar="FILE",
        help="output of `commgrid bench --json`, beside the prediction of --cluster",
    )  # fmt: skip


class ShownBench:
    """What `--bench` names, and the cluster beside it.

    Raises:
        SpecError: no cluster is given, or the file is no bench's.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        cluster = read_cluster(args)
        if args.cluster is None or cluster is None:
            raise SpecError(
                f"--bench {args.bench}: give the cluster that predicts it as well, such as the "
                "file that `commgrid bench -o cluster.yaml` wrote, as --cluster cluster.yaml"
            )
        self._cluster = cluster
        self._rows = read_json(
            args.bench,
            "the object that `commgrid bench --json` prints",
            lambda found: [_measured(row) for row in filled(found["rows"])],
        )

    def _predicted(self, row: Measured) -> float:
        return collective_time(row.collective, row.size, row.spread, self._cluster)

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        return {
            "cluster": self._cluster.name,
            "rows": [
                {
                    "group": row.group, "collective": row.collective, "size": row.size,
                    "measured_us": row.seconds * 1e6, "predicted_us": self._predicted(row) * 1e6,
                }
                for row in self._rows
            ],
        }  # fmt: skip

    def as_text(self) -> str:
        """For people: a line for each row, measured beside predicted."""
        lines = [f"{'group':12} {'collective':14} {'bytes':>12} {'measured':>12} {'predicted':>12}"]
        for row in self._rows:
            guess = self._predicted(row)
            lines.append(
                f"{row.group:12} {row.collective:14} {row.size:12,} {row.seconds * 1e6:9,.1f} us "
                f"{guess * 1e6:9,.1f} us  {guess / row.seconds - 1:+.0%}"
            )
        return "\n".join(lines)

    def draw(self) -> Figure:
        """As dots, and the model's lines."""
        return draw_costs(self._rows, (), self._cluster)


def _measured(row: Mapping[str, Any]) -> Measured:
    return Measured(
        group=str(row["group"]),
        names=tuple(map(str, row["names"])),
        collective=str(row["collective"]),
        size=int(row["size"]),
        count=int(row["count"]),
        ranks=int(row["ranks"]),
        groups=int(row["groups"]),
        spread=tuple(map(int, row["spread"])),
        seconds=float(row["time_us"]) / 1e6,
        least=float(row["least_us"]) / 1e6,
        most=float(row["most_us"]) / 1e6,
    )
