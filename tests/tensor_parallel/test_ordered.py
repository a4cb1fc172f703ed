"""On a network stricter than gloo: every handle is waited for, nothing is read before, nothing in flight is changed,
and no rank waits for ever, in whatever order the ranks run.
"""

import contextlib
import functools
from unittest import mock

import pytest
import torch

from collectives import comm
from collectives.algorithms import direct
from collectives.partials import sum_partials
from tensor_parallel import entrance, parallelize, vocab_parallel_cross_entropy
from tests import ordered
from tests.tensor_parallel import models
from tests.tensor_parallel.models import Shape
from tests.tensor_parallel.training import MODES, Recipe, batch, forward, mine, near, plain


def all_reduce(tensor, op=comm.SUM, *, group, async_op=False, ordered=False):
    return direct.all_reduce(tensor, op, group=group, async_op=async_op)


@contextlib.contextmanager
def written_out():
    """The collectives by our own sends and receives, of any size."""
    with mock.patch.multiple(
        comm,
        all_reduce=all_reduce,
        all_gather_single=direct.all_gather,
        reduce_scatter_single=direct.reduce_scatter,
    ):
        yield


def gradients(run, shape, settings, recipe):
    """One forward and backward: the output, and all gradients."""
    module = models.plain(shape)
    parallelize(module, models.plan(shape), run.world, **settings)
    if shape.vocab:
        module.cross_entropy = functools.partial(vocab_parallel_cross_entropy, vocab=shape.vocab, group=run.world)
    given = batch(shape, recipe, 0)
    if settings and not shape.vocab:
        given = [part.tensor_split(run.size, 1)[run.rank] for part in given]
    out, x, loss = forward(module, given)
    loss.backward()
    sum_partials(params := list(module.parameters()), ("tp",))
    return out.detach(), None if x is None else x.grad, {p.held.name: (p.held.boxes, p.grad) for p in params}


@pytest.mark.parametrize("shape", [Shape(heads=12, kv_heads=12), Shape(heads=12, kv_heads=12, vocab=37, tied=True)])
@pytest.mark.parametrize("lanes", ["pair", "group"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.drill)])
def test_a_step_on_a_strict_network(ranks, mode, lanes, shape):
    recipe = Recipe(steps=1)
    [(true_out, true_dx, expected, *_)] = plain(shape, recipe)[1]
    with written_out():
        for seed in range(3):
            report = ordered.run(ranks, gradients, shape, MODES[mode], recipe, lanes=lanes, seed=seed)
            outs, inputs, grads = zip(*report.results, strict=True)
            cut = mode != "tp" and not shape.vocab
            assert near(torch.cat(outs, 1) if cut else outs[-1], true_out) <= 1
            assert shape.vocab or near(torch.cat(inputs, 1) if cut else inputs[-1], true_dx) <= 1
            for name, (boxes, grad) in (pair for of_rank in grads for pair in of_rank.items()):
                assert name in models.zero_directions(shape) or near(grad, mine(boxes, expected[name])) <= 1, name


def never_waited(ctx, dx):
    """dx as it is, whether it has arrived or not."""
    return dx, None


@pytest.mark.parametrize("mode", MODES)
def test_a_handle_that_is_not_waited_for_shows(mode):
    with (
        written_out(),
        mock.patch.object(entrance._WaitReduce, "backward", staticmethod(never_waited)),
        pytest.raises(ordered.Refused, match="has ended without waiting"),
    ):
        ordered.run(2, gradients, Shape(kv_heads=4), MODES[mode], Recipe())


def changed_while_it_travels(ctx, dwhole):
    """The pieces that are sent are used again before they have arrived."""
    out = true_depart(ctx, dwhole)
    out[0].zero_()
    return out


true_depart = entrance._StartReduce.backward


def test_a_buffer_that_is_changed_in_flight_shows():
    with (
        written_out(),
        mock.patch.object(entrance._StartReduce, "backward", staticmethod(changed_while_it_travels)),
        pytest.raises(ordered.Refused, match="changed while it was in flight"),
    ):
        ordered.run(2, gradients, Shape(kv_heads=4), {}, Recipe())
