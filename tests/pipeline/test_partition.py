"""Partition: the best cut, held against all cuts, and what is measured of layers."""

import math
import random
from itertools import combinations, pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipeline.partition import Cost, even, measure, partition

ROWS, WIDTH, VOCABULARY = 64, 32, 2048


def time_of(costs, layers):
    return sum(costs[i].forward + costs[i].backward for i in layers)


def bytes_of(costs, layers, live):
    return sum(costs[i].weights + live * costs[i].activations for i in layers)


def all_cuts(layers, stages):
    for inner in combinations(range(1, layers), stages - 1):
        yield [range(*ends) for ends in pairwise((0, *inner, layers))]


def best_of_all(costs, stages, memory, live):
    """The slowest stage's time in the best cut that fits, or infinity."""
    fitting = [
        cut
        for cut in all_cuts(len(costs), stages)
        if all(bytes_of(costs, layers, live[s]) <= memory for s, layers in enumerate(cut))
    ]
    return min((max(time_of(costs, layers) for layers in cut) for cut in fitting), default=math.inf)


def random_costs(draw, layers):
    times = [(draw.choice((0, 1, 1, 2, 9)), draw.choice((0, 2, 2, 4, 18))) for _ in range(layers)]
    return [Cost(f, b, draw.randint(0, 20), draw.randint(0, 5)) for f, b in times]


def is_a_cut(cut, layers, stages):
    return len(cut) == stages and all(cut) and [i for part in cut for i in part] == list(range(layers))


@pytest.mark.parametrize("limited", [False, True])
def test_best_of_all_cuts(limited):
    draw, infeasible = random.Random(0), 0
    for _ in range(300):
        layers = draw.randint(1, 9)
        stages = draw.randint(1, layers)
        costs = random_costs(draw, layers)
        live = [draw.choice((1, stages - s, 4)) for s in range(stages)] if limited else ()
        memory = draw.randint(10, 120) if limited else math.inf
        expected = best_of_all(costs, stages, memory, live or [1] * stages)
        if math.isinf(expected):
            infeasible += 1
            with pytest.raises(ValueError, match=f"no cut of {layers} layers into {stages} stages fits {memory} bytes"):
                partition(costs, stages, memory=memory, live=live)
            continue
        cut = partition(costs, stages, memory=memory, live=live)
        assert is_a_cut(cut, layers, stages)
        assert max(time_of(costs, part) for part in cut) == expected
        assert all(bytes_of(costs, part, live[s] if live else 1) <= memory for s, part in enumerate(cut))
    assert 30 < infeasible < 200 if limited else not infeasible


def test_an_embedding_and_a_head_that_the_even_cut_forgets():
    """The embedding costs no time, the head as much as three blocks."""
    costs = [Cost(0, 0), *[Cost(1, 2)] * 7, Cost(3, 6)]
    assert even(9, 2) == [range(0, 5), range(5, 9)]
    assert partition(costs, 2) == [range(0, 6), range(6, 9)]


def test_live_microbatches_of_the_first_stage_move_the_cut():
    costs = [Cost(1, 2, weights=10, activations=10)] * 6
    assert partition(costs, 2) == [range(0, 3), range(3, 6)]
    assert partition(costs, 2, memory=80, live=[3, 1]) == [range(0, 2), range(2, 6)]
    assert partition(costs, 2, memory=60) == partition(costs, 2, memory=60, live=[1, 1]) == [range(0, 3), range(3, 6)]


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"), [(8, 4, [2, 2, 2, 2]), (7, 3, [3, 2, 2]), (3, 3, [1, 1, 1]), (5, 1, [5])]
)
def test_even(layers, stages, sizes):
    cut = even(layers, stages)
    assert is_a_cut(cut, layers, stages) and [len(part) for part in cut] == sizes


@pytest.mark.parametrize("stages", [0, 4, -1])
def test_refuses_more_stages_than_layers(stages):
    with pytest.raises(ValueError, match=f"3 layers do not make {stages} stages: use 1 to 3 stages"):
        partition([Cost(1, 1)] * 3, stages)


# -- measured ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chain():
    torch.manual_seed(0)
    labels = torch.randint(VOCABULARY, (ROWS,))
    layers = [
        *(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()),
        *(nn.Linear(WIDTH, VOCABULARY), lambda logits: functional.cross_entropy(logits, labels)),
    ]
    for layer in layers:
        if isinstance(layer, nn.Module):
            layer.double()
    return layers


def test_bytes_of_layers(chain):
    embedding, linear, relu, head, loss = measure(chain, torch.randint(VOCABULARY, (ROWS,)), repeats=1)
    assert (embedding.weights, embedding.activations) == (8 * VOCABULARY * WIDTH, 8 * ROWS)  # int64 ids
    assert (linear.weights, linear.activations) == (8 * WIDTH * WIDTH, 8 * ROWS * WIDTH)  # its input
    assert (relu.weights, relu.activations) == (0, 8 * ROWS * WIDTH)  # its output
    assert (head.weights, head.activations) == (8 * (WIDTH + 1) * VOCABULARY, 8 * ROWS * WIDTH)
    log_softmax, labels, total = 8 * ROWS * VOCABULARY, 8 * ROWS, 8
    assert (loss.weights, loss.activations) == (0, log_softmax + labels + total)


def test_times_of_layers(chain):
    """The head has 64 times the columns of the linear layer."""
    _, linear, _, head, loss = measure(chain, torch.randint(VOCABULARY, (ROWS,)), repeats=9)
    assert head.forward > 3 * linear.forward > 0
    assert head.backward > 3 * linear.backward > 0
    assert loss.forward > 0 < loss.backward


def test_measuring_leaves_gradients_and_counts_frozen_weights_as_bytes():
    frozen, trained = nn.Linear(3, 4), nn.Linear(4, 2)
    frozen.requires_grad_(False)
    trained.weight.grad = torch.full((2, 4), 7.0)
    costs = measure([frozen, trained], torch.ones(5, 3), repeats=2)
    assert frozen.weight.grad is None and trained.bias.grad is None
    assert torch.equal(trained.weight.grad, torch.full((2, 4), 7.0))
    assert costs[0].weights == 4 * (3 * 4 + 4)


def test_layers_hand_on_several_tensors():
    """Integers among them, and layers whose outputs or inputs have no gradient."""
    shifted = lambda ids: (ids + 1, ids.float())  # noqa: E731
    looked_up = nn.Embedding(9, 3).requires_grad_(False)
    layers = [
        shifted,
        lambda pair: (looked_up(pair[0]), pair[0]),
        lambda pair: pair[0] + pair[1][:, None],
        nn.Linear(3, 1),
    ]
    costs = measure(layers, torch.arange(4), repeats=1)
    assert [cost.weights for cost in costs] == [0, 0, 0, 16]
    assert [cost.activations for cost in costs] == [0, 0, 0, 4 * 4 * 3]
