"""Every mode against one plain process with the whole batch, in float64: gradients before clipping, norms, updates,
outputs; and the faults that must show.
"""

import functools

import pytest

from tests.fsdp.versions import HYBRID, MODES, drilled, trained
from tests.training import SHARES, Recipe, plain, worst

RECIPES = {
    "one microbatch": Recipe(),
    "averaged": Recipe(average=True),
    "accumulated": Recipe(microbatches=3),
    "accumulated, averaged and clipped": Recipe(microbatches=3, average=True, limit=5.0),
    "reduced in every microbatch": Recipe(microbatches=3, quiet="sync", limit=5.0),
    "replicas once": Recipe(microbatches=3, quiet="no_replica_sync", average=True),
    "clipped, zeros kept": Recipe(limit=5.0, keep_zeros=True),
    "AdamW, zeros kept": Recipe(optimizer="adamw", average=True, keep_zeros=True),
    "AdamW, accumulated and clipped": Recipe(optimizer="adamw", microbatches=3, limit=5.0),
}
expected = functools.cache(plain)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mode", [*MODES, *HYBRID])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_x(pool, ranks, mode, recipe):
    if mode in HYBRID and ranks % 2:
        pytest.skip()
    recipe = RECIPES[recipe]
    w = worst(pool.run(ranks, trained, {**MODES, **HYBRID}[mode], recipe), expected(recipe, sum(SHARES[ranks])))
    print("SHARE", w)
    assert w <= 1
