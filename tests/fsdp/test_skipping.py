"""Units that some ranks skip (T45): in forward or only in backward, from the first step on or later, alone or with the
units around them. Nobody hangs, and who skips counts as zero.
"""

import itertools
import random

import pytest

from tests.fsdp.digits import expected, read, steps
from tests.fsdp.versions import HYBRID, MODES, Mode, drilled

ALL = "0 1 2 2.left 2.right 3"
PLANS = {  # of each step, of each microbatch, of each rank what it runs
    "nobody": [[(ALL, ALL)] * 3] * 2,
    "one step one rank, one step the other": [[("0", "1")], [("1", "0")], [(ALL, ALL)]],
    "later": [[(ALL, ALL)], [(ALL, "1 3")], [("", ALL)], [("2 2.right", "2 2.left")], [(ALL, ALL)]],
    "in the first step": [[(ALL, "")], [(ALL, ALL)], [("0", "2 2.left 3")]],
    "only in backward": [[("0! 1 2 2.left 2.right 3!", ALL)], [("0! 1! 2! 2.left 2.right 3!", "0 1! 2! 2.right 3")]],
    "in some microbatches": [[(ALL, "3"), ("", ""), ("0 2 2.left", ALL)], [("1", "0"), (ALL, ALL), ("", "0! 2 3")]],
    "what runs in another order on all ranks": [
        [("3 1 2 2.right 2.left 0",) * 2],
        [("3 1 2 2.right 2.left 0", "1 0")],
        [("3 2 2.right", "")],
    ],
}


def judged(pool, ranks, mode, plan, *more):
    assert list(read(pool.run(ranks, steps, mode, plan, *more, timeout=10.0))) == list(expected(plan))


OFTEN = [(True, 1, True), (None, 2, False), (False, 0, True)]
SELDOM = [case for case in itertools.product((True, None, False), (0, 1, 2, 3), (True, False)) if case not in OFTEN]


@pytest.mark.parametrize(("reshard", "prefetch", "anchored"), [*OFTEN, *(drilled(*case) for case in SELDOM)])
@pytest.mark.parametrize("plan", PLANS)
def test_a_rank_that_skips_a_unit_counts_as_zero(pool, plan, reshard, prefetch, anchored):
    """Inputs with a gradient and without: the end of a backward shows at them, or at the weights."""
    judged(pool, 2, Mode(reshard, prefetch=prefetch), PLANS[plan], "no_sync", anchored)


@pytest.mark.parametrize("quiet", ["no_sync", "sync"])
@pytest.mark.parametrize("mode", ["full", drilled("shard grad-op"), drilled("no shard")])
def test_skipped_in_some_microbatches(pool, mode, quiet):
    judged(pool, 2, MODES[mode], PLANS["in some microbatches"], quiet)


HYBRID_PLAN = [
    [(ALL, "0", "1", "2 2.left"), ("", "3", "0! 3", ALL)],
    [("", "", "2 2.right", ""), ("0 1", ALL, "", "2.left 2!")],
    [(ALL,) * 4] * 2,
]


@pytest.mark.parametrize("quiet", ["no_sync", "no_replica_sync", drilled("sync")])
@pytest.mark.parametrize("mode", HYBRID)
def test_skipped_under_replicas(pool, mode, quiet):
    judged(pool, 4, HYBRID[mode], HYBRID_PLAN, quiet)


def drawn(ranks, dice):
    """A plan in which every rank leaves out whatever it likes; after a first step that shows the order, if it is not
    that in which units are registered.
    """
    order = dice.choice([ALL, "2 2.left 2.right 0 1 3", "3 2 2.right 2.left 1 0"])

    def run():
        parts = [part for part in order.split() if dice.random() < 0.6]
        return " ".join(part + ("" if "." in part else dice.choice(["", "", "!"])) for part in parts)

    steps = [[tuple(run() for _ in range(ranks)) for _ in range(dice.randint(1, 3))] for _ in range(4)]
    return steps if order == ALL else [[(order,) * ranks], *steps]


@pytest.mark.drill
@pytest.mark.parametrize("seed", range(30))
def test_whatever_ranks_skip(pool, seed):
    dice = random.Random(seed)
    ranks = dice.choice([2, 3, 4])
    shards = dice.choice([None, 1, 2]) if ranks == 4 else None
    mode = Mode(dice.choice([True, None, False]), prefetch=dice.randint(0, 3), shards=shards)
    quiet = dice.choice(["no_sync", "no_replica_sync" if shards else "no_sync", "sync"])
    judged(pool, ranks, mode, drawn(ranks, dice), quiet, dice.random() < 0.5)
