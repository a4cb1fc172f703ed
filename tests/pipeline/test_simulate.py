"""The simulator: the formulas of every schedule, and a longest path that knows nothing of it."""

import random
from graphlib import TopologicalSorter
from itertools import pairwise, product

import pytest

from pipeline import SCHEDULES, Plan, Times, alike, schedule, simulate
from pipeline.plan import Action, B, F, I, W, made
from tests.pipeline.plans import random_plan

RANKS = (1, 2, 3, 4)
MICROBATCHES = range(1, 10)


def simulated(name, ranks, microbatches, virtual=None, *, times=(1, 1, 1), atomic=False):
    plan = schedule(name, ranks, microbatches, virtual)
    return simulate(plan, alike(plan.stages, *times), atomic=atomic)


def all_ranks(measure, ranks):
    """What every rank has: all the same."""
    values = {round(measure(rank), 9) for rank in range(ranks)}
    assert len(values) == 1
    return values.pop()


# -- formulas, with F = I = W = 1 and B = 2 on a chunk -----------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "microbatches"), list(product(RANKS, MICROBATCHES)))
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_idle_of_gpipe_and_1f1b(name, ranks, microbatches):
    step = simulated(name, ranks, microbatches)
    assert all_ranks(step.idle, ranks) == 3 * (ranks - 1)
    assert step.idle(0) / step.busy(0) == pytest.approx((ranks - 1) / microbatches)  # relative to ideal
    assert step.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))  # of the whole
    uneven = simulated(name, ranks, microbatches, times=(3, 5, 2))
    assert all_ranks(uneven.idle, ranks) == (ranks - 1) * (3 + 5 + 2)


@pytest.mark.parametrize(("ranks", "groups", "virtual"), list(product(RANKS, (1, 2, 3), (1, 2, 3))))
def test_idle_of_interleaved(ranks, groups, virtual):
    microbatches = groups * ranks
    for name in ("interleaved", "gpipe"):
        step = simulated(name, ranks, microbatches, virtual)
        assert all_ranks(step.idle, ranks) / step.busy(0) == pytest.approx((ranks - 1) / (virtual * microbatches))
    assert simulated("gpipe", ranks, microbatches + 1, virtual).idle(0) == 3 * (ranks - 1)  # any M ≥ P


@pytest.mark.parametrize("ranks", RANKS)
def test_idle_of_zb_h1(ranks):
    """With P microbatches or more, and a W that is no longer than F and I, between which it lies."""
    for microbatches in range(ranks, 10):
        assert all_ranks(simulated("zb_h1", ranks, microbatches).idle, ranks) == ranks - 1
        for f, i, w in ((3, 2, 1), (1, 2, 1), (2, 2, 1), (5, 4, 4), (4, 1, 1)):
            step = simulated("zb_h1", ranks, microbatches, times=(f, i, w))
            assert all_ranks(step.idle, ranks) == (ranks - 1) * (f + i - w)
    for microbatches in range(1, ranks):
        late = [simulated(name, ranks, microbatches).step_time for name in ("zb_h1", "1f1b")]
        assert late[0] < late[1]


@pytest.mark.parametrize("ranks", RANKS)
def test_idle_of_zbv(ranks):
    for microbatches in range(2 * ranks - 1, 2 * ranks + 6):
        step = simulated("zbv", ranks, microbatches)
        assert all_ranks(step.idle, ranks) == ranks - 1
        assert all_ranks(step.idle_in_window, ranks) == 0
    assert ranks == 1 or simulated("zbv", ranks, 2 * ranks - 2).idle_in_window(0) > 0  # too few to fill it


@pytest.mark.parametrize("ranks", RANKS)
def test_idle_of_dualpipe_v(ranks):
    for microbatches in range(2 * ranks, 2 * ranks + 6):
        assert all_ranks(simulated("dualpipe_v", ranks, microbatches).idle, ranks) == ranks - 1
        assert all_ranks(simulated("dualpipe_v", ranks, microbatches, atomic=True).idle, ranks) == 2 * (ranks - 1)


@pytest.mark.parametrize("ranks", (2, 4, 6, 8))
def test_idle_and_peak_of_dualpipe(ranks):
    for microbatches in range(2 * ranks, 2 * ranks + 8, 2):
        atomic = simulated("dualpipe", ranks, microbatches, atomic=True)
        f_and_b, b, w = 3, 2, 1
        assert all_ranks(atomic.idle, ranks) == (ranks / 2 - 1) * (f_and_b + b - 3 * w)
        assert all_ranks(simulated("dualpipe", ranks, microbatches).idle, ranks) == ranks / 2 - 1  # apart
        assert atomic.peak == [ranks + 1] * ranks


