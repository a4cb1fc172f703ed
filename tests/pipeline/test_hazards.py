"""Faults that other pipelines had, each under the number of its trap."""

import pytest
import torch
from torch import nn

from collectives import layout
from pipeline import Microbatch, Pipeline, connect, schedule
from pipeline.ties import TIE, tie, tie_group
from tests.pipeline import models
from tests.pipeline.training import (
    EVERY_SCHEDULE,
    Case,
    Recipe,
    alone,
    batch,
    built,
    check_gradients,
    in_turn,
    microbatches_of,
    plain,
    rows_of,
    several,
    trained,
    worst,
)
from tests.pipeline.wide import check_runs

ONCE = Recipe(steps=1)


def judge(pool, ranks, cases, recipe=ONCE):
    results = pool.run(ranks, several, trained, cases, [recipe] * len(cases), timeout=120)
    for number, case in enumerate(cases):
        assert worst([of_rank[number] for of_rank in results], case, recipe) <= 1, case


def test_T100_fewer_microbatches_than_stages(pool):
    ways = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb_h1", 1), ("zbv", 2), ("dualpipe_v", 2)]
    judge(pool, 4, [Case(*way, 4, m) for way in ways for m in (1, 2, 3)])


def test_T100_dualpipe_says_which_numbers_it_can():
    with pytest.raises(ValueError, match=r"ranks=4, microbatches=3 must be even; use dualpipe_v"):
        schedule("dualpipe", 4, 3)


T101 = [(name, v, ranks) for name, v in EVERY_SCHEDULE for ranks in (2, 4) if name != "dualpipe"]
OFTEN = [("1f1b", 1, 4), ("interleaved", 2, 2), ("interleaved", 3, 2), ("zbv", 2, 4)]


@pytest.mark.parametrize(
    ("name", "virtual", "ranks"),
    [*OFTEN, *(pytest.param(*each, marks=pytest.mark.drill) for each in T101 if each not in OFTEN)],
)
def test_T101_slow_ranks_and_large_messages(pool, name, virtual, ranks):
    check_runs(pool, [schedule(name, ranks, 3, virtual)], 0.01, timeout=60)


@pytest.mark.drill
@pytest.mark.parametrize(("name", "virtual", "ranks"), T101)
def test_T101_any_number_of_microbatches(pool, name, virtual, ranks):
    for microbatches in range(2, 10):
        check_runs(pool, [schedule(name, ranks, microbatches, virtual)], 0.05, timeout=30)


def test_T102_microbatches_and_layers_that_do_not_divide(pool):
    """Eleven layers on eight stages."""
    judge(pool, 4, [Case("interleaved", 2, 4, m) for m in (4, 5, 6, 8)])


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("rows", [(3, 3, 2), (1, 1, 0), (2, 0, 0)])
def test_T103_an_uneven_last_microbatch(pool, ranks, rows):
    """All of the same shape in the first step, then 8 rows in 3, or 2."""
    recipe = Recipe(steps=2, rows=rows)
    judge(pool, ranks, [Case("1f1b", 1, ranks, 3), Case("zbv", 2, ranks, 3)], recipe)


# -- T107 --------------------------------------------------------------------------------------------------------------


class Trouble(nn.Module):
    """Fails in its n-th run, counted over forwards and backwards."""

    def __init__(self, part):
        super().__init__()
        self.part, self.left = part, None

    def forward(self, *args, **kwargs):
        self.count()
        x, *rest = self.part(*args, **kwargs)
        if x.requires_grad:
            x.register_hook(lambda grad: self.count())
        return x, *rest

    def count(self):
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                raise RuntimeError("trouble")


def interrupted(run, name, virtual):
    """The gradients of a clean step, before anything has failed and after each of the failures that there can be."""
    plan = schedule(name, 1, 4, virtual)
    model = models.model(models.blocks_for(plan.length))
    trouble = model.parts[1] = Trouble(model.parts[1])
    pipe, params = built(run, plan, model)
    found, failed = [in_turn(pipe, params, rows_of(4, 0), 0)], 0
    for at in range(1, 10):
        trouble.left = at
        try:
            in_turn(pipe, params, rows_of(4, at % 3), at)
        except RuntimeError as error:
            assert "trouble" in str(error)
            failed += 1
        trouble.left = None
        found.append(in_turn(pipe, params, rows_of(4, 0), 0))
    return found, failed


@pytest.mark.parametrize(("name", "virtual"), [("1f1b", 1), ("zb_h1", 1), ("zbv", 2), ("dualpipe_v", 2)])
def test_T107_a_clean_step_after_one_that_failed(pool, name, virtual):
    [(found, failed)] = pool.run(1, interrupted, name, virtual)
    assert failed == 8  # four forwards, four backwards
    (losses, grads), *later = found
    for other_losses, other_grads in later:
        assert torch.equal(torch.stack(losses), torch.stack(other_losses))
        assert grads.keys() == other_grads.keys()
        for name_, grad in grads.items():
            assert grad is other_grads[name_] or torch.equal(grad, other_grads[name_])


