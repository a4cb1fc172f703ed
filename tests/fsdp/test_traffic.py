"""What a step sends, by mode and microbatches: how many collectives over which groups, the bytes of the formula, and
those of the sockets.
"""

import math
from collections import Counter
from typing import NamedTuple

import pytest
import torch
from torch import nn

from collectives import comm, demo
from collectives.ledger import Ledger
from collectives.watch import watching
from fsdp import MixedPrecision, fully_shard
from tests.fsdp.counted import PARAMETERS, ROOT, SHAPES, UNITS, VOCAB, backward, slots, wrap
from tests.recorder import recording

FREED, KEPT = {"reshard_after_forward": True}, {"reshard_after_forward": False}
BF16 = MixedPrecision(param=torch.bfloat16)
BOTH = MixedPrecision(param=torch.bfloat16, reduce=torch.bfloat16)


class Mode(NamedTuple):
    """A way to shard, and how often, with k microbatches, each unit is gathered, reduced, and added to replicas."""

    settings: dict
    times: object  # k -> (gathers, reductions, replications)
    part: int = 1  # of the ranks shard one in so many, 0: a single one
    sync: str = ""
    kept_roots: object = lambda k: 0  # gathers that the root does without
    itemsizes: tuple = (4, 4)  # of what is gathered and what is reduced


MODES = {
    "full shard": Mode(FREED, lambda k: (2 * k, k, 0)),
    "no prefetch": Mode(FREED | {"prefetch": 0}, lambda k: (2 * k, k, 0)),
    "full shard, no_sync": Mode(FREED, lambda k: (2 * k, 1, 0), sync="no_sync"),
    "default": Mode({}, lambda k: (2 * k, k, 0), kept_roots=lambda k: k),
    "grad-op": Mode(KEPT, lambda k: (k, k, 0)),
    "grad-op, no_sync": Mode(KEPT, lambda k: (k, 1, 0), sync="no_sync"),
    "bfloat16 weights": Mode(FREED | {"mixed_precision": BF16}, lambda k: (2 * k, k, 0), itemsizes=(2, 4)),
    "bfloat16": Mode(FREED | {"mixed_precision": BOTH}, lambda k: (2 * k, k, 0), itemsizes=(2, 2)),
    "hybrid": Mode(FREED, lambda k: (2 * k, k, k), part=2),
    "hybrid, no_replica_sync": Mode(FREED, lambda k: (2 * k, k, 1), part=2, sync="no_replica_sync"),
    "hybrid, no_sync": Mode(FREED, lambda k: (2 * k, 1, 1), part=2, sync="no_sync"),
    "hybrid, bfloat16": Mode(FREED | {"mixed_precision": BOTH}, lambda k: (2 * k, k, k), part=2, itemsizes=(2, 2)),
    "hybrid, grad-op": Mode(KEPT, lambda k: (k, k, k), part=2),
    "no shard": Mode({}, lambda k: (0, 0, k), part=0),
    "no shard, no_sync": Mode({}, lambda k: (0, 0, 1), part=0, sync="no_sync"),
}


def sharding(mode, ranks):
    """(the ranks that shard, the replicas)."""
    shards = ranks // mode.part if mode.part else 1
    return shards, ranks // shards


def step(run, name, microbatches):
    """({(operation, ranks in its group): (calls, bytes in the ledger)}, bytes on sockets) of the second step."""
    mode = MODES[name]
    torch.manual_seed(0)
    model, handle = wrap(run, sharding(mode, run.size)[0], **mode.settings)
    ids = torch.arange(run.rank, VOCAB, 50)
    for _ in range(2):
        for shard in handle.parameters():
            shard.grad = None
        comm.barrier(group=run.world)
        with watching(book := Ledger()):
            before = demo.bytes_written()
            backward(handle, model, ids, microbatches, mode.sync)
            handle.after_step()
            sent = demo.bytes_since(before)
    calls, bytes_sent = Counter(), Counter()
    for row in book.rows():
        calls[row.op, len(row.ranks)] += row.calls
        bytes_sent[row.op, len(row.ranks)] += row.algorithm
    return {key: (number, bytes_sent[key]) for key, number in calls.items() if key[1] > 1}, sent


def steps(run, cases):
    return [step(run, *case) for case in cases]