@pytest.mark.parametrize(("ranks", "microbatches", "virtual"), list(product(RANKS, (1, 4, 9), (1, 2))))
def test_layer_wise_is_busy_one_rank_in_all(ranks, microbatches, virtual):
    step = simulated("layer_wise", ranks, microbatches, virtual)
    assert all_ranks(step.busy, ranks) / step.step_time == pytest.approx(1 / ranks)
    assert step.bubble == pytest.approx(1 - 1 / ranks)
    assert step.peak == [virtual] * ranks


PEAKS = {  # chunks of rank s
    "gpipe": lambda s, P, M: M,
    "1f1b": lambda s, P, M: min(M, P - s),
    "zb_h1": lambda s, P, M: min(M, P),
}


@pytest.mark.parametrize("name", PEAKS)
def test_peak(name):
    for ranks, microbatches in product(RANKS, (*MICROBATCHES, 32)):
        expected = [PEAKS[name](s, ranks, microbatches) for s in range(ranks)]
        assert simulated(name, ranks, microbatches).peak == expected


def test_peak_of_interleaved():
    for ranks, microbatches, virtual in product(RANKS, (*MICROBATCHES, 32), (1, 2, 3)):
        peak = simulated("interleaved", ranks, microbatches, virtual).peak
        most = [2 * (ranks - s - 1) + (virtual - 1) * ranks + 1 for s in range(ranks)]
        assert all(live <= bound for live, bound in zip(peak, most, strict=True))
        if microbatches % ranks == 0:
            assert peak == [min(bound, virtual * microbatches) for bound in most]


@pytest.mark.parametrize(("name", "most"), [("zbv", lambda P: 2 * P), ("dualpipe_v", lambda P: 2 * P + 1)])
def test_peak_of_a_v(name, most):
    for ranks, microbatches in product(RANKS, (*MICROBATCHES, 32)):
        peak = simulated(name, ranks, microbatches).peak
        assert max(peak) <= most(ranks)
        if microbatches >= 2 * ranks:
            assert peak == [most(ranks)] * ranks


# -- an independent one ------------------------------------------------------------------------------------------------


def sources(plan: Plan, action: Action) -> list[tuple]:
    """(kind, stage, microbatch) of whatever may make what an action needs."""
    _, s, m, _ = action
    forward = {"F": plan.before(s), "B": s, "I": s}.get(action.kind)
    backward = {"B": plan.after(s), "I": plan.after(s), "W": s}.get(action.kind)
    return [("F", forward, m), ("B", backward, m), ("I", backward, m)]


def longest_path(plan: Plan, times: Times, atomic: bool = False) -> dict[Action, float]:
    """The end of each action: the longest way to it, over its rank's order and what it needs of others."""
    pieces = []  # (rank, actions), those of a rank in a row
    for rank, actions in enumerate(plan.actions):
        for before, action in zip([None, *actions], actions, strict=False):
            joins = atomic and before is not None and before.paired
            pieces.append((rank, [*(pieces.pop()[1] if joins else []), action]))
    place = {action[:3]: k for k, (_, piece) in enumerate(pieces) for action in piece}
    lags = {}  # of a piece: the pieces before it, and how long it takes from their end to its begin
    for k, (rank, piece) in enumerate(pieces):
        needed = {place[source] for action in piece for source in sources(plan, action) if source in place} - {k}
        lags[k] = {j: times.transfer * (pieces[j][0] != rank) for j in needed}
        if k and pieces[k - 1][0] == rank:
            lags[k][k - 1] = 0
    ends = {}
    for k in TopologicalSorter(lags).static_order():
        at = max((ends[pieces[j][1][-1]] + lag for j, lag in lags[k].items()), default=0)
        for action in pieces[k][1]:
            at = ends[action] = at + times.of(action)
    return ends


def uneven(stages: int, seed: int) -> Times:
    draw = random.Random(seed)
    forward, input, weight = ([draw.choice((1, 2, 3, 5, 8)) for _ in range(stages)] for _ in range(3))
    return Times(forward, input, weight, draw.choice((0, 0, 1, 4)))


