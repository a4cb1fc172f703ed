"""Faults of a trainer's sums, planted on every rank: in a file of their own, which workers import in no time."""

import contextlib
from unittest import mock

from collectives import comm
from collectives.p2p import Handle
from expert_parallel import MoE
from expert_parallel.capacity import capacity, within
from expert_parallel.sequences import chosen
from nd_mesh import train
from nd_mesh.data import Batch
from tests import parity


def not_reduced(chosen):
    """The all_reduces of tensors that `chosen` picks leave every rank its own."""
    true = comm.all_reduce

    def all_reduce(tensor, *args, **more):
        return Handle([]) if chosen(tensor) else true(tensor, *args, **more)

    return mock.patch.object(comm, "all_reduce", all_reduce)


def not_scattered():
    """The reduce_scatters leave every rank its own piece of its own input."""

    def reduce_scatter_single(output, whole, *args, group, **more):
        output.copy_(whole.chunk(group.size())[group.rank()])
        return Handle([])

    return mock.patch.object(comm, "reduce_scatter_single", reduce_scatter_single)


@contextlib.contextmanager
def gradients_not_reduced():
    """By whichever collective it is that would reduce them."""
    with not_reduced(lambda tensor: tensor.is_floating_point() and tensor.numel() > 1), not_scattered():
        yield


FAULTS = {
    "gradients not reduced": gradients_not_reduced,
    "count not reduced": lambda: not_reduced(lambda tensor: tensor.shape == (3,) and not tensor.is_floating_point()),
    "a mean for the sum": lambda: mock.patch.object(comm, "SUM", comm.AVG),
}


def experts_divided():
    """Gradients of experts are means over the ranks that share them, which Adam would hide."""
    true = train.sum_partials

    def sum_partials(params, labels):
        true(params, labels)
        for param in params:
            if param.held.family == "expert":
                param.grad /= 2

    return mock.patch.object(train, "sum_partials", sum_partials)


def router_not_summed():
    """Under sequence parallelism each rank of tp keeps its own tokens' gradient of the router."""
    true = train.sum_partials

    def sum_partials(params, labels):
        true([param for param in params if not param.held.name.endswith("router.weight")], labels)

    return mock.patch.object(train, "sum_partials", sum_partials)


def balance_by_own_counts():
    """The shares of a rank's scores are weighed by the choices of its own slots of a row."""
    true = MoE._loss

    def _loss(self, routing, sequences, experts, counts):
        return true(self, routing, sequences, experts, chosen(experts, self.count).sum(1))

    return mock.patch.object(MoE, "_loss", _loss)


def drops_by_own_slots():
    """Capacity of the slots that a rank has of a row, and not of the row."""

    def _fits(self, rows, taken, sequences):
        mine = sequences.slots[self.sequence_group.rank()]
        room = capacity(self.capacity, self.choices, len(mine), self.count)
        return within(rows[:, mine], taken[:, mine], room)

    return mock.patch.object(MoE, "_fits", _fits)


OF_EXPERTS = {  # with a mesh on which they are faults, and a mixture
    "experts divided by ep": (experts_divided, {"dp": 2, "ep": 2, "mixture": "softmax 2 of 12"}),
    "router not summed": (router_not_summed, {"tp": 2, "sequence": True, "mixture": "softmax 2 of 12"}),
    "balance by own counts": (balance_by_own_counts, {"cp": 2, "mixture": "softmax 2 of 12"}),
    "drops by own slots": (drops_by_own_slots, {"cp": 2, "mixture": "softmax 1 of 8, capacity"}),
    "losses of each microbatch": (
        lambda: mock.patch.object(Batch, "of", lambda batch, counts, scale: batch),
        {"dp": 2, "ep": 2, "microbatches": 3, "mixture": "softmax 2 of 12"},
    ),
}
ALL = FAULTS | {name: fault for name, (fault, _) in OF_EXPERTS.items()}


def faulty(run, fault, cfg, texts):
    with ALL[fault]():
        return parity.train(run, cfg, texts, 2, equal_bits=False)
