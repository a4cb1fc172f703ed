"""Real ranks keep the simulator's time: with stages that sleep, step time and bubble are those of the plan, and a cut
that balances the stages is as much faster as it says.
"""

import pytest
import torch

from pipeline import Times, alike, schedule, simulate
from pipeline.partition import even, measure, partition
from tests.pipeline.dozing import Layer, dozing
from tests.pipeline.training import EVERY_SCHEDULE

SECONDS = 0.1  # of an F, an I or a W of a stage
RANKS, TRIES = 4, 3


def compare(pool, way, microbatches, seconds):
    """Within 2 % and one percentage point; a run in which the machine had others to serve may be repeated."""
    name, virtual = way
    plan = schedule(name, RANKS, microbatches, virtual)
    simulated = simulate(plan, alike(plan.stages, seconds, seconds, seconds))
    for _ in range(TRIES):
        (time, bubble), *others = pool.run(RANKS, dozing, plan, [[(seconds,) * 3]] * plan.stages, timeout=120)
        assert all(other == (time, bubble) for other in others)
        print(
            f"{name} V={virtual} M={microbatches}: {time:.3f} s, simulated {simulated.step_time:.3f} "
            f"({time / simulated.step_time - 1:+.2%}); bubble {bubble:.2%}, simulated {simulated.bubble:.2%} "
            f"({100 * (bubble - simulated.bubble):+.2f} points)"
        )
        if near := abs(time / simulated.step_time - 1) <= 0.02 and abs(bubble - simulated.bubble) <= 0.01:
            break
    assert near


def test_a_step_takes_as_long_as_simulated(pool):
    compare(pool, ("zb_h1", 1), 4, 0.4)  # each wakes a millisecond or two late


WAYS = [("layer_wise", 1), ("gpipe", 1), *(way for way in EVERY_SCHEDULE if way[0] not in ("layer_wise", "gpipe"))]


@pytest.mark.drill
@pytest.mark.parametrize("microbatches", [8, 16])
@pytest.mark.parametrize("way", [way for way in WAYS if way[1] < 3])
def test_every_schedule_takes_as_long_as_simulated(pool, way, microbatches):
    compare(pool, way, microbatches, SECONDS)


# -- partition ---------------------------------------------------------------------------------------------------------

EIGHT = (0.01, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.06)  # seconds of F, of I and of W: an embedding, blocks, a head


def layers_of(cut):
    return [[(EIGHT[i],) * 3 for i in layers] for layers in cut]


def test_the_even_cut_loses_a_tenth_of_the_step_to_the_best_one(pool):
    """Measured: on real ranks, of layers whose costs are measured as well."""
    costs = measure([Layer(*[seconds] * 3) for seconds in EIGHT], torch.ones(1), repeats=1)
    best, usual, times = partition(costs, RANKS), even(len(EIGHT), RANKS), {}
    assert best == [range(0, 3), range(3, 5), range(5, 7), range(7, 8)]
    plan = schedule("1f1b", RANKS, 4)
    for name, cut in (("even", usual), ("best", best)):
        seconds = [sum(EIGHT[i] for i in layers) for layers in cut]
        simulated = simulate(plan, Times(seconds, seconds, seconds))
        times[name], bubble = pool.run(RANKS, dozing, plan, layers_of(cut), timeout=60)[0]
        print(f"{name} cut {cut}: {times[name]:.3f} s, simulated {simulated.step_time:.3f}, bubble {bubble:.1%}")
    assert times["even"] >= 1.1 * times["best"]
