"""The checker: each kind of wrong plan gets a clear line, and what it says of a hang is what a strict network does."""

from dataclasses import replace
from itertools import product

import pytest

from pipeline import SCHEDULES, check, schedule
from pipeline.plan import Action, B, F, I, Plan, W
from pipeline.program import one_a_direction
from tests import ordered
from tests.pipeline.following import follow, messages, one_a_pair
from tests.pipeline.plans import disturbed, random_plan

GOOD = Plan("good", (0, 1), 2, ((F(0, 0), F(0, 1), B(0, 0), B(0, 1)), (F(1, 0), B(1, 0), F(1, 1), I(1, 1), W(1, 1))))
CHANNELS = (one_a_direction, one_a_pair)


def swapped(plan: Plan, rank: int, i: int, j: int) -> Plan:
    order = list(plan.actions[rank])
    order[i], order[j] = order[j], order[i]
    return with_orders(plan, {rank: order})


def with_orders(plan: Plan, orders: dict) -> Plan:
    return replace(plan, actions=tuple(tuple(orders.get(r, each)) for r, each in enumerate(plan.actions)))


def refusal(plan: Plan, channel=one_a_direction) -> str:
    """The line with which it is refused, or nothing."""
    try:
        check(plan, channel)
    except ValueError as refused:
        return str(refused)
    return ""


def test_the_good_one_passes():
    check(GOOD)


