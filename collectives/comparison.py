"""The command of every bench, `python -m FOLDER.bench`: whole runs on local ranks, their tables, and the median ratio.

Within a run ours and the others take turns (turns.py), which takes out what disturbs them alike. What is left differs
from one start of the ranks to the next, so a ratio that is to be quoted is the median of several whole runs.
"""

import argparse
import pickle
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from collectives import runtime, turns
from collectives.runtime import Runtime
from collectives.turns import Case, Row

Cases = Callable[[Runtime], list[Case]]


def main(cases: Cases, *, ranks: Sequence[int]) -> int:
    """Measure what `cases` builds on each rank, in worlds of these sizes, and print it; the exit status."""
    parser = argparse.ArgumentParser(
        description=sys.modules[cases.__module__].__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=ranks, help=f"worlds to measure (default {ranks})")
    parser.add_argument("--rounds", type=int, default=21, help="turns of each (default %(default)s)")
    parser.add_argument("--repeat", type=int, default=1, help="whole runs, each with new ranks (default %(default)s)")
    options = parser.parse_args()
    if runtime.launched():
        parser.error("it starts its own ranks: run it with python, not with torchrun")
    if options.rounds < 2 or min(options.ranks) < 1 or options.repeat < 1:
        parser.error("it takes at least 2 rounds, 1 rank and 1 run")
    ratios: dict[tuple[int, str, str], list[float]] = defaultdict(list)
    for _ in range(options.repeat):
        for size in options.ranks:
            rows = whole_run(cases, size, options.rounds)
            if rows is None:
                return 1
            print(f"\n{size} {'rank' if size == 1 else 'ranks'}\n{turns.table(rows)}", flush=True)
            for row in rows:
                if row.ratio:
                    ratios[size, row.case, row.who].append(row.ratio[1])
    if options.repeat > 1:
        print(f"\n{summary(ratios)}")
    return 0


def whole_run(cases: Cases, ranks: int, rounds: int) -> list[Row] | None:
    """The rows of one run on this many new ranks; None when a rank failed, which has told why."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "rows")

        def rank_main() -> None:
            with runtime.start(timeout=60) as run:
                rows = turns.measure(run, cases(run), rounds)
                if run.rank == 0:
                    result.write_bytes(pickle.dumps(rows))

        return pickle.loads(result.read_bytes()) if runtime.launch(rank_main, ranks) == 0 else None


def summary(ratios: dict[tuple[int, str, str], list[float]]) -> str:
    """Of each comparison, by (ranks, case, other): ours / its time in every whole run, and the median of the runs."""
    lines = [f"{'ours / its time, by whole run':62}median"]
    for (size, case, who), runs in ratios.items():
        name = f"{size} × {case}, {who}"
        lines.append(f"{name:62}{statistics.median(runs):6.2f}  of  {'  '.join(f'{ratio:.2f}' for ratio in runs)}")
    return "\n".join(lines)
