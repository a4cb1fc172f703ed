"""Buffers of all dtypes and layouts are the first member's, bit for bit: after wrap, with the weights, and after each
step, whatever module code does to them (T20).
"""

import contextlib
from unittest import mock

import pytest
import torch
from torch import nn

from collectives import replicas
from ddp import naive
from tests.ddp.versions import each_version


class Buffers(nn.Module):
    """Parameters, and buffers of several dtypes, one of them strided, one not saved."""

    def __init__(self):
        super().__init__()
        self.batch = nn.BatchNorm1d(3)
        self.weight = nn.Parameter(torch.randn(3, 4).t())
        self.batch.num_batches_tracked += int(torch.randint(1000, ()))
        self.batch.running_mean.normal_()
        self.register_buffer("table", torch.randn(4, 3).t(), persistent=False)
        self.register_buffer("mask", torch.rand(20) < 0.5)
        self.register_buffer("low", torch.randn(5).bfloat16())
        self.register_buffer("short", torch.randint(-1000, 1000, (3,)).short())
        self.register_buffer("eighth", torch.randn(7).to(torch.float8_e4m3fn))
        self.register_buffer("scalar", torch.randn(()).double())
        self.register_buffer("gaps", torch.randn(6, 4)[::2, ::3])
        self.register_buffer("complex", torch.randn(2, dtype=torch.complex64))
        self.register_buffer("empty", torch.zeros(0, 3))


def bits(named):
    """Copies of tensors by name, as bytes: NaN equals itself, and every dtype travels."""
    return {name: tensor.detach().clone().contiguous().view(-1).view(torch.uint8) for name, tensor in named}


def wrapped_buffers(run, wrap, ranks):
    """Everything that the module holds after wrap, on the members of this group."""
    torch.manual_seed(run.rank)
    model, group = Buffers(), run.new_group(ranks) if ranks else None
    if group is not None:
        wrap(model, group)
    return bits((*model.named_parameters(), *model.named_buffers()))


@pytest.mark.parametrize("members", [[0, 1, 2, 3], [2, 3], [1, 3]])
@each_version
def test_after_wrap_all_have_the_first_members_values(pool, wrap, members):
    """T48, T20, T06: bit for bit, buffers as well; the root is the first rank of the group."""
    results = pool.run(4, wrapped_buffers, wrap, members)
    untouched = pool.run(4, wrapped_buffers, wrap, [])
    for rank, tensors in enumerate(results):
        for name, tensor in tensors.items():
            source = members[0] if rank in members else rank
            assert torch.equal(tensor, untouched[source][name]), (rank, name)


class Counting(nn.Module):
    """Buffers that every forward changes: in place, by rebinding, one that belongs to two modules, one made late."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("in_place", torch.zeros(2, 2).t())
        self.register_buffer("rebound", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int16))
        self.register_buffer("flags", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("eighth", torch.zeros(3, dtype=torch.float8_e5m2))
        self.other = nn.Module()
        self.other.register_buffer("shared", self.seen)
        self.register_buffer("late", None)

    def forward(self, x):
        self.in_place += x.mean()
        self.rebound = self.rebound + x.mean()
        self.seen += int(x[0, 0] * 10)
        self.flags = x.flatten()[:5] > 0
        self.eighth = x[0].to(torch.float8_e5m2)
        self.late = x.sum(0) if self.late is None else self.late + x.sum(0)
        return self.norm(x) * self.weight


def stepped_buffers(run, wrap, members, change):
    """Buffers before and after finish in each of two steps, of two forwards and two backwards on rows of its own."""
    group, model, steps = run.new_group(members), Counting(), []
    if group is None:
        return None
    with change():
        handle = wrap(model, group)
        for step in range(2):
            numbers = torch.Generator().manual_seed(10 * step + run.rank)
            first, last = (model(torch.randn(4, 3, generator=numbers)).sum() for _ in range(2))
            with handle.no_sync():
                first.backward()
            last.backward()
            before = bits(model.named_buffers())
            handle.finish()
            assert model.other.shared is model.seen
            steps.append((before, bits(model.named_buffers())))
    return steps


def other_buffers(mine, first):
    """Names of the buffers in which a rank has other bits than the first member had before finish."""
    return {name for name, buffer in mine.items() if not torch.equal(buffer, first[name])}


CHANGED = {"in_place", "rebound", "seen", "flags", "eighth", "late", "norm.running_mean", "norm.running_var"}


@pytest.mark.parametrize("members", [[0, 1], [0, 1, 2, 3], [2, 3], [1, 3]])
@each_version
def test_buffers_are_the_first_members_after_each_step(pool, wrap, members):
    """In place and rebinding ones: what the first member's rows made of them."""
    results = pool.run(max(members) + 1, stepped_buffers, wrap, members, contextlib.nullcontext)
    first, *others = [results[rank] for rank in members]
    for steps in others:
        for (before, after), (expected, _) in zip(steps, first, strict=True):
            assert other_buffers(before, expected) == CHANGED
            assert other_buffers(after, expected) == set()
    assert all(other_buffers(after, before) == set() for before, after in first)


def buffers_left_alone():
    return mock.patch.object(replicas.Replica, "equalize_buffers", lambda handle: None)


def test_buffers_left_alone_show(pool):
    first, second = pool.run(2, stepped_buffers, naive.wrap, [0, 1], buffers_left_alone)
    assert other_buffers(second[0][1], first[0][0]) >= CHANGED


def only_buffers(run, wrap):
    """A module without parameters."""
    torch.manual_seed(run.rank)
    model = nn.BatchNorm1d(3, affine=False)
    handle = wrap(model, run.world)
    model(torch.randn(4, 3))
    handle.finish()
    return handle.parameters(), model.running_mean.clone()


@each_version
def test_a_module_without_parameters(pool, wrap):
    (params, mean), (_, other) = pool.run(2, only_buffers, wrap)
    assert params == [] and mean.any() and torch.equal(mean, other)


def buffers_of_other_sizes(run, wrap, value):
    """Rank 1 rebinds its buffer to something else than the others."""
    model = nn.Linear(2, 2)
    model.register_buffer("seen", torch.zeros(3))
    handle = wrap(model, run.world)
    if run.rank == 1:
        model.seen = value
    with pytest.raises(ValueError, match=r"the buffers differ: tensor 0 is .* rebind them"):
        handle.finish()


@pytest.mark.parametrize("value", [None, torch.zeros(2), torch.zeros(300), torch.zeros(3, 1), torch.zeros(3).int()])
@each_version
def test_buffers_that_become_of_different_kinds_are_refused_on_every_rank(pool, wrap, value):
    pool.run(3, buffers_of_other_sizes, wrap, value, timeout=10.0)
