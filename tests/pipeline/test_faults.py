"""Faults in schedules, checker, simulator, programs, events, partition and backward: for each a test that sees it."""

import functools

import pytest

from tests.pipeline import test_backward as backward
from tests.pipeline import test_check as checks
from tests.pipeline import test_events as events
from tests.pipeline import test_partition as partitions
from tests.pipeline import test_program as programs
from tests.pipeline import test_schedules as schedules
from tests.pipeline import test_simulate as simulates
from tests.pipeline.planting import planted


def wrong(case):
    return functools.partial(checks.test_refused_in_one_line, case)


def halves(name):
    return functools.partial(backward.test_halves_are_backward, name)


def two_stages():
    events.test_two_stages({}, "+a F0 +b F0 B0 F1 B0 F1 B1 -b !b B1 -a !a")


FAULTS = {  # what it is: file, what is there, what is put there, and the test
    "gpipe goes back through its stages in the order of forward": (
        *("gpipe", "for s in reversed(stages)", "for s in stages"),
        lambda: schedules.test_any_numbers_give_a_step("gpipe"),
    ),
    "1f1b warms up with one microbatch more": (
        *("one_f_one_b", "ranks - stage - 1  #", "ranks - stage  #"),
        lambda: simulates.test_peak("1f1b"),
    ),
    "interleaved goes back chunk by chunk as it came": (
        *("interleaved", "(virtual - 1 - v) * ranks", "v * ranks"),
        lambda: schedules.test_any_numbers_give_a_step("interleaved"),
    ),
    "interleaved warms up as 1f1b does": (
        *("interleaved", "2 * (ranks - rank - 1)", "(ranks - rank - 1)"),
        lambda: schedules.test_picture_of_the_header("interleaved"),
    ),
    "zb_h1 puts off W by one microbatch more": (
        *("zb_h1", "W(stage, m - stage)", "W(stage, m - stage - 1)"),
        lambda: schedules.test_any_numbers_give_a_step("zb_h1"),
    ),
    "zbv warms up with one microbatch less": (
        *("zbv", "2 * (ranks - rank) - 1  #", "2 * (ranks - rank) - 2 + (ranks == 1)  #"),
        lambda: schedules.test_any_numbers_give_a_step("zbv"),
    ),
    "dualpipe_v pairs where it should not": (
        *("dualpipe_v", "apart=i == 0 and ahead == 0", "apart=False"),
        lambda: schedules.test_orders_are_pytorchs("dualpipe_v", schedules.torchs.ScheduleDualPipeV, 2, 3),
    ),
    "forward_only takes one stage after the other": (
        *("forward_only", "(s % plan.length + m, s, m)", "(s, s, m)"),
        schedules.test_picture_of_forward_only,
    ),
    "what is left out leaves its pair": (
        *("plan", "action.paired and there[i + 1]", "action.paired"),
        schedules.test_left_out_microbatches_take_their_pairs_along,
    ),
    "the checker does not count": ("check", "if counts not in wanted:", "if not counts:", wrong("backward twice")),
    "the checker takes any rank": ("check", "!= rank:", "!= rank and False:", wrong("on the wrong rank")),
    "the checker looks at no order": (
        *("check", "and need not in before:", "and False:"),
        wrong("a backward before that of the stage behind"),
    ),
    "the checker lets messages overtake": (
        *("check", "while all(ends) and ends[0][0] == ends[1][0]:", "while all(ends):"),
        wrong("messages that cross while both are awaited"),
    ),
    "the checker lets every message pass": (
        *("check", "steps[0].what not in passed):", "steps[0].what not in passed and False):"),
        wrong("ranks that wait for each other"),
    ),
    "the checker has a group for each message": (
        *("check", "_check_ends(plan, channel)", "_check_ends(plan, lambda message: message)"),
        wrong("messages that cross"),
    ),
    "the simulator forgets the transfer": (
        *("simulate", "at + times.transfer * (owner != rank)", "at"),
        simulates.test_starts_and_ends,
    ),
    "the simulator frees at I": (
        "simulate",
        'action.kind in "BW"',
        'action.kind in "BI"',
        simulates.test_activations_live_until_w,
    ),
    "the simulator never takes a pair as one": (
        *("simulate", "if not (atomic and action.paired):", "if True:"),
        lambda: simulates.test_idle_of_dualpipe_v(3),
    ),
    "a send is settled as soon as anything comes from the peer": (
        *("program", "if used_at[other] <= made_at[message]]", "]"),
        programs.test_a_settle_before_the_end_never_waits,
    ),
    "sends are settled at the end": (
        *("program", "if used_at[other] <= made_at[message]]", "if False]"),
        lambda: programs.test_few_sends_are_unsettled_however_many_microbatches("1f1b", 1),
    ),
    "a gradient is awaited before its own forward": (
        *("program", "ready = ahead == action or ahead[1:3] != action[1:3]", "ready = True"),
        programs.test_receives_are_posted_one_action_ahead,
    ),
    "weights are cut again after every run of actions": (
        *("events", 'or (open == "action" and i + 1 not in uses)', "or i + 1 not in uses"),
        two_stages,
    ),
    "gradients are reduced after I": (
        *("events", 'kind in "BW"', 'kind in "BI"'),
        events.test_a_reduction_comes_after_the_last_w_even_if_another_microbatch_ends_first,
    ),
    "the cut is by the sum of stages": (
        *(
            "partition",
            "max(slowest, time_of(stage, range(start, end)))",
            "slowest + time_of(stage, range(start, end)) ** 2",
        ),
        lambda: partitions.test_best_of_all_cuts(False),
    ),
    "the cut forgets how many microbatches live": (
        *("partition", "live[stage] * kept", "kept"),
        lambda: partitions.test_best_of_all_cuts(True),
    ),
    "a weight that is used twice counts thrice": (
        *("backward", "for way in border.closed if shared]", "for way in border.closed if False]"),
        halves("same in series"),
    ),
    "W replaces gradients": (
        *("backward", "weight.grad.add_(grad)", "weight.grad.copy_(grad)"),
        halves("same in series"),
    ),
    "W keeps what autograd hands out": (
        *("backward", "torch.empty_like(weight, dtype=weight.grad_dtype).copy_(grad)", "grad"),
        lambda: backward.test_halves_of_several_microbatches_add_up_in_any_order("a weight that is a sum"),
    ),
    "an output of weights alone is forgotten": (
        *("backward", "_leaves([root.edge.node], graph)", "()"),
        halves("an output of weights alone"),
    ),
    "W goes through the ways as well": (
        *("backward", "for child in below if child not in depth]", "for child in below]"),
        backward.test_each_half_does_its_own_products,
    ),
    "borders one behind the other run at once": (
        *("backward", "depth[node] += 1", "pass"),
        halves("same in series"),
    ),
}


@pytest.mark.parametrize("what", FAULTS)
def test_is_seen(what):
    *fault, test = FAULTS[what]
    with planted(*fault), pytest.raises((AssertionError, ValueError, RuntimeError, pytest.fail.Exception)):
        test()
