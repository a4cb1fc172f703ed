"""Gradients are views of the buckets: where they lie, what memory a step takes, what is left when a handle is gone."""

import functools
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddp import bucketed, overlapped
from tests.ddp.versions import each_bucketed, each_version, recording, storage_bytes


def odd_layouts():
    """Dense parameters of several layouts and one dtype, a scalar, an empty one."""
    zeros = functools.partial(torch.zeros, dtype=torch.float64)
    layouts = [zeros(4, 5), zeros(4, 5).t(), zeros(()), zeros(0, 3), zeros(2, 3, 4).permute(2, 0, 1), zeros(7)]
    return nn.ParameterList(nn.Parameter(tensor) for tensor in layouts)


def lie_in_buckets(run, wrap, set_to_none):
    """Where the gradients lie after each of three steps: (in its bucket's view, same strides, bytes of storage)."""
    model = odd_layouts()
    handle, steps = wrap(model, run.world, average=False), []
    for step in range(3):
        model.zero_grad(set_to_none=set_to_none)
        sum((param * (step + 1)).sum() for param in model).backward()
        handle.finish()
        views = [handle.bucket_of[param].views[param] for param in model]
        assert all(param.grad is view for param, view in zip(model, views, strict=True))
        for param, view in zip(model, views, strict=True):
            buffer = handle.bucket_of[param].buffer
            assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
            assert param.grad.stride() == param.stride()
            assert (param.grad == run.size * (step + 1)).all()
        grads = [param.grad for param in model]
        held = storage_bytes([*grads, *(bucket.buffer for bucket in handle.buckets)])
        steps.append((held, storage_bytes(grads), len({place(grad) for grad in grads})))
    return steps


def place(grad):
    return grad.data_ptr(), grad.numel()


@pytest.mark.parametrize("set_to_none", [True, False])
@each_bucketed
def test_gradients_lie_in_their_buckets_in_the_parameters_order(pool, wrap, set_to_none):
    """And there are n bytes of them, not 2n, beside two notes for each of six; no two share memory."""
    n = 8 * sum(param.numel() for param in odd_layouts()) + 2 * 6 * 8
    for steps in pool.run(2, lie_in_buckets, wrap, set_to_none):
        assert steps == [(n, n, 6)] * 3


def untouched_neighbours(run, wrap):
    """The optimizer writes into one gradient; the others in the bucket, and the weights, stay."""
    model = nn.ParameterList(nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(3))
    handle = wrap(model, run.world, average=False)
    sum(param.sum() for param in model).backward()
    handle.finish()
    model[1].grad.mul_(100)
    return [param.grad.tolist() for param in model], [param.tolist() for param in model]


@each_bucketed
def test_views_do_not_overlap(pool, wrap):
    for grads, values in pool.run(2, untouched_neighbours, wrap):
        assert grads == [[2.0] * 3, [200.0] * 3, [2.0] * 3]
        assert values == [[1.0] * 3] * 3


