"""Parameters that are used by some ranks, by none, twice, later; frozen ones, and those that are unfrozen."""

import pytest
import torch
from torch import nn

from tests.recorder import recording
from tests.shards import assembled, pieces
from tests.training import ULP
from tests.zero.versions import VERSIONS, each_stage, each_version, vectors
from zero import stage1, stage2

F64 = torch.float64


def use_one_each(run, wrap, microbatches):
    """T13, T45. Even ranks run layer 0, odd ones layer 1, in the second step the other way round; x = r + 1."""
    model, steps = vectors("3 4 5"), []
    handle = wrap(model, run.world)
    optimizer = torch.optim.SGD(handle.parameters(), lr=1, momentum=0.5, weight_decay=0.5)
    for step in range(2):
        optimizer.zero_grad()
        which, x = [(run.rank + step) % 2], torch.tensor(run.rank + 1.0, dtype=F64)
        for _ in range(microbatches - 1):
            with handle.no_sync():
                model(x, which).backward()
        model(x, which).backward()
        handle.finish()
        optimizer.step()
        handle.after_step()
        steps.append(pieces(handle))
    return steps


@pytest.mark.parametrize("microbatches", [1, 2])
@each_version
def test_a_parameter_used_by_one_rank_counts_as_zero_on_the_others(pool, wrap, microbatches):
    """The divisor is the number of ranks, not of those that used it. One that nobody uses is not even decayed."""
    first, second = (assembled(ranks) for ranks in zip(*pool.run(2, use_one_each, wrap, microbatches), strict=True))
    half, one = 0.5 * microbatches, 1.0 * microbatches
    assert [grad if grad is None else grad.unique().item() for grad in first[0].values()] == [half, one, None]
    assert [grad if grad is None else grad.unique().item() for grad in second[0].values()] == [one, half, None]
    momenta = [half + 0.5, one + 0.5]
    values = [1 - momenta[0], 1 - momenta[1]]
    assert [value.unique().item() for value in first[1].values()] == [*values, 1.0]
    momenta = [0.5 * momenta[0] + one + 0.5 * values[0], 0.5 * momenta[1] + half + 0.5 * values[1]]
    values = [values[0] - momenta[0], values[1] - momenta[1]]
    assert [value.unique().item() for value in second[1].values()] == [*values, 1.0]


def use_changes(run, wrap, uses):
    """In step s rank r uses the layers uses[s][r], with x = 10^r: what it holds after each."""
    model, steps = vectors("2 2 2 2"), []
    handle = wrap(model, run.world, average=False)
    for used in uses:
        for shard in handle.parameters():
            shard.grad = None
        model(torch.tensor(10.0**run.rank, dtype=F64), used[run.rank]).backward()
        handle.finish()
        steps.append(pieces(handle))
    return steps


@each_version
def test_what_is_used_changes_from_step_to_step(pool, wrap):
    """A bucket never gives back what an earlier step left in it."""
    uses = [((0, 1), (1,), (1, 2, 3)), ((3,), (0,), (3,)), ((0, 1, 2, 3),) * 3, ((2,), (0,), (1,))]
    for used, ranks in zip(uses, zip(*pool.run(3, use_changes, wrap, uses), strict=True), strict=True):
        for number, grad in enumerate(assembled(ranks)[0].values()):
            total = sum(10**rank for rank, layers in enumerate(used) if number in layers)
            assert (grad.tolist() if grad is not None else None) == ([total] * 2 if total else None)


class Shared(nn.Module):
    """y = W(W x) + …, and a bias that belongs to two layers, one of them unused (T16)."""

    def __init__(self):
        super().__init__()
        self.part = nn.ModuleDict({"a": nn.Linear(3, 3)})
        self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3)
        self.c.bias = self.b.bias

    def forward(self, x):
        return self.b(self.inner(x))

    def inner(self, x):
        weight, bias = self.part["a"].weight, self.part["a"].bias
        return nn.functional.linear(torch.tanh(nn.functional.linear(x, weight, bias)), weight, bias)


def shared_parameters(run, wrap, x, cotangent):
    """Gradients of a step on this rank's rows, and the elements that were reduced."""
    torch.manual_seed(run.rank)
    model = Shared().double()
    handle = wrap(model, run.world, average=False)
    x, cotangent = (part.tensor_split(run.size)[run.rank] for part in (x, cotangent))
    with recording() as recorder:
        (model(x) * cotangent).sum().backward()
        handle.finish()
    return pieces(handle), [call.elements for call in recorder.calls if call.op == "reduce_scatter_single"]


