"""Which experts a rank holds, and what is declared of them."""

import pytest
import torch
from torch import nn

from collectives import layout
from expert_parallel import Experts, MoE, cut_experts, cut_hidden
from tests.expert_parallel.cases import mine_of
from tests.expert_parallel.reference import Layer, weights


def filled():
    """Twelve experts with values."""
    experts = Experts(6, 4, 12).double()
    values = weights(Layer(hidden=4))
    experts.load_state_dict({name: values[f"experts.{name}"] for name in ("gate", "up", "down")})
    return experts


def declared(param):
    return [(box.shape, box.offset, box.local) for box in param.held.boxes], param.held.family


def cut(run, ep):
    """What a rank holds, its expert-data group, and which tokens' sums the declarations name."""
    group = mine_of(run, *(range(i, i + ep) for i in range(0, run.size, ep)))
    expert_data = mine_of(run, *(range(i, run.size, ep) for i in range(ep)))
    model = nn.Module()
    model.moe, model.dense = MoE(6, 4, 12).double(), nn.Linear(3, 3)
    model.moe.experts = filled()
    layout.declare(model, lambda name: None, lambda name: True)
    for param in model.parameters():
        param.held.sums["data"] = run.world
    same = list(model.parameters())
    model.moe.distribute(group, expert_data)
    assert all(a is b for a, b in zip(same, model.parameters(), strict=True))
    layout.check(model.parameters(), run.world)
    sums = {p.held.name: p.held.sums["data"] for p in model.parameters()}
    experts = {name: (declared(p), p.detach(), p.held.copies) for name, p in model.moe.experts.named_parameters()}
    right = {name: group is (expert_data if "experts" in name else run.world) for name, group in sums.items()}
    return experts, right, declared(model.moe.router.weight)


@pytest.mark.parametrize(("ranks", "ep"), [(1, 1), (2, 2), (3, 3), (4, 4), (4, 2), (4, 1)])
def test_experts_are_cut_and_nothing_else(pool, ranks, ep):
    """In place, with their values; copies are counted; what others see is summed over expert-data alone."""
    values, size = weights(Layer(hidden=4)), 12 // ep
    for rank, (experts, sums, router) in enumerate(pool.run(ranks, cut, ep)):
        first = rank % ep * size
        for name, ((boxes, family), value, copies) in experts.items():
            whole = values[f"experts.{name}"]
            assert boxes == [(tuple(whole.shape), (first, 0, 0), (size, *whole.shape[1:]))] and family == "expert"
            assert torch.equal(value, whole[first : first + size]) and copies == ranks // ep
        assert len(sums) == 6 and all(sums.values())
        assert router == ([((12, 6), (0, 0), (12, 6))], "dense")


def alone(run):
    experts = filled()
    cut_experts(experts, run.world)
    return {name: (param.held.name, param.held.sums) for name, param in experts.named_parameters()}


def test_without_expert_data_there_is_nothing_to_sum(pool):
    """And who is not declared is now, under its own name."""
    for held in pool.run(2, alone):
        assert held == {name: (name, {}) for name in ("gate", "up", "down")}


def both(run, experts_first):
    """Cut by expert over pairs, and each over those that have the same ones."""
    pair, other = mine_of(run, (0, 1), (2, 3)), mine_of(run, (0, 2), (1, 3))
    experts = filled()
    if experts_first:
        cut_experts(experts, pair)
        cut_hidden(experts, other)
    else:
        cut_hidden(experts, other)
        cut_experts(experts, pair)
    layout.check(experts.parameters(), run.world)
    return {name: (declared(param)[0], param.detach()) for name, param in experts.named_parameters()}


@pytest.mark.parametrize("experts_first", [True, False])
def test_hidden_channels_are_cut_as_well(pool, experts_first):
    values = weights(Layer(hidden=4))
    for rank, held in enumerate(pool.run(4, both, experts_first)):
        e, f = 6 * (rank % 2), 2 * (rank // 2)
        assert held["gate"][0] == held["up"][0] == [((12, 4, 6), (e, f, 0), (6, 2, 6))]
        assert held["down"][0] == [((12, 6, 4), (e, 0, f), (6, 6, 2))]
        assert torch.equal(held["up"][1], values["experts.up"][e : e + 6, f : f + 2])
        assert torch.equal(held["down"][1], values["experts.down"][e : e + 6, :, f : f + 2])