def test_T107_every_weight_gradient(pool):
    cases = [Case(*which, 4, m) for which in (("zb_h1", 1), ("zbv", 2)) for m in (1, 8)]
    judge(pool, 4, cases)


# -- T109 --------------------------------------------------------------------------------------------------------------


class Forgetful(models.Block):
    """One of the tensors that the stage before sends has no effect."""

    def forward(self, x, carry, even, **where):
        return super().forward(x, torch.zeros_like(carry), even, **where)


def forgetful(stages):
    """A whole model whose second stage begins with such a block."""
    model = models.model(models.blocks_for(stages))
    at = models.cut(stages)[1 % stages].start or 1
    part = Forgetful(at).double()
    part.load_state_dict(model.parts[at].state_dict())
    part.frozen.requires_grad_(False)
    model.parts[at] = part
    return model


def freeze(model, stages, frozen):
    """Only the parts of the other stages train; `frozen` parameters of blocks never do."""
    for stage, parts in enumerate(models.cut(stages)):
        for name, param in (pair for i in parts for pair in model.parts[i].named_parameters()):
            param.requires_grad_(stage not in frozen and not name.endswith("frozen"))


FROZEN = [(), (0,), (0, 1), (2,), (0, 1, 2), (1,), ()]  # stages, in each step


def freezing(run, case):
    model = forgetful(case.plan().length)
    pipe, params = built(run, case.plan(), model)
    found = []
    for step, frozen in enumerate(FROZEN):
        freeze(model, case.plan().length, frozen)
        found.append(in_turn(pipe, params, rows_of(case.microbatches, step), step))
    return found


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "zbv", "interleaved", "dualpipe_v"])
def test_T109_stages_without_gradients(pool, name):
    """The first, the first two, a middle one, the last, all; what is sent has no effect; and all that in turn."""
    case = Case(name, schedule(name, 3, 4).stages // 3, 3, 4)
    results = pool.run(3, freezing, case)
    model = forgetful(case.plan().length)
    for step, frozen in enumerate(FROZEN):
        freeze(model, case.plan().length, frozen)
        if set(frozen) >= set(range(case.plan().length)):
            assert all(grad is None for of_rank in results for grad in of_rank[step][1].values())
            continue
        check_gradients([of_rank[step] for of_rank in results], *alone(model, rows_of(4, step), step))


# -- T110 --------------------------------------------------------------------------------------------------------------


def payload(m):
    """What crosses, of a microbatch: hidden in bfloat16, a mask, positions, an empty one, one of no dimensions."""
    numbers = torch.Generator().manual_seed(m)
    hidden = torch.randn(2, 5, generator=numbers)
    mask, positions = hidden[0] > 0, torch.arange(2**40, 2**40 + 5) * (m + 1)
    return hidden.bfloat16(), mask, positions, torch.empty(0, 3), torch.tensor(m, dtype=torch.uint8)


class First(nn.Module):
    def __init__(self, trains):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, dtype=torch.bfloat16), requires_grad=trains)

    def forward(self, m):
        hidden, *rest = payload(int(m))
        return hidden * self.weight, *rest


class Last(nn.Module):
    def forward(self, *received):
        self.received = received
        return received[0].float().sum()


def crossing(run, name, trains):
    """(what arrived in two steps, gradient of the first stage's weight)."""
    plan, last = schedule(name, 2, 3), Last()
    stages = {0: First(trains), 1: last}
    links = connect(plan, [range(2)], run.new_group)
    pipe = Pipeline(plan, {run.rank: stages[run.rank]}, links, run.world, loss=arriving)
    for _ in range(2):
        losses = pipe.step([Microbatch((torch.tensor(m),), {}, last) for m in range(3)])
    arrived = pipe.evaluate([Microbatch((torch.tensor(m),), {}, last) for m in range(3)], loss=all_of)
    return losses, arrived, stages[0].weight.grad


def arriving(output, last):
    return output if output.requires_grad else output.detach()


def all_of(output, last):
    return [tensor.detach().clone() for tensor in last.received]


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_T110_tensors_of_many_dtypes_arrive_bitwise(pool, name, trains):
    (_, _, grad), (losses, arrived, _) = pool.run(2, crossing, name, trains)
    for m, tensors in enumerate(arrived):
        for got, sent in zip(tensors, payload(m), strict=True):
            assert got.dtype == sent.dtype and torch.equal(got, sent)
        assert torch.equal(losses[m], payload(m)[0].float().sum())
    expected = 2 * sum(payload(m)[0].sum(0) for m in range(3))
    assert (grad is None) if not trains else torch.allclose(grad, expected, rtol=2e-2, atol=1e-1)


