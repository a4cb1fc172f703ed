"""`python -m tests.bench.table FILE`: the table of a JSON file that `make bench` wrote."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from collectives import turns
from collectives.turns import Row


def rows(report: dict) -> Iterator[Row]:
    """A row for each competitor of each benchmark; of the rounds only the median is left."""
    for bench in report["benchmarks"]:
        ours = bench["extra_info"]
        case = f"{ours['case']}, {ours['ranks']} rank{'s' if ours['ranks'] > 1 else ''}"
        yield Row(case, ours["who"], (bench["stats"]["median"],), *costs(ours), ratio=None)
        for who, other in ours["beside"].items():
            yield Row(case, who, (other["median_seconds"],), *costs(other), ratio=tuple(other["ours_over_its"]))


def costs(entry: dict) -> tuple[float, int | None, int]:
    """Processor seconds, bytes sent, peak bytes."""
    return entry["cpu_seconds"], entry["sent_bytes"], entry["peak_bytes"]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.table", description=__doc__)
    parser.add_argument("file", type=Path)
    report = json.loads(parser.parse_args().file.read_text())
    print(f"\n{turns.table(list(rows(report)))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