@pytest.mark.parametrize("wrap", [stage1.wrap, stage2.wrap, VERSIONS["stage 3, no layers"]])
@pytest.mark.parametrize("ranks", [2, 3])
def test_one_reduction_for_each_distinct_parameter(pool, ranks, wrap):
    torch.manual_seed(0)
    model, x, cotangent = Shared().double(), *torch.randn(2, 5, 3, dtype=F64)
    (model(x) * cotangent).sum().backward()
    held, elements = zip(*pool.run(ranks, shared_parameters, wrap, x, cotangent), strict=True)
    row = 16 + 8 + 16 + 8 + 9  # five parameters of 9 and 3, from the last to the first, each beginning with a line
    assert elements == ([-(-row // ranks) * ranks],) * ranks
    grads, _ = assembled(held)
    assert grads.pop("c.weight") is None
    for name, grad in grads.items():
        theirs = model.get_parameter(name).grad
        assert (grad - theirs).abs().max() <= 1e-12 * theirs.abs().max()


def create_graph(run, wrap):
    """A backward that keeps its own graph, and so runs hooks with gradients on."""
    model = vectors("3 4")
    handle = wrap(model, run.world, average=False)
    for _ in range(2):
        model(torch.tensor(10.0**run.rank, dtype=F64)).square().backward(create_graph=True)
    handle.finish()
    assert not any(shard.grad.requires_grad for shard in handle.parameters())
    return pieces(handle)


@each_stage
def test_gradients_of_gradients_leave_no_graph(pool, wrap):
    grads, _ = assembled(pool.run(2, create_graph, wrap))
    assert [grad.unique().item() for grad in grads.values()] == [2 * 14.0 * (1 + 100)] * 2


# -- frozen, then unfrozen (T17) ---------------------------------------------------------------------------------------


def two_layers(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double()


def two_layers_rows():
    return torch.randn(6, 5, 3, generator=torch.Generator().manual_seed(2), dtype=F64)


def thawing(model, step):
    """Layer 0 is frozen in steps 0, 1 and 4; its bias in step 2 too."""
    model[0].weight.requires_grad_(step in (2, 3, 5))
    model[0].bias.requires_grad_(step in (3, 5))


def frozen_then_unfrozen(run, wrap):
    """What this rank holds after each step, and how many parameters the optimizer keeps a state of."""
    model, seen = two_layers(run.rank + 1), []
    thawing(model, 0)
    handle = wrap(model, run.world, average=False)
    optimizer = torch.optim.SGD(handle.parameters(), lr=0.05, momentum=0.9)
    for step, x in enumerate(two_layers_rows()):
        thawing(model, step)
        optimizer.zero_grad()
        model(x.tensor_split(run.size)[run.rank]).square().sum().backward()
        handle.finish()
        optimizer.step()
        handle.after_step()
        with torch.no_grad():
            seen.append((pieces(handle), len(optimizer.state), model(x)))
    return seen


@pytest.mark.parametrize("ranks", [1, 2])
@each_version
def test_frozen_parameters_stay_and_unfrozen_ones_train(pool, wrap, ranks):
    """Frozen ones keep every bit and have no state. Nothing is to be done when they are unfrozen, or frozen again."""
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for step, on_ranks in enumerate(zip(*pool.run(ranks, frozen_then_unfrozen, wrap), strict=True)):
        thawing(model, step)
        optimizer.zero_grad()
        model(two_layers_rows()[step]).square().sum().backward()
        optimizer.step()
        held, states, outs = zip(*on_ranks, strict=True)
        _, values = assembled(held)
        assert set(states) == {len(optimizer.state)}
        for name, param in model.named_parameters():
            true, ours = param.detach().clone(), values[name]
            moved = float((true - before[name]).abs().max())
            assert (moved == 0) == (not param.requires_grad)
            assert float((ours - true).abs().max()) <= 1e-10 * moved + 4 * ULP * float(true.abs().max())
            if moved == 0 and step < 2:
                assert torch.equal(ours, before[name])
            before[name] = true
        with torch.no_grad():
            out_alone = model(two_layers_rows()[step])
        assert all(float((out - out_alone).abs().max()) <= 1e-10 * float(out_alone.abs().max()) for out in outs)


def frozen_then_one_rank(run, wrap):
    """The first parameter of a frozen model is unfrozen on all ranks and used by one: what this rank holds, twice."""
    model, steps = vectors("2 3"), []
    handle = wrap(model.requires_grad_(False), run.world)
    model[0].requires_grad_(True)
    for _ in range(2):
        for shard in handle.parameters():
            shard.grad = None
        out = model(torch.tensor(8.0, dtype=F64))
        if run.rank == 1:
            out.backward()
        handle.finish()
        handle.after_step()
        steps.append(pieces(handle))
    return steps


@pytest.mark.parametrize("ranks", [2, 4])
@each_stage
def test_what_is_unfrozen_and_used_by_one_rank_is_reduced_on_all(pool, wrap, ranks):
    for held in zip(*pool.run(ranks, frozen_then_one_rank, wrap), strict=True):
        grads, values = assembled(held)
        assert [grad if grad is None else grad.tolist() for grad in grads.values()] == [[8 / ranks] * 2, None]
        assert all(value.eq(1).all() for value in values.values())


def nothing_to_train(run, wrap):
    """A module that has no parameters, one that is frozen, one that is not used."""
    grads = []
    for model in (nn.Tanh(), nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)):
        handle = wrap(model, run.world)
        with handle.no_sync():
            model(torch.ones(1, 2))
        for _ in range(2):
            handle.finish()
            handle.after_step()
        assert handle.finite()
        grads += [shard.grad for shard in handle.parameters()]
    return grads


@pytest.mark.parametrize("ranks", [1, 2])
@each_version
def test_nothing_to_train(pool, wrap, ranks):
    """No rank made a gradient; the forward that nobody differentiates is under no_sync, which in stage 3 joins it."""
    for grads in pool.run(ranks, nothing_to_train, wrap):
        assert grads == [None] * 4
