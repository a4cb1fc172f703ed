"""Faults of a trainer's sums, planted on every rank: in a file of their own, which workers import in no time."""

import contextlib
from unittest import mock

from collectives import comm
from collectives.p2p import Handle
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


def faulty(run, fault, cfg, texts):
    with FAULTS[fault]():
        return parity.train(run, cfg, texts, 2, equal_bits=False)