# -- T113, T28, T44 ----------------------------------------------------------------------------------------------------


def with_evaluation(run, case, evaluates):
    """(two training steps, losses of what is evaluated between them)."""
    pipe, params = built(run, case.plan())
    found, losses = [in_turn(pipe, params, rows_of(case.microbatches, 0), 0)], []
    for sizes, step in [([2, 1], 1), ([1] * 7, 2), ([3], 0)] if evaluates else []:
        losses.append(pipe.evaluate(microbatches_of(sizes, step)))
        losses.append(pipe.evaluate(microbatches_of(sizes, step), loss=rows_and_ids))
    found.append(in_turn(pipe, params, rows_of(case.microbatches, 0), 0))
    return found, losses


def rows_and_ids(output, target):
    return len(output), target[0]


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "interleaved", "zbv"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_T113_evaluation_leaves_nothing_behind(pool, ranks, name):
    """Neither in the gradients, by a bit; and its losses, or whatever else is asked for, are right."""
    case = Case(name, schedule(name, ranks, 3).stages // ranks, ranks, 3)
    straight, between = (pool.run(ranks, with_evaluation, case, evaluates) for evaluates in (False, True))
    for (first, _), (second, _) in zip(straight, between, strict=True):
        for (_, grads), (_, others) in zip(first, second, strict=True):
            assert all(grad is others[n] or torch.equal(grad, others[n]) for n, grad in grads.items())
    model = models.model(models.blocks_for(case.plan().length))
    ends = [losses for _, losses in between if losses[0]]
    assert len(ends) == 1
    for i, (sizes, step) in enumerate([([2, 1], 1), ([1] * 7, 2), ([3], 0)]):
        assert torch.allclose(sum(ends[0][2 * i]), alone(model, sizes, step)[0], rtol=1e-12, atol=0)
        labels = batch(sizes, step)[1].split(sizes)
        for (rows, target), size, own in zip(ends[0][2 * i + 1], sizes, labels, strict=True):
            assert rows == size and torch.equal(target, own)


def test_T28_the_norm_before_clipping(pool):
    """Scaled before backward, not after the schedule: the norm is that of one process, and not the loss alone."""
    case = Case("1f1b", 1, 2, 3)
    _, steps = plain(models.blocks_for(2), 3, Recipe())
    for of_rank in pool.run(2, trained, case, Recipe()):
        for (*_, norm, _), (*_, true_norm, _) in zip(of_rank, steps, strict=True):
            assert norm == pytest.approx(float(true_norm), rel=1e-12)


def tied(run, case):
    """(gradients, whether the two ends are one parameter, labels of its sums)."""
    model = models.model(models.blocks_for(case.plan().length), tied=True)
    pipe, params = built(run, case.plan(), model, tied=True)
    losses, grads = in_turn(pipe, params, rows_of(case.microbatches, 0), 0)
    ends = [pipe.stages[s].parts for s in pipe.stages]
    tables = {id(p) for parts in ends for part in parts for n, p in part.named_parameters() if n == "table.weight"}
    weights = {id(p) for parts in ends for part in parts for n, p in part.named_parameters() if n == "weight"}
    sums = [label for param in params for label in param.held.sums]
    return losses, grads, tables == weights, sums


def tied_at_first(run):
    """A weight that is another on each rank, after it has been tied."""
    layer, plan = nn.Linear(2, 3, bias=False), schedule("1f1b", run.size, 1)
    nn.init.constant_(layer.weight, run.rank + 1.0)
    layout.declare(layer, lambda name: layout.Constant(0.0), lambda name: True)
    if (group := tie_group(plan, [range(run.size)], run.new_group)) is not None:
        tie(layer.weight, group)
    return float(layer.weight.min()), float(layer.weight.max())


def test_T44_two_copies_start_as_one(pool):
    assert pool.run(3, tied_at_first) == [(1, 1), (2, 2), (1, 1)]


@pytest.mark.parametrize(("name", "sums"), [("1f1b", [[TIE], [], [TIE]]), ("zbv", [[], [], []])])
def test_T44_a_tied_weight_is_one_parameter_in_a_V_and_a_sum_otherwise(pool, name, sums):
    case = Case(name, len(sums) // 3 if name == "1f1b" else 2, 3, 4)
    results = pool.run(3, tied, case)
    assert [labels for *_, labels in results] == sums
    assert results[0][2] == (name == "zbv")
    model = models.model(models.blocks_for(case.plan().length), tied=True)
    check_gradients([(losses, grads) for losses, grads, *_ in results], *alone(model, rows_of(4, 0), 0))
