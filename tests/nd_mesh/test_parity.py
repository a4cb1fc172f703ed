"""A run does not depend on the mesh: data parallel training against one independent process, in float64."""

import numpy as np
import pytest

from tests import parity

CASES = parity.cases(together=2)


@pytest.fixture(scope="module")
def judge(pool):
    return parity.Judge(pool, parity.documents())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_reference(judge, case):
    worst = judge.judge(case)
    assert max(worst.values()) <= 1, worst


def test_the_documents_are_hard():
    """There is a sample without a label, and the counts of labels differ."""
    stream = parity.stream(parity.documents(), parity.CONTEXT)
    _, labels, _, _ = stream.rows(np.arange(stream.samples))
    counts = (labels >= 0).sum(1)
    assert counts.min() == 0 and len(counts.unique()) > 4
