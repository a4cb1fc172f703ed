"""A small model with two mixtures, trained on ranks and by one process."""

import pytest

from tests.expert_parallel.cases import Case
from tests.expert_parallel.reference import Layer
from tests.expert_parallel.training import BIAS, Training, plain, trained, worst

TRAINED = {
    "top-2": Layer(balance=0.05, z=0.01),
    "top-2 within capacity": Layer(capacity=0.75, balance=0.05, z=0.01, shared=4),
    "top-1, sigmoid, bias, capacity": Layer(
        choices=1, score="sigmoid", renormalise=False, bias=BIAS, capacity=1.0, balance=0.05, z=0.01
    ),
}
RUNS = [
    *[(1, 1, 1, 1), (2, 2, 1, 1), (3, 3, 1, 1), (4, 2, 1, 1), (4, 4, 1, 1), (2, 2, 2, 1), (4, 4, 2, 5)],
    *[pytest.param((6, 3, 1, 1), marks=pytest.mark.drill), pytest.param((8, 4, 1, 2), marks=pytest.mark.drill)],
    *[pytest.param(mesh, marks=pytest.mark.drill) for mesh in ((3, 3, 3, 1), (4, 2, 2, 1), (4, 1, 1, 2), (2, 1, 1, 5))],
]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("mesh", RUNS)
def test_a_model_is_trained_as_by_one_process(pool, name, mesh, optimizer):
    """Three clipped steps: gradients before clipping, the norm, values after, choices and drops of both layers. One
    row has no token, one no label, one rank no rows.
    """
    ranks, ep, cp, microbatches = mesh
    run = Training(Case(TRAINED[name], ranks, ep, cp, microbatches=microbatches), optimizer)
    assert worst(run, pool.run(ranks, trained, run)) <= 1


def test_training_drops_some():
    for name, layer in TRAINED.items():
        _, steps = plain(Training(Case(layer)))
        for *_, dropped in steps:
            assert all(bool(of_layer) == (layer.capacity is not None) for of_layer in dropped), name
