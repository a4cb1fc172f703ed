"""The demo and the study: their claims hold, and each kind of them fails where the code does not keep it."""

from contextlib import ExitStack
from unittest import mock

import pytest
import torch

from collectives.demo import Demo
from pipeline import __main__ as command
from pipeline import executor, schedule, sleeping, study
from pipeline.partition import Cost, even, partition

true_step, true_run, true_send = executor.Pipeline.step, executor.Pipeline._run, executor._Run.send
true_backward, true_forward = executor._Run._backward, sleeping.Block.forward
backward = torch.autograd.backward


def with_other_labels(pipe, microbatches):
    """Each microbatch has the labels of the one before."""
    targets = [each.target for each in (microbatches[-1], *microbatches)]
    return true_step(pipe, [executor.Microbatch(each.args, target=targets[m]) for m, each in enumerate(microbatches)])


def sends_no_gradient(run, message):
    """Zeros arrive."""
    if message.result.kind == "gradient":
        run.here[message.result] = [torch.zeros_like(grad) for grad in run.here[message.result]]
    true_send(run, message)


def describes_always(pipe, plan, microbatches, loss):
    """In every step, not in the first one alone."""
    pipe.varies = True
    return true_run(pipe, plan, microbatches, loss)


def keeps_more(block, x):
    """Something for backward that nobody needs."""
    return true_forward(block, x) + 0 * (x + 1).cos()


def keeps_longer(run, stage, m):
    """Chunks stay until the end of the step."""
    run.attic = [*getattr(run, "attic", []), run.live[stage, m]]
    retained = mock.patch.object(torch.autograd, "backward", lambda *given: backward(*given, retain_graph=True))
    with retained:
        true_backward(run, stage, m)


FAULTS = {
    "": (),
    "labels": (executor.Pipeline, "step", with_other_labels),
    "gradient": (executor._Run, "send", sends_no_gradient),
    "descriptions": (executor.Pipeline, "_run", describes_always),
    "more": (sleeping.Block, "forward", keeps_more),
    "longer": (executor._Run, "_backward", keeps_longer),
    "checker": (command, "check", lambda plan, channel: None),
}


def broken(run, fault, *names):
    """The claims that do not hold on this rank, by schedule; of these schedules, or of all. Nobody sleeps."""
    show = Demo(run)
    with ExitStack() as faults:
        for module in (command, sleeping):
            faults.enter_context(mock.patch.object(module, "NAP", 0.0))
        if names:
            faults.enter_context(mock.patch.object(command, "SCHEDULES", names))
        microbatches = sleeping.batch(2 * run.size)
        reference = sleeping.alone(sleeping.layers(2 * run.size), microbatches)
        if fault:
            faults.enter_context(mock.patch.object(*FAULTS[fault]))
        for plan in command.plans(run):
            command.follow(run, show, plan, microbatches, reference)
        command.refuse(run, show)
    failed = [(claim.part, claim.name) for claim in show.claims if not claim.holds()]
    return {part: {name for other, name in failed if other == part} for part, _ in failed}


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_all_claims_hold(pool, ranks):
    assert pool.run(ranks, broken, "") == ranks * [{}]


def test_labels_of_another_microbatch(pool):
    [first, last] = pool.run(2, broken, "labels", "1f1b")
    assert first == {"1f1b": {"gradients"}}
    assert last == {"1f1b": {"gradients", "losses"}}


@pytest.mark.parametrize("name", ["gpipe", "zbv"])
def test_gradients_that_are_lost(pool, name):
    for found in pool.run(2, broken, "gradient", name):
        assert found == {name: {"gradients"}}


def test_descriptions_in_every_step(pool):
    """The activations' alone: a gradient is described by the activation that it belongs to."""
    [first, last] = pool.run(2, broken, "descriptions", "1f1b")
    assert first == {"1f1b": {"messages, all ranks", "elements, each link"}}
    assert last == {"1f1b": {"messages, all ranks"}}


def test_more_that_is_kept(pool):
    assert pool.run(2, broken, "more", "interleaved") == 2 * [{"interleaved": {"bytes kept at the peak"}}]


def test_chunks_that_live_longer(pool):
    """With GPipe it does not show: all of them live then anyway."""
    seen = {"1f1b": {"live, counted", "bytes kept at the peak"}}
    assert pool.run(2, broken, "longer", "gpipe", "1f1b") == 2 * [seen]


def test_a_checker_that_sees_nothing(pool):
    assert pool.run(2, broken, "checker", "gpipe") == 2 * [
        {"1f1b, a group a pair of ranks": {"refused before it hangs"}}
    ]


# -- the study ---------------------------------------------------------------------------------------------------------


def studied(run):
    """Claims that do not hold, and the cuts."""
    show = Demo(run)
    with mock.patch.object(sleeping, "NAP", 0.001):
        cuts = study.both(run, show)
    return [claim.name for claim in show.claims if not claim.holds()], [cut.layers for cut in cuts]


@pytest.mark.parametrize("ranks", [1, 3])
def test_both_cuts_are_the_whole_model(pool, ranks):
    found = pool.run(ranks, studied)
    assert found == ranks * found[:1]  # one cut for all
    failed, cuts = found[0]
    assert failed == []
    for cut in cuts:
        assert [layer for stage in cut for layer in stage] == list(range(2 * ranks + 2))


def test_what_the_even_cut_costs():
    """Layers of 0, then eight times 1, then 3 units, forward; twice that backward. M = 8 on 4 stages."""
    costs = [Cost(unit, 2 * unit) for unit in (0, *8 * [1], 3)]
    plan = schedule("1f1b", 4, 8)
    slowest, simulated = study.predicted(plan, even(10, 4), costs)
    assert slowest == 3 * 4
    assert simulated.step_time == 7 * slowest + 3 * 11  # the slowest is the last: the others are hidden but once
    best, faster = study.predicted(plan, partition(costs, 4), costs)
    assert best == 3 * 3
    assert faster.step_time <= 0.85 * simulated.step_time