def agree(plan: Plan, times: Times, atomic: bool) -> None:
    ends = longest_path(plan, times, atomic)
    step = simulate(plan, times, atomic=atomic)
    assert {action: end for spans in step.spans for action, _, end in spans} == ends
    assert step.step_time == max(ends.values())
    for rank, spans in enumerate(step.spans):
        assert [action for action, _, _ in spans] == list(plan.actions[rank])
        assert all(end - start == times.of(action) for action, start, end in spans)
        assert all(earlier[2] <= later[1] for earlier, later in pairwise(spans))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("atomic", [False, True])
def test_uneven_stages_and_transfer_times(name, atomic):
    for ranks, microbatches in product((2, 4), (2, 4, 10)):
        plan = schedule(name, ranks, microbatches)
        agree(plan, uneven(plan.stages, seed=ranks * microbatches), atomic)


def test_random_plans_and_times():
    for seed in range(60):
        plan = random_plan(seed)
        agree(plan, uneven(plan.stages, seed), atomic=False)


# -- typed -------------------------------------------------------------------------------------------------------------


def test_starts_and_ends():
    """Two ranks, two microbatches, stage times of their own, a transfer of 1; the last backward in halves."""
    rank_0, rank_1 = [F(0, 0), F(0, 1), B(0, 0), I(0, 1), W(0, 1)], [F(1, 0), B(1, 0), F(1, 1), B(1, 1)]
    plan = made("typed", (0, 1), 2, [rank_0, rank_1])
    step = simulate(plan, Times([1, 2], [2, 3], [3, 4], transfer=1))
    assert [[(start, end) for _, start, end in spans] for spans in step.spans] == [
        [(0, 1), (1, 2), (12, 17), (21, 23), (23, 26)],
        [(2, 4), (4, 11), (11, 13), (13, 20)],
    ]
    assert step.step_time == 26
    assert (step.busy(0), step.busy(1)) == (12, 18)
    assert (step.idle(0), step.idle(1)) == (14, 8)
    assert (step.idle_in_window(0), step.idle_in_window(1)) == (14, 0)
    assert step.bubble == pytest.approx(22 / 52)


def test_a_pair_as_one_piece():
    """Its inputs are all there at its begin, its results at its end; what it needs of itself it has."""
    rank_0 = [F(0, 0), F(0, 1, paired=True), B(0, 0), B(0, 1)]
    plan = made("paired", (0, 1), 2, [rank_0, [F(1, 0), B(1, 0), F(1, 1, paired=True), B(1, 1)]])
    in_turn, atomic = (simulate(plan, alike(2), atomic=atomic).spans for atomic in (False, True))
    assert [[start for _, start, _ in spans] for spans in in_turn] == [[0, 1, 4, 7], [1, 2, 4, 5]]
    assert [[start for _, start, _ in spans] for spans in atomic] == [[0, 4, 5, 10], [1, 2, 7, 8]]


def test_memory_is_counted_by_stage():
    plan = schedule("1f1b", 3, 5)
    step = simulate(plan, alike(3), memory=[10.0, 2.5, 1.0])
    assert step.peak == [30.0, 5.0, 1.0]
    looped = simulate(schedule("gpipe", 2, 3, 2), alike(4), memory=[1, 10, 100, 1000])
    assert looped.peak == [303, 3030]


def test_activations_live_until_w():
    orders = [[F(0, 0), I(0, 0), F(0, 1), I(0, 1), F(0, 2), W(0, 0), I(0, 2), W(0, 1), W(0, 2)]]
    assert simulate(made("late", (0,), 3, orders), alike(1)).peak == [3]
    orders = [[F(0, 0), I(0, 0), W(0, 0), F(0, 1), I(0, 1), W(0, 1), F(0, 2), I(0, 2), W(0, 2)]]
    assert simulate(made("soon", (0,), 3, orders), alike(1)).peak == [1]


def test_a_transfer_costs_between_ranks_only():
    assert simulate(schedule("zbv", 1, 3), alike(2, transfer=100.0)).step_time == 18
    assert simulate(schedule("layer_wise", 2, 1), alike(2, transfer=100.0)).step_time == 206


def test_a_plan_that_stops_is_no_plan():
    orders = [[B(0, 0), F(0, 0)]]
    with pytest.raises(ValueError, match=r"stops: see what `check` says"):
        simulate(Plan("wrong", (0,), 1, tuple(map(tuple, orders))), alike(1))