def zeroed(run, wrap, set_to_none):
    """Three steps, the second of which uses layer 0 only: gradients."""
    model = nn.ParameterList(nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
    handle = wrap(model, run.world, average=False)
    steps = []
    for step in range(3):
        model.zero_grad(set_to_none=set_to_none)
        used = model[0] if step == 1 else model[0] + model[1]
        (used * (step + 1) * (run.rank + 1)).sum().backward()
        handle.finish()
        steps.append([None if p.grad is None else p.grad.tolist() for p in model])
    return steps


@pytest.mark.parametrize("set_to_none", [True, False])
@each_version
def test_both_ways_to_zero_gradients(pool, wrap, set_to_none):
    unused = None if set_to_none else [0.0, 0.0]
    for steps in pool.run(2, zeroed, wrap, set_to_none):
        assert steps == [[[3.0] * 2] * 2, [[6.0] * 2, unused], [[9.0] * 2] * 2]


def second_order(run, wrap):
    """Gradients of a loss that holds gradients, in two steps, and whether they hold a graph."""
    model = nn.ParameterList(nn.Parameter(torch.full((2,), 3.0, dtype=torch.float64)) for _ in range(2))
    handle = wrap(model, run.world, average=False)
    grads = []
    for _ in range(2):
        model.zero_grad()
        loss = sum((weight**3 * (run.rank + 1)).sum() for weight in model)
        first = torch.autograd.grad(loss, list(model), create_graph=True)
        sum(grad.sum() for grad in first).backward(create_graph=True)
        handle.finish()
        grads.append([(weight.grad.tolist(), weight.grad.requires_grad) for weight in model])
    return grads


@each_bucketed
def test_a_backward_that_makes_a_graph(pool, wrap):
    """The buckets are no part of it: the graph of one step would hold that of the step before."""
    assert pool.run(2, second_order, wrap) == [[[([54.0, 54.0], False)] * 2] * 2] * 2


# -- peak memory -------------------------------------------------------------------------------------------------------

LAYERS, WIDTH = 8, 256
LAYER = 4 * WIDTH * WIDTH  # bytes


def peak_of_a_step(run, version, cap):
    """(peak of backward, peak of finish, what is left after it) in bytes more than before backward, in two steps."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    handle = version(model, run.world, cap=cap)
    peaks = []
    for _ in range(2):
        model.zero_grad()
        loss = model(torch.ones(1, WIDTH)).sum()
        with Allocations() as memory:
            loss.backward()
            during, memory.highest = memory.highest, memory.total
            handle.finish()
        peaks.append((during, memory.highest, memory.total))
    return peaks


class Allocations(TorchDispatchMode):
    """Counts the storages that operations make meanwhile: bytes that are alive, and the most there were."""

    def __init__(self):
        super().__init__()
        self.alive, self.total, self.highest = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {id(storage) for storage in storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in storages(out):
            if id(storage) not in known and id(storage) not in self.alive:
                self.alive[id(storage)] = weakref.finalize(storage, self.freed, id(storage), storage.nbytes())
                self.total += storage.nbytes()
        self.highest = max(self.highest, self.total)
        return out

    def freed(self, key, nbytes):
        del self.alive[key]
        self.total -= nbytes


def storages(tree):
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and not leaf.is_meta)
    return [tensor.untyped_storage() for tensor in tensors]


@pytest.mark.parametrize(("cap", "early"), [(1, 7), (3 * LAYER, 6), (LAYERS * LAYER, 0)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_memory_of_a_step(pool, ranks, cap, early):
    """The buckets are there all the time. bucketed: until finish all gradients that autograd made. overlapped: one of
    them, whatever the bucket's size. On more than two ranks also what arrives: n(P-1)/P, for the layers in the last
    bucket not before finish.
    """
    n, small = LAYERS * LAYER, LAYER // 4  # activations of one row, the notes
    arriving = n * (ranks - 1) // ranks if ranks > 2 else 0
    for peaks in pool.run(ranks, peak_of_a_step, bucketed.wrap, cap):
        for during, after, rest in peaks:
            assert n <= during <= n + small
            assert after <= n + small and rest == 0
    for peaks in pool.run(ranks, peak_of_a_step, overlapped.wrap, cap):
        for during, after, rest in peaks:
            assert LAYER <= during <= arriving * early // LAYERS + LAYER + small
            assert after <= arriving + small and rest == 0


# -- a handle that is gone ---------------------------------------------------------------------------------------------


def dropped(run, wraps):
    """A handle after the other on the same module, each for two steps: gradients, and the collectives of the steps;
    then a step without a handle.
    """
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).double()
    x = torch.ones(1, 2, dtype=torch.float64)
    steps = []
    for wrap in wraps:
        handle = wrap(model, run.world, average=False)
        for _ in range(2):
            model.zero_grad()
            with recording() as calls:
                (model(x) * (run.rank + 1)).sum().backward()
                handle.finish()
            steps.append(([p.grad.clone() for p in model.parameters()], [numel for _, numel in calls]))
        del handle
        gc.collect()
    model.zero_grad()
    with recording() as calls:
        (model(x) * (run.rank + 1)).sum().backward()
    return steps, [p.grad.clone() for p in model.parameters()], calls


def test_hooks_of_a_dropped_handle_do_nothing_and_the_module_can_be_wrapped_again(pool):
    wraps = [functools.partial(overlapped.wrap, cap=1), overlapped.wrap, bucketed.wrap]
    (steps, alone, calls), (others, theirs, _) = pool.run(2, dropped, wraps)
    assert calls == []
    assert [numels for _, numels in steps] == [[4, 4 + 4]] * 2 + [[8 + 4]] * 4
    for (mine, _), (other, _) in zip(steps, others, strict=True):
        assert all(map(torch.equal, mine, other))
        assert all(map(torch.equal, mine, steps[0][0]))
        assert all(torch.equal(grad, a + b) for grad, a, b in zip(mine, alone, theirs, strict=True))


def dropped_memory(run):
    """Which buckets of a handle go with it, though the module stays."""
    model = nn.Linear(3, 3)
    handle = overlapped.wrap(model, run.world, cap=1)
    watches = [weakref.ref(bucket) for bucket in handle.buckets]
    del handle
    gc.collect()
    return [watch() is None for watch in watches]


def test_the_buckets_of_a_dropped_handle_are_freed(pool):
    assert pool.run(2, dropped_memory) == [[True, True]] * 2
