"""The parity of the trainer over bare torch.distributed: the equal bits of ours are not needed for it."""

import pytest

from tests import parity, passthrough

CASES = [
    name
    for name in parity.cases()
    if "adamw" in name or ("dp 3" in name and "dropout 0.1" in name) or ("dp 4" in name and "1 micro" in name)
]


@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(pool, case):
    cfg, texts = parity.cases()[case], parity.documents()
    job = (passthrough.run, parity.train, cfg, texts, parity.STEPS, False)
    ranks = pool.run(cfg.mesh.dp, *job)
    expected = parity.reference(cfg, ranks[0][0], texts, parity.STEPS)
    for initial, done in ranks:
        worst = parity.judge(initial, done, expected)
        assert max(worst.values()) <= 1, worst
