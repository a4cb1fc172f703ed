"""What does not fit is refused: one clear line that names the values and the remedy, before any message."""

from dataclasses import replace

import pytest
import torch

from expert_parallel import Experts, Losses, MoE, Router, cut_experts, cut_hidden
from tests.expert_parallel.cases import Case, distributed, made, sequences
from tests.expert_parallel.reference import Layer
from tests.recorder import recording

LINES = {  # what is done → its message
    "no choice": (lambda: Router(4, 8, 0), "choices=0 of experts=8: choose at least 1, and at most all"),
    "more choices than experts": (
        lambda: MoE(4, 4, 2, choices=3),
        "choices=3 of experts=2: choose at least 1, and at most all",
    ),
    "an unknown score": (lambda: MoE(4, 4, 8, score="tanh"), "score='tanh' is unknown: use softmax or sigmoid"),
    "no capacity": (
        lambda: MoE(4, 4, 8, capacity=0.0),
        "capacity=0.0 must be positive and finite; None drops no token",
    ),
    "a negative capacity": (
        lambda: MoE(4, 4, 8, capacity=-1.0),
        "capacity=-1.0 must be positive and finite; None drops no token",
    ),
    "an unknown balance": (lambda: Losses(over="row"), "over='row' is unknown: use sequence or batch"),
    "tokens without rows": (
        lambda: MoE(4, 4, 8)(torch.zeros(3, 4)),
        "x of shape [3, 4] is no rows of tokens: give it as [B, T, 4]",
    ),
    "another width": (
        lambda: MoE(4, 4, 8)(torch.zeros(2, 3, 5)),
        "x of shape [2, 3, 5] is no rows of tokens: give it as [B, T, 4]",
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_a_layer_that_cannot_be(name):
    call, text = LINES[name]
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == text


def refused(run, call):
    """What is raised, and how many calls were made before."""
    with recording() as recorder, pytest.raises(ValueError) as error:
        call(run)
    return str(error.value), len(recorder.calls)


def of_experts(run, count):
    MoE(4, 4, count, choices=1, group=run.world)


def many(run):
    of_experts(run, 6)


def few(run):
    of_experts(run, 2)


@pytest.mark.parametrize(
    ("call", "ranks", "text"),
    [
        (many, 4, "4 ranks do not divide 6 experts: share them over one of [1, 2, 3, 6] ranks"),
        (few, 4, "4 ranks do not divide 2 experts: share them over one of [1, 2] ranks"),
        (few, 3, "3 ranks do not divide 2 experts: share them over one of [1, 2] ranks"),
    ],
)
def test_t98_ranks_that_do_not_divide_the_experts(pool, call, ranks, text):
    """On every rank, as the layer is made."""
    assert pool.run(ranks, refused, call) == [(text, 0)] * ranks


def fine(run):
    [whole] = [tuple(MoE(4, 6, 8).experts.gate.shape)]
    moe = MoE(4, 6, 8, group=run.world)
    [box] = moe.experts.gate.held.boxes
    return whole, tuple(moe.experts.gate.shape), box.offset, moe.experts.gate.held.family


def test_t98_ranks_that_do(pool):
    """ep = 2 of 8 experts: four each."""
    assert pool.run(2, fine) == [((8, 6, 4), (4, 6, 4), (4 * rank, 0, 0), "expert") for rank in range(2)]


def hidden(run):
    cut_hidden(Experts(4, 5, 2), run.world)


def test_ranks_that_do_not_divide_an_expert(pool):
    [(text, calls), _] = pool.run(2, refused, hidden)
    assert text.startswith("2 ranks do not divide the 5 hidden channels of an expert") and calls == 0


def meta(run):
    """Nothing is computed of experts without values; they are cut all the same."""
    with torch.device("meta"):
        experts = Experts(4, 6, 8)
    cut_experts(experts, run.world)
    return {tuple(param.shape) for param in experts.parameters()}, {param.device.type for param in experts.parameters()}


def test_experts_on_the_meta_device(pool):
    assert pool.run(4, meta) == [({(2, 6, 4), (2, 4, 6)}, {"meta"})] * 4


WRONG = {  # what is changed of x [4, 4, 6] and its sequences, on two ranks that cut rows → text
    "fewer tokens": (
        lambda x, where: (x[:, 1:], where),
        "x of shape [4, 3, 6] and its sequences differ: routed [4, 4] and counted [4]",
    ),
    "fewer rows": (
        lambda x, where: (x[:1], where),
        "x of shape [1, 4, 6] and its sequences differ: routed [4, 4] and counted [4]",
    ),
    "one row for all": (
        lambda x, where: (x, replace(where, routed=where.routed[:1])),
        "x of shape [4, 4, 6] and its sequences differ: routed [1, 4] and counted [4]",
    ),
    "rows of another number are counted": (
        lambda x, where: (x, replace(where, counted=where.counted[:3])),
        "x of shape [4, 4, 6] and its sequences differ: routed [4, 4] and counted [3]",
    ),
    "no slots": (
        lambda x, where: (x, replace(where, slots=None)),
        "rows are cut over 2 ranks: give slots [2, 4] of all, not None",
    ),
    "slots of this rank": (
        lambda x, where: (x, replace(where, slots=where.slots[0])),
        "rows are cut over 2 ranks: give slots [2, 4] of all, not [4]",
    ),
    "whole rows": (lambda x, where: (x, None), "rows are cut over 2 ranks: give slots [2, 4] of all, not None"),
}


def wrong(run, name):
    case = Case(Layer(capacity=1.0), 2, 2, 2, T=8)
    moe, rows = distributed(run, case), torch.arange(4)
    given = WRONG[name][0](torch.zeros(4, 4, 6, dtype=torch.float64), sequences(case, run.rank, rows))
    return refused(run, lambda run: moe(*given))


@pytest.mark.parametrize("name", WRONG)
def test_tokens_and_sequences_that_do_not_fit(pool, name):
    assert pool.run(2, wrong, name) == [(WRONG[name][1], 0)] * 2


def test_the_names_of_its_parameters():
    """Which are those of a checkpoint."""
    names = [name for name, _ in made(Layer(shared=3, bias=(0.0,) * 12)).state_dict().items()]
    experts = ["experts.gate", "experts.up", "experts.down"]
    shared = ["shared.gate.weight", "shared.up.weight", "shared.down.weight"]
    assert names == ["router.weight", "router.bias", *experts, *shared]
