"""A run does not depend on the mesh: data parallel training against one independent process, in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests import grid, parity
from tests.nd_mesh.faults import FAULTS, OF_EXPERTS, faulty

# Any two options, on up to four ranks; `make parity` is thorough.
CASES = [pytest.param(case, id=case.name) for case in grid.subset(4, together=2)]


@pytest.fixture(scope="module")
def judge(pool):
    return parity.Judge(pool, parity.documents())


@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(judge, case):
    worst = judge.judge(case)
    assert max(worst.values()) <= 1, worst


def test_the_documents_are_hard():
    """There is a sample without a label, the counts of labels differ, and the last sample is short. The steps of a case
    read all.
    """
    stream = parity.stream(parity.documents(), parity.CONTEXT)
    _, labels, _, _ = stream.rows(np.arange(stream.samples))
    counts = (labels >= 0).sum(1)
    assert counts.min() == 0 and len(counts.unique()) > 4
    assert len(stream.tokens) - 1 < stream.samples * parity.CONTEXT
    assert stream.samples == parity.SGD.batch * (parity.STEPS + parity.MORE)


# -- faults that parity must see ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", grid.WHERE["data"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows(pool, fault, data):
    shows(pool, fault, parity.config(dp=2, data=data, cap=1000))


@pytest.mark.parametrize("fault", OF_EXPERTS)
def test_a_fault_of_experts_shows(pool, fault):
    shows(pool, fault, grid.run_of(OF_EXPERTS[fault][1]))


def shows(pool, fault, cfg):
    texts = parity.documents()
    ranks = pool.run(2, faulty, fault, cfg, texts)
    expected = parity.reference(cfg, ranks[0][0], texts, 2)
    for initial, done in ranks:
        # What is logged proves nothing, so give it the right counts.
        counted = [
            replace(step, **{name: getattr(right, name) for name in ("count", "tokens", "dropped", "biases")})
            for step, right in zip(done, expected, strict=True)
        ]
        assert parity.judge(initial, counted, expected)["gradient"] > 1e6


@pytest.mark.parametrize("what", ["loss", "norm", "gradient", "update"])
def test_what_is_not_a_number_is_a_miss(what):
    """max(0.0, nan) is 0.0: a judge that takes the largest error must say so by itself."""
    right = parity.Step(1.0, 1, 1.0, {"w": torch.ones(2)}, {"w": torch.tensor([2.0, 3.0])}, 0.1)
    nan, tensor = float("nan"), {"w": torch.tensor([1.0, float("nan")])}
    fields = {"loss": {"loss": nan}, "norm": {"grad_norm": nan}, "gradient": {"grads": tensor}}
    ours = replace(right, **fields.get(what, {"params": tensor}))
    worst = parity.judge({"w": torch.zeros(2)}, [ours], [right])
    assert [kind for kind, share in worst.items() if share > 1] == [what]
