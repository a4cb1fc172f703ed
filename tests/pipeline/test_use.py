"""What a stage may do, shapes that change, and what is refused: with one line on every rank, and nothing hangs."""

import pytest
import torch
from torch import nn

from pipeline import Pipeline, connect, schedule
from tests.pipeline import chain
from tests.pipeline.chain import check_chain, given
from tests.pool import RankFailed

WAYS = [("1f1b", 1), ("zb_h1", 1), ("interleaved", 2), ("zbv", 2)]
every_way = pytest.mark.parametrize("way", WAYS, ids=[name for name, _ in WAYS])


def inputs(*rows, seed=0):
    numbers = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 4, generator=numbers, dtype=torch.float64) for n in rows]


class Strided(nn.Module):
    """Its outputs are a transposed tensor, a column, an expanded row, the same one twice, and a list of them."""

    def __init__(self, first):
        super().__init__()
        self.linear, self.first = nn.Linear(4, 4), first

    def forward(self, x, *more):
        x = x if self.first else x.T + more[0][:, None] + more[1].sum() + more[2].T - 2 * more[3].T
        y = self.linear(x)
        return [y.T, y[:, 1], y[:1].expand(5, 4), y.T, y.T]


def strided(stages):
    return [Strided(stage == 0) for stage in range(stages)]


class Same(nn.Module):
    """An input as output, another stage's worth of nothing."""

    def forward(self, x):
        return x


def identities(stages):
    """Between two stages that do something, stages that do nothing; also behind the first one's weights."""
    return [nn.Linear(4, 4) if stage in (0, stages - 1) else Same() for stage in range(stages)]


def nothing_at_all(stages):
    return [nn.Linear(4, 4), *(Same() for _ in range(stages - 1))]


class OnlyWeights(nn.Module):
    """An output on which the input has no effect, and one that is a weight."""

    def __init__(self):
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.randn(4)), nn.Linear(4, 4)

    def forward(self, x, *more):
        return self.other(x), self.weight.exp(), self.weight


def only_weights(stages):
    return [*(OnlyWeights() for _ in range(stages - 1)), Adds()]


class Adds(nn.Module):
    def forward(self, x, *more):
        return x + sum(more)


class HandsOn(nn.Module):
    """A weight that is used here and by the stages behind: the first stage's entry returns it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x, weight=1.0):
        return x * self.weight * weight, self.weight


def handing_on(stages):
    return [HandsOn() for _ in range(stages)]


class InPlace(nn.Module):
    """Changes what it has made itself, in place, as the last thing before it is sent."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).mul_(0.5).relu_()


def in_place(stages):
    return [InPlace() for _ in range(stages)]


class Counts(nn.Module):
    """Returns a buffer, which it changes in its next forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, *more):
        self.count += 1
        return self.linear(x) * (more[0] if more else 1), self.count


def counting(stages):
    return [Counts() for _ in range(stages)]


@every_way
@pytest.mark.parametrize("make", [strided, identities, nothing_at_all, only_weights, handing_on, in_place, counting])
def test_what_a_stage_may_return(pool, way, make):
    check_chain(pool, 3, way, make, [inputs(5, 5, 5, 5), inputs(5, 5, 5, 5, seed=1)])


class First(nn.Module):
    """Changes what it is given in place."""

    def __init__(self, stage):
        super().__init__()
        self.relu, self.linear = nn.ReLU(inplace=stage > 0), nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(self.relu(x))


def in_place_first(stages):
    return list(map(First, range(stages)))


@pytest.mark.parametrize("way", [("1f1b", 1), ("zbv", 2)])
def test_a_stage_that_changes_its_input_in_place_is_told(pool, way):
    """By autograd, on the rank: what it received is a leaf."""
    with pytest.raises(RankFailed, match="in-place operation"):
        check_chain(pool, 2, way, in_place_first, [inputs(2, 2)])


class Answers(nn.Module):
    """No tensor."""

    def forward(self, x):
        return {"x": x}


def dictionaries(stages):
    return [Answers() for _ in range(stages)]


def several_numbers(output, target):
    return output.sum(1)


def test_a_loss_that_is_no_scalar_is_told(pool):
    with pytest.raises(RankFailed, match=r"the loss of microbatch 0 has the shape \[2\]: return a scalar"):
        check_chain(pool, 2, ("1f1b", 1), linears, [inputs(2, 2)], loss=several_numbers)


def test_what_is_no_tensor_is_told(pool):
    with pytest.raises(RankFailed, match="stage 0 returned a dict: return a tensor, or a tuple of tensors"):
        check_chain(pool, 2, ("1f1b", 1), dictionaries, [inputs(2, 2)])


# -- shapes ------------------------------------------------------------------------------------------------------------


def linears(stages):
    return [nn.Linear(4, 4) for _ in range(stages)]


@every_way
def test_shapes_that_change_back_and_forth(pool, way):
    sizes = [(2, 2, 2), (3, 0, 1), (2, 2, 2), (1, 3, 0), (3, 0, 1), (1, 1, 1)]
    steps = [inputs(*rows, seed=seed) for seed, rows in enumerate(sizes)]
    check_chain(pool, 3, way, linears, steps)


class Picks(nn.Module):
    """How many rows it returns depends on their values."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        return y[y[:, 0] > 0]


