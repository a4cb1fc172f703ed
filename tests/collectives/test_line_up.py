"""The model beside the algorithms themselves: bytes of every rank and steps; and the demo's table of all of them."""

from unittest import mock

import pytest

from collectives import competitors, cost, cost_table, line_up
from collectives.algorithms import pieces, ring
from collectives.competitors import BACKEND, COLLECTIVES
from collectives.cost import Link, Topology
from tests import ordered
from tests.collectives.algorithms import ALGORITHMS, Case, nodes
from tests.collectives.algorithms import run as run_algorithm

LCM = 840  # numbers, which every P up to 8 divides


def node_size(run):
    return nodes(run)[0].size()


@pytest.mark.parametrize("ranks", range(1, 9))
def test_the_model_has_the_bytes_of_every_rank_and_the_steps(ranks):
    """Of one rank's root, 0; scatter and gather are given a piece."""
    per_node = ordered.run(ranks, node_size).results[0]
    machine = Topology(Link(0, 1), Link(0, 1), per_node)
    for collective, algorithm in ALGORITHMS:
        if collective == "all_to_all":
            continue  # the job's is uneven
        piece = collective in ("scatter", "gather")
        report = ordered.run(ranks, run_algorithm, (collective, algorithm), Case(LCM // ranks if piece else LCM))
        n = 1 if collective == "barrier" else 8 * LCM
        choice = {"chunks": 1} if algorithm == "ring" and collective in ("broadcast", "reduce") else {}
        expected = cost.of(collective, algorithm, n, ranks, machine, **choice)
        assert (report.steps, report.sent) == (expected.steps, list(expected.sent_by)), (collective, algorithm)


@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_the_model_of_a_line_in_chunks(chunks, monkeypatch):
    monkeypatch.setattr(pieces, "CHUNK", 8 * LCM // chunks)
    for collective in ("broadcast", "reduce"):
        report = ordered.run(4, run_algorithm, (collective, "ring"), Case(LCM))
        expected = cost.of(collective, "ring", 8 * LCM, 4, Topology(Link(0, 1), Link(0, 1), 4), chunks=chunks)
        assert (report.steps, report.sent) == (expected.steps, list(expected.sent_by))


def test_everyone_who_can_do_a_collective_takes_part():
    able = {(name, who) for name in COLLECTIVES for who in competitors.able(name, 4)}
    assert able == set(cost.ALGORITHMS) | {(name, BACKEND) for name in COLLECTIVES}
    assert set(ALGORITHMS) == set(cost.ALGORITHMS)


def lined_up(run, n):
    rows = line_up.line_up(run, n)
    other = [(row.collective, row.who) for row in rows if row.expected and not line_up.as_predicted(row)]
    return len(rows), other, line_up.table(rows)


@pytest.mark.parametrize("ranks", [1, 3, *(pytest.param(ranks, marks=pytest.mark.drill) for ranks in (2, 4))])
def test_all_send_what_the_model_says(pool, ranks):
    for count, other, table in pool.run(ranks, lined_up, 240_000):
        assert count == len(table.splitlines()) - 1 - len(cost_table.remarks(ranks)) and not other, table
        assert "DOES NOT HOLD" not in table


def twice_around(pieces, group):
    """A ring's all-gather that goes on for another round."""
    for _ in range(2):
        yield from GATHER(pieces, group)


GATHER = ring._all_gather


def with_a_ring_that_goes_twice(run, n):
    with mock.patch.object(ring, "_all_gather", twice_around):
        return lined_up(run, n)


def row(sent, exchanges=1, seconds=((1.0,), (1.0,))):
    """A direct all_gather of 80,000 bytes on 2 ranks that meet so many times."""
    events = [
        [e for i in range(exchanges) for e in ((i, (("g", me, you, True), ("g", you, me, False))), (i, None))]
        for me, you in ((0, 1), (1, 0))
    ]
    ranks = [line_up.Measured(sent, *rank) for rank in zip(events, seconds, strict=True)]
    expected = cost.of("all_gather", "direct", 80_000, 2, Topology(Link(0, 1), Link(0, 1), 2))
    return line_up.Row("all_gather", "direct", 80_000, expected, ranks)


def test_bytes_hold_within_a_percent_and_the_headers_of_an_exchange():
    allowed = 400 + line_up.HEADERS
    for sent, holds in ((0, False), (40_000 - allowed, True), (40_000 + allowed, True), (40_001 + allowed, False)):
        assert row(sent).sends_as_predicted() == line_up.as_predicted(row(sent)) == holds, sent


def test_one_step_more_does_not_hold():
    assert row(40_000, exchanges=2).sends_as_predicted() and not line_up.as_predicted(row(40_000, exchanges=2))


def test_of_every_call_the_slowest_rank_counts_and_of_the_calls_the_median():
    assert row(40_000, seconds=((1.0, 5.0, 2.0), (4.0, 1.0, 3.0))).seconds == 4.0


def in_short_chunks(run, n):
    with mock.patch.object(pieces, "CHUNK", n // 3):
        return lined_up(run, n)


def test_a_line_goes_in_as_many_chunks_as_the_model_says(pool):
    for _, other, table in pool.run(3, in_short_chunks, 240_000):
        assert not other and table.count("P-2+C = 4") == 2, table


def test_one_that_sends_more_is_told(pool):
    for _, other, table in pool.run(3, with_a_ring_that_goes_twice, 240_000):
        assert other == [("all_reduce", "ring"), ("all_gather", "ring")]
        assert table.count("DOES NOT HOLD") == 2