def expected(mode, ranks, k):
    """The same by arithmetic. Agreeing on which parameters were used is one small all_reduce a group."""
    shards, replicas = sharding(mode, ranks)
    gathers, reductions, replications = mode.times(k)
    for_gathers, for_reductions = mode.itemsizes
    n, root = sum(slots(unit, shards) for unit in SHAPES), slots(ROOT, shards)
    passed = gathers * n - mode.kept_roots(k) * root
    rows = Counter(), Counter()

    def add(op, size, calls, sent):
        if size > 1 and calls:
            rows[0][op, size] += calls
            rows[1][op, size] += sent * (size - 1) / size

    add("all_gather_single", shards, gathers * UNITS - mode.kept_roots(k), for_gathers * passed)
    add("reduce_scatter_single", shards, reductions * UNITS, for_reductions * reductions * n)
    add("all_reduce", replicas, replications * UNITS, 2 * for_reductions * replications * n / shards)
    for size in (shards, replicas):
        add("all_reduce", size, 1, 2 * 8 * (PARAMETERS + UNITS))
    return {key: (calls, rows[1][key]) for key, calls in rows[0].items()}


def cases(ranks, microbatches):
    return [
        (name, k)
        for name, mode in MODES.items()
        for k in microbatches
        if mode.part != 2 or (ranks % 2 == 0 and ranks > 2)
    ]


@pytest.mark.parametrize(
    ("ranks", "microbatches"),
    [(1, (1,)), (2, (1,)), (4, (2,)), *(pytest.param(r, (1, 2, 3), marks=pytest.mark.drill) for r in (2, 3, 4))],
)
def test_traffic(pool, ranks, microbatches):
    chosen = cases(ranks, microbatches)
    for mine in pool.run(ranks, steps, chosen, timeout=60):
        for (name, k), (found, sent) in zip(chosen, mine, strict=True):
            where = f"{name} on {ranks} ranks, {k} microbatches"
            rows = expected(MODES[name], ranks, k)
            assert found == {key: (calls, pytest.approx(nbytes, rel=1e-12)) for key, (calls, nbytes) in rows.items()}, (
                where
            )
            formula, calls = sum(nbytes for _, nbytes in rows.values()), sum(calls for calls, _ in rows.values())
            if sent is not None:
                assert abs(sent - formula) <= 0.01 * formula + 4096 * calls, where


@pytest.mark.parametrize(("shards", "replicas"), [(2, 1), (3, 1), (4, 1), (2, 2), (4, 3)])
def test_the_formula_for_one_microbatch(shards, replicas):
    """Of weights that need no padding, with every unit freed: 3(s-1)/s + (2/s)(r-1)/r times their bytes."""
    mode = Mode(FREED, lambda k: (2 * k, k, k), part=replicas)
    n = 4 * sum(slots(unit, shards) for unit in SHAPES)
    agreed = sum(2 * 8 * (PARAMETERS + UNITS) * (size - 1) / size for size in (shards, replicas))
    total = sum(nbytes for _, nbytes in expected(mode, shards * replicas, 1).values()) - agreed
    assert total / n == pytest.approx(3 * (shards - 1) / shards + 2 / shards * (replicas - 1) / replicas, rel=1e-12)


def frozen(run):
    """(elements that are gathered, elements that are reduced) of two weights, of which the first one is frozen."""
    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 2, bias=False))
    model[0].requires_grad_(False)
    handle = fully_shard(model, run.world)
    with recording() as recorder:
        model(torch.ones(1, 3)).sum().backward()
        handle.finish()
    return [call.elements for call in recorder.calls if call.about]


def test_what_is_frozen_is_gathered_and_not_reduced(pool):
    """[5, 3] and [2, 5] on 2 ranks: three rows and one of each rank."""
    assert pool.run(2, frozen) == [[2 * (3 * 3 + 5), 2 * 5]] * 2


def padding(run):
    """(what the handle says of padding, the elements of all slots of a rank) with 1 shard group of all ranks."""
    _, handle = wrap(run, run.size)
    return handle.padding(), sum(pack.slots.length for pack in handle.packs)


@pytest.mark.parametrize("ranks", [2, 4, *(pytest.param(r, marks=pytest.mark.drill) for r in (3, 5))])
def test_padding(pool, ranks):
    """At most one row of a parameter a rank, and told."""
    whole = sum(math.prod(shape) for unit in SHAPES for shape in unit)
    filled = sum(slots(unit, ranks) for unit in SHAPES)
    for told, slot in pool.run(ranks, padding):
        assert ranks * slot == filled
        assert f"{whole:,} parameters in {UNITS} units, {slot:,} a rank, {filled - whole} of padding" == told
