"""The versions of data parallelism that tests run, and what a test sees of a step: collectives, gradients, memory."""

import contextlib
import functools
from unittest import mock

import pytest
import torch
from torch import nn

from collectives import comm
from ddp import bucketed, naive, overlapped

BUCKETED = {
    "bucketed": bucketed.wrap,
    "bucketed, 100 bytes": functools.partial(bucketed.wrap, cap=100),
    "overlapped": overlapped.wrap,
    "overlapped, 100 bytes": functools.partial(overlapped.wrap, cap=100),
    "overlapped, 1 byte": functools.partial(overlapped.wrap, cap=1),
}
SOME = {name: BUCKETED[name] for name in ("bucketed, 100 bytes", "overlapped", "overlapped, 1 byte")}
each_version = pytest.mark.parametrize("wrap", [naive.wrap, *SOME.values()], ids=["naive", *SOME])
each_bucketed = pytest.mark.parametrize("wrap", list(SOME.values()), ids=list(SOME))
COLLECTIVES = ("all_reduce", "reduce_scatter_single", "all_gather_single", "all_to_all_single", "broadcast", "reduce")


@contextlib.contextmanager
def recording():
    """A list of (operation, elements) of every collective called meanwhile; a test may add marks of its own."""
    calls = []

    def recorded(name):
        true = getattr(comm, name)

        def call(tensor, *args, **more):
            calls.append((name, tensor.numel()))
            return true(tensor, *args, **more)

        return mock.patch.object(comm, name, call)

    with contextlib.ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(recorded(name))
        yield calls


def snapshot(model):
    """(gradients, values) of a model by name; a gradient may be None."""
    params = dict(model.named_parameters())
    grads = {name: None if param.grad is None else param.grad.clone() for name, param in params.items()}
    return grads, {name: param.detach().clone() for name, param in params.items()}


def same(a, b):
    """Whether two gradients are the same bits, or both None."""
    return (a is None and b is None) or (a is not None and b is not None and a.equal(b))


def storage_bytes(tensors):
    """Bytes of the storages behind these tensors, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def vectors(text, dtype=torch.float64):
    """A parameter of this many ones for each number."""
    return nn.ParameterList(nn.Parameter(torch.ones(int(n), dtype=dtype)) for n in text.split())


def gradients(params):
    """Numbers of each gradient, or None."""
    return [None if param.grad is None else param.grad.tolist() for param in params]


def elements(calls):
    """The elements of the collectives, and the marks between them, as text."""
    return " ".join(call if isinstance(call, str) else str(call[1]) for call in calls)
