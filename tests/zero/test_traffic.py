"""What a step sends, by stage and microbatches: which collectives of how many elements, typed as the picture; the bytes
of the formula, and those of the sockets.
"""

import itertools

import pytest
import torch

from collectives import comm, demo
from collectives.ledger import Ledger
from collectives.watch import Watcher, watching
from tests.zero.counted import STAGES, Net, backward, padded
from tests.zero.versions import drilled
from zero import Mixed

VOCAB, WIDTH, HIDDEN = 509, 127, 383
SIZES = {"embed": VOCAB * WIDTH, "norm": WIDTH, "up": WIDTH * HIDDEN, "down": WIDTH * HIDDEN, "head": VOCAB * WIDTH}
CAP = 130_000  # elements of a bucket
BUCKETS = (("head", "down"), ("up", "norm", "down"), ("up", "norm", "embed"))  # last parameter first
LAYERS = (("embed",), ("down", "up", "norm"), ("down", "up", "norm"), ("head",))
PARAMETERS = 8
DTYPES = {  # of weights and gradients
    None: (torch.float64, torch.float64),
    Mixed(gradients=torch.bfloat16): (torch.bfloat16, torch.bfloat16),
    Mixed(): (torch.bfloat16, torch.float32),
}
TIMES = {  # reductions and gathers of all parameters, by stage, with k microbatches: 2, 2, k + 1 and 3k together
    0: lambda k: (2, 0),  # an all_reduce sends twice what a reduce_scatter does
    1: lambda k: (1, 1),
    2: lambda k: (k, 1),
    3: lambda k: (k, 2 * k),
}


class Log(Watcher):
    """(operation, elements, dtype) of each collective, in the order in which they begin."""

    def __init__(self):
        self.calls = []

    def begins(self, call):
        if call.outer is None:
            self.calls.append((call.op, call.elements, call.dtype))


def picture(stage, ranks, microbatches, weights, gradients):
    """The collectives of a step."""
    rows = [[SIZES[name] for name in names] for names in (LAYERS if stage == 3 else BUCKETS)]
    n = [padded(sizes, 1 if stage == 0 else ranks, weights.itemsize) for sizes in rows]
    agree = [("all_reduce", PARAMETERS + len(n), torch.int64)]
    reduced = [("reduce_scatter_single", elements, gradients) for elements in n]
    gathered = [("all_gather_single", elements, weights) for elements in n]
    if stage == 0:
        return [("all_reduce", elements, gradients) for elements in n] + agree
    if stage == 1:
        return reduced + agree + gathered
    if stage == 2:
        return microbatches * reduced + agree + gathered
    there_and_back = [*gathered, *itertools.chain(*zip(reversed(gathered), reversed(reduced), strict=True))]
    return microbatches * there_and_back + agree


def step(run, stage, mixed, microbatches):
    """(collectives, bytes by operation in the ledger, bytes on sockets) of the second step; what the optimizer does
    between gradients and gathers changes none of them.
    """
    torch.manual_seed(0)
    dtype = torch.float64 if mixed is None else torch.float32
    model = Net(VOCAB, WIDTH, HIDDEN).to(dtype)
    handle = STAGES[stage].wrap(model, run.world, cap=CAP * dtype.itemsize, mixed=mixed)
    ids = torch.arange(run.rank, VOCAB, 50)
    for _ in range(2):
        for shard in handle.parameters():
            shard.grad = None
        comm.barrier(group=run.world)
        with watching(book := Ledger(), log := Log()):
            before = demo.bytes_written()
            backward(handle, model, ids, microbatches)
            handle.after_step()
            sent = demo.bytes_since(before)
    return log.calls, {row.op: row.algorithm for row in book.rows()}, sent


def steps(run, cases):
    return [step(run, *case) for case in cases]


CASES = [(stage, mixed, k) for stage in TIMES for mixed in DTYPES for k in ((2,) if mixed else (1, 3))]


@pytest.mark.parametrize("ranks", [3, *map(drilled, (1, 2, 4))])
def test_traffic(pool, ranks):
    for mine in pool.run(ranks, steps, CASES):
        for (stage, mixed, k), (calls, ledger, sent) in zip(CASES, mine, strict=True):
            where = f"stage {stage}, {mixed}, {k} microbatches"
            weights, gradients = DTYPES[mixed]
            expected = picture(stage, ranks, k, weights, gradients)
            assert calls == expected, where
            rows = len(BUCKETS if stage < 3 else LAYERS)
            n = sum(elements for _, elements, _ in expected[:rows])
            reductions, gathers = TIMES[stage](k)
            formula = n * (reductions * gradients.itemsize + gathers * weights.itemsize) * (ranks - 1) / ranks
            agreed = 2 * 8 * (PARAMETERS + rows) * (ranks - 1) / ranks
            assert sum(ledger.values()) == pytest.approx(formula + agreed, rel=1e-12), where
            if sent is not None:
                assert abs(sent - formula - agreed) <= 0.01 * formula + 4096 * len(calls), where
