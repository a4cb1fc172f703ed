"""The parity of the trainer over bare torch.distributed: the equal bits of ours are not needed for it."""

from functools import partial

import pytest

from nd_mesh.mesh import Grid
from tests import grid, parity, passthrough

CASES = {case.name: case.first for case in grid.subset(4, together=1)}
TRAIN = partial(parity.train, equal_bits=False)


@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(pool, case):
    cfg, texts = CASES[case], parity.documents()
    ranks = pool.run(Grid(cfg.mesh).size(), passthrough.run, TRAIN, cfg, texts, parity.STEPS, timeout=60)
    expected = parity.reference(cfg, ranks[0][0], texts, parity.STEPS)
    for initial, done in ranks:
        worst = parity.judge(initial, done, expected)
        assert max(worst.values()) <= 1, worst
