"""The harness of the benches: who takes which turn, whose seconds count, what the rows and the JSON say."""

import json
import statistics
import time
from types import SimpleNamespace

import pytest
import torch

from collectives import comm, comparison, turns
from collectives.turns import Case, Row
from tests.bench import ranks, table


def order_of_turns(run):
    """The turns in the order in which they ran, after the calls that warm up."""
    seen = []
    first = Case("first", {"a": lambda: seen.append("a"), "b": lambda: seen.append("b")})
    second = Case("second", {"c": lambda: seen.append("c")}, prepare=lambda: seen.append("-"))
    turns.measure(run, [first, second], 3)
    return "".join(seen)


def test_turns_rotate(pool):
    for order in pool.run(2, order_of_turns):
        assert order.endswith("ab-c" + "b-ca" + "-cab")


def unequal(run):
    """Rank r sleeps 20 + 20 r ms in ours; the other sleeps 10 ms in each of four calls a turn."""
    ours = lambda: time.sleep(0.02 + 0.02 * run.rank)  # noqa: E731
    rows = turns.measure(run, [Case("naps", {"ours": ours, "other": lambda: time.sleep(0.01)})], 4)
    often = turns.measure(run, [Case("often", {"ours": lambda: time.sleep(0.01)}, repeat=4)], 2)
    return rows, often


def test_the_slowest_rank_counts_and_all_ranks_have_the_same_rows(pool):
    results = pool.run(2, unequal)
    assert results[0] == results[1]
    (ours, other), (often,) = results[0]
    assert ours.who == "ours" and ours.ratio is None and len(ours.rounds) == 4
    assert min(ours.rounds) >= 0.04 and min(other.rounds) >= 0.01 and min(often.rounds) >= 0.01
    pairs = [a / b for a, b in zip(ours.rounds, other.rounds, strict=True)]
    assert other.ratio == tuple(statistics.quantiles(pairs, n=4))
    assert ours.seconds == statistics.median(ours.rounds)


def scripted(run, script):
    """A case on a clock that is read from a script: seconds of wall and of processor for each turn of this rank."""
    times = [iter(kind) for kind in script[run.rank]]
    clocks = [lambda kind=kind: next(kind) for kind in times]
    turns.time = SimpleNamespace(perf_counter=clocks[0], process_time=clocks[1])
    try:
        return turns.measure(run, [Case("case", {"ours": turns.nothing, "other": turns.nothing}, repeat=2)], 2)
    finally:
        turns.time = time


def test_the_arithmetic_of_a_row(pool):
    """Two rounds, turns ours, other, other, ours; each turn of two calls reads each clock twice."""
    wall = [[0, 2, 0, 1, 0, 2, 0, 4], [0, 1, 0, 4, 0, 1, 0, 8]]
    cpu = [[0, 1, 0, 1, 0, 1, 0, 3], [0, 2, 0, 1, 0, 1, 0, 4]]
    ours, other = pool.run(2, scripted, [[wall[0], cpu[0]], [wall[1], cpu[1]]])[0]
    assert ours.rounds == (1.0, 4.0) and other.rounds == (2.0, 1.0)
    assert (ours.cpu, other.cpu) == (1.5, 1.0)  # of both ranks together, the lower one of two
    assert other.ratio == tuple(statistics.quantiles([0.5, 4.0], n=4))


def costs(run):
    """Ours sends 100 KB from rank 0 alone and allocates 5 KiB a rank above the first; the other does neither."""
    message = torch.zeros(25_000)

    def ours():
        comm.broadcast(message, 0, group=run.world)
        return torch.empty(5 * 1024 * run.rank, dtype=torch.uint8)

    return turns.measure(run, [Case("costs", {"ours": ours, "other": turns.nothing})], 2)


def test_bytes_and_peak_are_those_of_the_rank_with_most(pool):
    for ours, other in pool.run(2, costs):
        assert 100_000 <= ours.sent <= 101_000 and other.sent == 0
        assert ours.peak == 5 * 1024 and other.peak == 0


def test_one_round_has_no_quartiles(pool):
    assert all("at least 2" in message for message in pool.run(2, one_round))


def one_round(run):
    with pytest.raises(ValueError) as caught:
        turns.measure(run, [], 1)
    return str(caught.value)


ROWS = [
    Row("case a", "ours", (0.001, 0.003, 0.002), 0.004, 12_345, 67_890, None),
    Row("case a", "DDP", (0.004, 0.004, 0.004), 0.005, None, 0, (0.25, 0.5, 0.75)),
]


def test_the_table():
    _, case, ours, other = turns.table(ROWS).splitlines()
    assert case == "case a"
    assert ours.split() == ["ours", "2.000", "4.000", "12,345", "67,890"]
    assert other.split() == ["DDP", "4.000", "5.000", "0.50", "(0.25", "…", "0.75)", "?", "0"]


def test_the_summary_of_whole_runs():
    _, line = comparison.summary({(2, "case a", "DDP"): [0.5, 0.9, 0.6]}).splitlines()
    assert line.split("  ")[0] == "2 × case a, DDP"
    assert line.split()[-5:] == ["0.60", "of", "0.50", "0.90", "0.60"]


class Benchmark:
    """As much of pytest-benchmark's fixture as is used: it times what it is given by the clock of ranks.py."""

    def __init__(self, disabled):
        self.disabled, self.extra_info, self.times = disabled, {}, []

    def pedantic(self, target, args=(), rounds=1):
        for _ in range(rounds):
            before = ranks.clock()
            target(*args)
            self.times.append(ranks.clock() - before)


def naps(run, seconds):
    return Case("naps", {"ours": lambda: time.sleep(2 * seconds), "other": lambda: time.sleep(seconds)})


def test_what_reaches_the_json(pool):
    benchmark = Benchmark(disabled=False)
    ranks.record(benchmark, pool, 2, naps, 0.001)
    assert len(benchmark.times) == ranks.ROUNDS and min(benchmark.times) >= 0.002
    extra = json.loads(json.dumps(benchmark.extra_info))
    assert (extra["ranks"], extra["case"], extra["who"], extra["peak_bytes"]) == (2, "naps", "ours", 0)
    other = extra["beside"]["other"]
    assert other["median_seconds"] >= 0.001 and other["ours_over_its"] == sorted(other["ours_over_its"])
    report = {"benchmarks": [{"stats": {"median": statistics.median(benchmark.times)}, "extra_info": extra}]}
    ours, beside = table.rows(report)
    assert (ours.case, ours.who, ours.ratio, ours.sent) == ("naps, 2 ranks", "ours", None, extra["sent_bytes"])
    assert (beside.who, beside.seconds, beside.ratio[1]) == (
        "other",
        other["median_seconds"],
        other["ours_over_its"][1],
    )


def test_without_measuring_each_is_called_once(pool):
    benchmark = Benchmark(disabled=True)
    ranks.record(benchmark, pool, 2, naps, 0.001)
    assert benchmark.times == [0.0] and benchmark.extra_info == {}
