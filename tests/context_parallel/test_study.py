"""When a method waits, held against figures done by hand, on links without latency."""

import math
from dataclasses import replace

import pytest

from collectives.cost import Link, Topology
from context_parallel import study
from context_parallel.study import Task

NODES = Topology(Link(0, 400e9), Link(0, 50e9), per_node=4)
TASK = Task(heads=8, kv_heads=2, length=1 << 16, ranks=4, topology=NODES)
KV = 2 * 2 * 128 * (1 << 14)  # elements of a rank's keys and values


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_ring_with_enough_tokens_waits_for_the_way_home_alone(ranks):
    enough = study.enough(replace(TASK, ranks=ranks))
    more, fewer = (replace(TASK, ranks=ranks, length=ranks * math.ceil(enough * part)) for part in (1, 0.99))
    assert study.ring(more) == pytest.approx(more.hop(4 * more.kv), rel=1e-9)
    steps = fewer if ranks > 2 else replace(fewer, length=fewer.length // 2)  # two ranks: dk, dv travel without k, v
    assert study.ring(steps) > 1.001 * steps.hop(4 * steps.kv)


def test_seconds_of_computing():
    assert TASK.forward == 4 * 128 * 8 * (1 << 31) / study.RATE / 4
    assert TASK.kv == KV


def test_all_gather_waits_for_all_it_sends():
    sent = 2 * 3 * 2 * KV + 3 * 4 * KV
    assert study.all_gather(TASK) == pytest.approx(sent / 400e9)


def test_ulysses_sends_copies_of_few_heads():
    piece = 128 * (1 << 14) * 2  # bytes of one head
    assert study.ulysses(TASK) == pytest.approx(2 * 3 / 4 * (8 + 4 + 4 + 8) * piece / 400e9)
    assert math.isnan(study.ulysses(replace(TASK, ranks=16)))


def test_ring_ulysses_is_ulysses_in_nodes_and_a_ring_between_them():
    eight = replace(TASK, length=1 << 17, ranks=8)
    ring = Task(heads=2, kv_heads=1, length=1 << 17, ranks=2, topology=replace(NODES, per_node=1))
    assert study.ring_ulysses(eight) == pytest.approx(study.ulysses(TASK) + study.ring(ring))
    assert ring.kv == 2 * KV  # of four times the tokens one head, where there were two
    assert math.isnan(study.ring_ulysses(TASK))