RANK_0, RANK_1 = map(list, GOOD.actions)
WRONG = {
    "missing action": (
        with_orders(GOOD, {0: RANK_0[:-1]}),
        "good: stage 0 does 1 F of microbatch 1; it must be F once and then B, or I and W, once",
    ),
    "nothing of a microbatch": (
        with_orders(GOOD, {1: RANK_1[:2]}),
        "good: stage 1 does nothing of microbatch 1; it must be F once and then B, or I and W, once",
    ),
    "forward twice": (with_orders(GOOD, {0: [F(0, 0), *RANK_0]}), "stage 0 does 2 F, 1 B of microbatch 0;"),
    "backward twice": (with_orders(GOOD, {0: [*RANK_0, B(0, 1)]}), "stage 0 does 1 F, 2 B of microbatch 1;"),
    "B, and I and W": (with_orders(GOOD, {1: [*RANK_1, B(1, 1)]}), "stage 1 does 1 F, 1 B, 1 I, 1 W of microbatch 1;"),
    "B and W": (with_orders(GOOD, {0: [*RANK_0, W(0, 1)]}), "stage 0 does 1 F, 1 B, 1 W of microbatch 1;"),
    "I without W": (with_orders(GOOD, {1: RANK_1[:-1]}), "stage 1 does 1 F, 1 I of microbatch 1;"),
    "W without I": (with_orders(GOOD, {1: [*RANK_1[:3], W(1, 1)]}), "stage 1 does 1 F, 1 W of microbatch 1;"),
    "forward alone in some stages": (
        with_orders(GOOD, {1: [F(1, 0), F(1, 1)]}),
        "stage 1 does 1 F of microbatch 0;",
    ),
    "forward alone of some microbatches": (
        with_orders(GOOD, {0: [F(0, 0), F(0, 1), B(0, 0)], 1: [F(1, 0), B(1, 0), F(1, 1)]}),
        "stage 0 does 1 F of microbatch 1;",
    ),
    "on the wrong rank": (
        with_orders(GOOD, {0: [*RANK_0, F(1, 0)], 1: RANK_1[1:]}),
        "good: rank 0 has F0 of stage 1, which rank 1 has",
    ),
    "unknown stage": (with_orders(GOOD, {0: [*RANK_0, F(2, 0)]}), "rank 0 has F0 of stage 2, which there is not"),
    "negative numbers": (
        with_orders(GOOD, {1: [*RANK_1, F(-1, -1)]}),
        "rank 1 has F-1 of stage -1, which there is not",
    ),
    "unknown microbatch": (with_orders(GOOD, {1: [*RANK_1, F(1, 2)]}), "rank 1 has F2 of stage 1, which there is not"),
    "microbatch of the other copy": (
        with_orders(schedule("dualpipe", 2, 2), {0: [F(0, 1)]}),
        "dualpipe: rank 0 has F1 of stage 0, which there is not",
    ),
    "unknown kind": (with_orders(GOOD, {0: [*RANK_0, Action("G", 0, 0)]}), "G0 of stage 0 is no action; use F, B, I"),
    "a rank without a stage": (
        Plan("idle", (0, 0), 1, ((F(0, 0), F(1, 0)), ())),
        "idle: stages lie on ranks (0, 0); give each of 2 ranks one",
    ),
    "a stage on no rank": (Plan("far", (0, 2), 1, ((F(0, 0),), (F(1, 0),))), "stages lie on ranks (0, 2)"),
    "stages that two copies cannot share": (
        Plan("odd", (0, 1, 0), 2, ((), ()), copies=2),
        "odd: stages lie on ranks (0, 1, 0)",
    ),
    "backward before forward": (
        with_orders(GOOD, {1: [B(1, 0), F(1, 0), *RANK_1[2:]]}),
        "good: rank 1 has B0 of stage 1 before the activation that it needs",
    ),
    "W before I": (
        with_orders(GOOD, {1: [*RANK_1[:3], W(1, 1), I(1, 1)]}),
        "good: rank 1 has W1 of stage 1 before the gradient that it needs",
    ),
    "a stage before the one before it": (
        Plan("turned", (0, 0), 1, ((F(1, 0), F(0, 0), B(1, 0), B(0, 0)),)),
        "turned: rank 0 has F0 of stage 1 before the activation that it needs",
    ),
    "a backward before that of the stage behind": (
        Plan("turned", (0, 0), 1, ((F(0, 0), F(1, 0), B(0, 0), B(1, 0)),)),
        "turned: rank 0 has B0 of stage 0 before the gradient that it needs",
    ),
    "ranks that wait for each other": (
        with_orders(GOOD, {0: [F(0, 0), B(0, 0), F(0, 1), B(0, 1)], 1: [F(1, 0), F(1, 1), B(1, 0), *RANK_1[3:]]}),
        "good hangs: rank 0 waits for the gradient of microbatch 0 from stage 1; "
        "rank 1 waits for the activation of microbatch 1 from stage 0.",
    ),
    "messages that cross while both are awaited": (
        with_orders(GOOD, {0: [F(0, 1), F(0, 0), B(0, 0), B(0, 1)], 1: [F(1, 0), F(1, 1), B(1, 0), *RANK_1[3:]]}),
        "good hangs: rank 0 waits for the gradient of microbatch 0 from stage 1; "
        "rank 1 waits for the activation of microbatch 0 from stage 0.",
    ),
    "messages that cross": (
        swapped(GOOD, 0, 0, 1),
        "good hangs: rank 0 waits for the gradient of microbatch 0 from stage 1; "
        "rank 1 waits for the activation of microbatch 0 from stage 0.",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_refused_in_one_line(case):
    plan, told = WRONG[case]
    line = refusal(plan)
    assert told in line and "\n" not in line and line.startswith(plan.name)


@pytest.mark.parametrize(("name", "rank", "i", "j"), [("1f1b", 0, 2, 5), ("1f1b", 1, 0, 1), ("zbv", 1, 1, 3)])
def test_two_actions_swapped_hang_and_name_the_ranks(name, rank, i, j):
    """Fault: what each rank does by itself is in order, and together they wait forever."""
    plan = schedule(name, 3, 4)
    line = refusal(swapped(plan, rank, i, j))
    assert f"{name} hangs: rank 0 waits for" in line and f"rank {rank} waits for" in line


def test_a_plan_that_does_nothing_but_forward():
    check(Plan("eval", (0, 1), 2, ((F(0, 0), F(0, 1)), (F(1, 0), F(1, 1)))))


# -- one group for both directions -------------------------------------------------------------------------------------

CASES = list(product((2, 3, 4), range(1, 9)))


@pytest.mark.parametrize(
    ("name", "virtual", "refused"),
    [
        ("1f1b", 1, 21),
        ("zb_h1", 1, 21),
        ("interleaved", 2, 16),
        ("zbv", 2, 24),
        ("dualpipe_v", 2, 24),
        ("gpipe", 1, 21),
    ],
)
def test_one_group_a_pair_is_refused(name, virtual, refused):
    """Fault: of 24 sizes so many hang; for 1F1B and ZB-H1, and GPipe whose first gradient is awaited one action ahead,
    all but M = 1.
    """
    fine = [(P, M) for P, M in CASES if not refusal(schedule(name, P, M, virtual), one_a_pair)]
    assert len(CASES) - len(fine) == refused
    assert refused != 21 or fine == [(2, 1), (3, 1), (4, 1)]
    for P, M in CASES:
        check(schedule(name, P, M, virtual))


def test_one_group_a_pair_is_refused_by_the_ranks_that_hang():
    assert refusal(schedule("1f1b", 2, 2), one_a_pair) == (
        "1f1b hangs: rank 0 waits for the gradient of microbatch 0 from stage 1; rank 1 waits for the activation of "
        "microbatch 1 from stage 0. Use a group for each direction of a boundary, or another order"
    )


# -- the checker and a network that keeps the rule ---------------------------------------------------------------------


def passes(plan: Plan, channel, seed: int) -> bool:
    try:
        report = ordered.run(plan.ranks, follow, plan, channel, lanes="group", seed=seed)
    except ordered.Refused:
        return False
    assert report.messages == sum(report.results) == len(messages(plan))
    return True


@pytest.mark.parametrize("name", SCHEDULES)
def test_verdict_on_schedules_is_that_of_the_network(name):
    for ranks, microbatches, channel in product((2, 3, 4), (1, 3, 4), CHANNELS):
        if name != "dualpipe" or (ranks % 2 == microbatches % 2 == 0):
            plan = schedule(name, ranks, microbatches)
            assert passes(plan, channel, seed=ranks) == (not refusal(plan, channel))


def verdicts_agree(seeds: range) -> None:
    verdicts = []
    for seed in seeds:
        plan = random_plan(seed)
        for each, channel in product((plan, disturbed(plan, seed)), CHANNELS):
            verdicts.append(not refusal(each, channel))
            assert passes(each, channel, seed) == verdicts[-1], (seed, each.name, channel.__name__)
    assert 0.25 < sum(verdicts) / len(verdicts) < 0.75


def test_verdict_on_random_plans_is_that_of_the_network():
    verdicts_agree(range(20))


@pytest.mark.drill
def test_verdict_on_many_random_plans_is_that_of_the_network():
    verdicts_agree(range(20, 500))
