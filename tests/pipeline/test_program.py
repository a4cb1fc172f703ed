"""Programs: what a rank posts and waits for between its actions."""

import random
from collections import defaultdict
from itertools import chain, product

import pytest

from pipeline import SCHEDULES, Plan, schedule
from pipeline.forward_only import forward_only
from pipeline.program import Message, Step, one_a_direction, program
from tests.pipeline.following import messages
from tests.pipeline.plans import random_plan


def plans() -> list[Plan]:
    numbers = [(name, P, M) for name, P, M in product(SCHEDULES, (1, 2, 3, 4), (1, 2, 5, 8))]
    chosen = [schedule(*each) for each in numbers if each[0] != "dualpipe" or each[1] % 2 == each[2] % 2 == 0]
    return [*chosen, *(forward_only(plan, 5) for plan in chosen), *map(random_plan, range(100))]


def told(step: Step) -> str:
    """A step in a word or two: "receive F0", "run B1"."""
    if isinstance(step.what, Message):
        letter = "a" if step.what.result.kind == "activation" else "g"
        return f"{step.verb} {letter}{step.what.result.microbatch}"
    return f"{step.what.kind}{step.what.microbatch}"


def test_program_of_1f1b():
    """A receive is posted one action ahead of its use; a gradient is a receipt for the activation."""
    plan = schedule("1f1b", 2, 3)
    assert [told(step) for step in program(plan, 0)] == [
        *("F0", "send a0", "receive g0", "F1", "send a1"),
        *("wait g0", "settle a0", "B0", "receive g1", "F2", "send a2"),
        *("receive g2", "wait g1", "settle a1", "B1", "wait g2", "settle a2", "B2"),
    ]
    assert [told(step) for step in program(plan, 1)] == [
        *("receive a0", "wait a0", "F0", "receive a1", "B0", "send g0"),
        *("wait a1", "F1", "receive a2", "B1", "send g1"),
        *("wait a2", "settle g0", "F2", "B2", "send g2", "settle g1", "settle g2"),
    ]


def test_every_message_is_posted_once_at_both_ends_in_one_order():
    for plan in plans():
        steps = [program(plan, rank) for rank in range(plan.ranks)]
        orders = {verb: defaultdict(list) for verb in ("send", "receive", "wait", "settle")}
        for rank, own in enumerate(steps):
            assert [step.what for step in own if step.verb == "run"] == list(plan.actions[rank])
            for verb, what in own:
                if verb != "run":
                    assert rank == (what.source_rank if verb in ("send", "settle") else what.target_rank)
                    orders[verb][one_a_direction(what)].append(what)
        assert orders["send"] == orders["receive"] == orders["wait"]
        assert sorted(chain(*orders["send"].values())) == messages(plan)
        assert {k: sorted(v) for k, v in orders["settle"].items()} == {k: sorted(v) for k, v in orders["send"].items()}


def test_what_is_used_is_there_and_what_is_sent_is_made():
    """At each end: receive, wait, use; make, send, settle."""
    for plan in plans():
        for rank in range(plan.ranks):
            steps = program(plan, rank)
            at = {step: i for i, step in enumerate(steps)}
            runs = {step.what: i for i, step in enumerate(steps) if step.verb == "run"}
            made = {plan.result(action): i for action, i in runs.items()}
            used = {plan.from_neighbour(action): i for action, i in runs.items()}
            for verb, what in steps:
                if verb == "wait":
                    assert at[Step("receive", what)] < at[Step("wait", what)] < used[what.result]
                elif verb == "settle":
                    assert made[what.result] < at[Step("send", what)] < at[Step("settle", what)]


def test_receives_are_posted_one_action_ahead():
    """Unless the action before is the forward that a gradient belongs to, from which its shape is known."""
    for plan in plans():
        for rank in range(plan.ranks):
            steps, actions = program(plan, rank), plan.actions[rank]
            run_of = [i for i, step in enumerate(steps) if step.verb == "run"]
            for i, step in enumerate(steps):
                if step.verb == "receive":
                    runs_before = sum(at < i for at in run_of)
                    user = next(k for k, a in enumerate(actions) if plan.from_neighbour(a) == step.what.result)
                    own = user and actions[user - 1][1:3] == actions[user][1:3]
                    assert user - runs_before == (0 if own or not user else 1)


# -- receipts ----------------------------------------------------------------------------------------------------------


def timed(plan: Plan, seed: int) -> list[tuple[Message, float, float, bool]]:
    """Run all programs with actions and messages of random length. Of each settle: what, when it is reached, when the
    message has passed, whether the rank has an action to run after it.
    """
    draw = random.Random(seed)
    programs = [program(plan, rank) for rank in range(plan.ranks)]
    at, clock = [0] * plan.ranks, [0.0] * plan.ranks
    posted, passed, reached = defaultdict(dict), {}, []
    while any(i < len(steps) for i, steps in zip(at, programs, strict=True)):
        before = list(at)
        for rank, steps in enumerate(programs):
            while at[rank] < len(steps):
                verb, what = steps[at[rank]]
                if verb in ("send", "receive"):
                    posted[what][verb] = clock[rank]
                    if len(posted[what]) == 2:
                        passed[what] = max(posted[what].values()) + draw.random() * draw.choice((0.01, 3))
                elif verb == "run":
                    clock[rank] += draw.random() * draw.choice((0.01, 1, 10))
                elif what not in passed:
                    break
                elif verb == "settle":
                    later = any(step.verb == "run" for step in steps[at[rank] :])
                    reached.append((what, clock[rank], passed[what], later))
                else:
                    clock[rank] = max(clock[rank], passed[what])
                at[rank] += 1
        assert at != before
    return reached


def test_a_settle_before_the_end_never_waits():
    early = 0
    for seed, plan in enumerate(plans()):
        for message, reached, passed, later in timed(plan, seed):
            if later:
                early += 1
                assert passed <= reached, f"{plan.name}: {message}"
    assert early > 1000


def most_unsettled(plan: Plan, rank: int) -> int:
    """The most sends that a rank has posted and not settled."""
    open_, most = 0, 0
    for verb, _ in program(plan, rank):
        open_ += (verb == "send") - (verb == "settle")
        most = max(most, open_)
    return most


@pytest.mark.parametrize(
    ("name", "times"),
    [
        ("1f1b", 1),
        ("zb_h1", 1),
        ("interleaved", 3),
        ("zbv", 2),
        ("dualpipe_v", 2),
    ],
)
def test_few_sends_are_unsettled_however_many_microbatches(name, times):
    for ranks in (2, 3, 4):
        sizes = [schedule(name, ranks, M) for M in (4 * ranks, 8 * ranks)]
        few, many = ([most_unsettled(plan, rank) for rank in range(ranks)] for plan in sizes)
        assert few == many and max(many) <= times * ranks