def picking(stages):
    return [Picks() for _ in range(stages)]


@every_way
def test_shapes_that_depend_on_data(pool, way):
    steps = [inputs(9, 9, 9, seed=seed) for seed in range(4)]
    check_chain(pool, 2, way, picking, steps, varies=True)


def test_shapes_that_depend_on_data_are_told(pool):
    steps = [inputs(9, 9, 9, seed=seed) for seed in range(4)]
    with pytest.raises(RankFailed, match="for inputs of the same shapes: use varies=True"):
        check_chain(pool, 2, ("1f1b", 1), picking, steps)


def under_autocast(run):
    """Losses of steps of which every other one is under autocast, so that bfloat16 crosses in it."""
    pipe, found = chain.pipeline(run, schedule("1f1b", run.size, 2), linears), []
    for stage in pipe.stages.values():
        stage.float()
    for on in (False, True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            found.append(pipe.step(given([x.float() for x in inputs(2, 2)])))
    return found


def test_autocast_on_and_off(pool):
    modules, expected = [module.float() for module in chain.made(linears, 2)], []
    for on in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            outputs = [modules[1](modules[0](x.float())) for x in inputs(2, 2)]
        expected.append([float(chain.total(y, m).detach()) for m, y in enumerate(outputs)])
    _, found = pool.run(2, under_autocast)
    assert [list(map(float, losses)) for losses in found] == 2 * [pytest.approx(each, rel=1e-6) for each in expected]
    assert expected[0] != expected[1]


# -- refusals ----------------------------------------------------------------------------------------------------------


def refused(run, mistake):
    """What this rank is told of a mistake that one of the ranks makes; and a step afterwards."""
    plan = schedule("1f1b", run.size, 3)
    last = run.rank == run.size - 1
    links = connect(plan, [range(run.size)], run.new_group)
    stages = {run.rank: nn.Linear(4, 4).double()}
    settings = {"links": links, "loss": chain.total}
    settings |= {"no loss": {"loss": None}, "settings": {"varies": last}}.get(mistake, {})
    settings |= {"links": {"links": {}}, "word": {"open": "stpe"}}.get(mistake, {}) if last else {}
    if mistake == "another plan":
        plan = schedule("1f1b", run.size, 3 + last)
    if mistake == "another order":
        plan = schedule("gpipe" if last else "1f1b", run.size, 3)
    if mistake == "plan of more ranks":
        plan = schedule("1f1b", run.size + 1, 3)
    if mistake == "wrong stage":
        stages = {run.rank - last: nn.Linear(4, 4)}
    try:
        pipe = Pipeline(plan, stages, group=run.world, **settings)
        microbatches = given(inputs(2, 2, 2))
        if mistake == "microbatches" and last:
            microbatches = microbatches[1:]
        if mistake == "no args" and run.rank == 0:
            microbatches[1].args = ()
        if mistake == "no tuple" and run.rank == 0:
            [microbatches[1].args] = microbatches[1].args
        if mistake == "evaluated microbatches":
            pipe.evaluate(microbatches[last:])
        with torch.set_grad_enabled(mistake != "no gradients" or not last):
            pipe.step(microbatches)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        ("microbatches", "1f1b has 3 microbatches, 2 were given: give as many, or make another plan"),
        ("no args", "microbatch 1 has no args, and a first stage is here"),
        ("evaluated microbatches", "give the same number on every rank"),
        ("another plan", "the ranks have different plans"),
        ("another order", "the ranks have different plans"),
        ("settings", "the ranks have different plans or settings"),
        ("word", "open='stpe': use"),
        ("links", "links have no group for the "),
        ("no tuple", "microbatch 1 has args or kwargs that are none"),
        ("no gradients", "gradients are off"),
        ("plan of more ranks", "the group has"),
        ("wrong stage", "given stages"),
        ("no loss", "there is no loss, and a last stage is here: give loss="),
    ],
)
def test_a_mistake_of_one_rank_is_told_to_all(pool, ranks, mistake, told):
    lines = pool.run(ranks, refused, mistake)
    assert all(line is not None and told in line and "\n" not in line for line in lines)
    assert len(set(lines)) == 1
    assert pool.run(ranks, refused, "none") == [None] * ranks


def without_backward(run):
    """Forward of one microbatch on every rank's own, by a plan that trains nobody."""
    pipe = chain.pipeline(run, schedule("gpipe", run.size, 2), linears)
    return [float(loss) for loss in pipe.evaluate(given(inputs(1, 2, 3)))], pipe.evaluate([])


def test_any_number_of_microbatches_is_evaluated(pool):
    modules = chain.made(linears, 2)
    expected = [float(chain.total(nn.Sequential(*modules)(x), m).detach()) for m, x in enumerate(inputs(1, 2, 3))]
    assert pool.run(2, without_backward) == [([], []), (pytest.approx(expected, rel=1e-12), [])]
