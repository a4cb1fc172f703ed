"""The exchange by itself, and in the layer: values and gradients, the order of launches, a backward in halves."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from collectives.watch import watching
from expert_parallel.exchange import Exchange
from pipeline.backward import Root, backward_input
from tests import passthrough
from tests.expert_parallel.cases import Case, distributed, outcome, part, sequences, worst
from tests.expert_parallel.reference import Layer
from tests.recorder import Recorder, recording

MATRICES = {  # rows that rank r gives to rank p
    "uneven": lambda r, p: (3 * r + 2 * p) % 5,
    "even": lambda r, p: 2,
    "nothing to the next": lambda r, p: 0 if p == r + 1 else 1 + r,
    "all to the last": lambda r, p: (4 + r) * (p == 2),
    "only the first gives": lambda r, p: (1 + p) * (r == 0),
    "everyone keeps its own": lambda r, p: 3 * (r == p),
    "nothing at all": lambda r, p: 0,
}


def rows(rank, peer, count):
    """Each names whence it comes, whither it goes, and its number."""
    return torch.tensor([[float(rank), float(peer), float(i)] for i in range(count)]).view(count, 3)


def exchanged(run, name):
    """(what came, the gradient of what was given); the gradient of a row is the row, times its new place."""
    ranks, counts = range(run.size), MATRICES[name]
    gives, takes = [counts(run.rank, p) for p in ranks], [counts(p, run.rank) for p in ranks]
    x = torch.cat([rows(run.rank, p, gives[p]) for p in ranks]).requires_grad_()
    y = Exchange(x, gives, takes, group=run.world).wait()
    y.backward(y.detach() * torch.arange(1.0, 1 + len(y))[:, None])
    return y.detach(), x.grad


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("bare", [False, True])
def test_rows_travel_and_their_gradients_return(pool, ranks, name, bare):
    """To the bit. bare: over torch.distributed's own calls."""
    counts, job = MATRICES[name], ((passthrough.run, exchanged) if bare else (exchanged,))
    for rank, (y, dx) in enumerate(pool.run(ranks, *job, name)):
        came = [rows(p, rank, counts(p, rank)) for p in range(ranks)]
        assert torch.equal(y, torch.cat(came))
        back = []
        for p in range(ranks):
            before = sum(counts(r, p) for r in range(rank))
            places = torch.arange(before + 1.0, before + 1 + counts(rank, p))
            back.append(rows(rank, p, counts(rank, p)) * places[:, None])
        assert torch.equal(dx, torch.cat(back))


def without_gradients(run):
    x = torch.full((2 * run.size, 3), float(run.rank))
    with torch.no_grad():
        y = Exchange(x, [2] * run.size, [2] * run.size, group=run.world).wait()
    leaf = Exchange(x, [2] * run.size, [2] * run.size, group=run.world).wait()
    return y.requires_grad, leaf.requires_grad, torch.equal(y, leaf), y[:, 0].int().tolist()


def test_without_gradients(pool):
    """Where they are off nothing requires one. Else rows from elsewhere may, whatever this rank's own do."""
    assert pool.run(3, without_gradients) == [(False, True, True, [0, 0, 1, 1, 2, 2])] * 3


def gradient_with_gaps(run):
    """Of rows that somebody expanded, or turned."""
    x = torch.ones(4, 3, requires_grad=True)
    Exchange(x, [2, 2], [2, 2], group=run.world).wait().sum().backward()
    z = torch.arange(12.0).view(3, 4).t().requires_grad_()
    (Exchange(z, [2, 2], [2, 2], group=run.world).wait().t() * torch.arange(4.0)).sum().backward()
    return x.grad.tolist(), z.grad.tolist()


def test_what_is_not_contiguous(pool):
    for rank, (dx, dz) in enumerate(pool.run(2, gradient_with_gaps)):
        assert dx == [[1.0] * 3] * 4
        assert dz == [[2.0 * rank + i] * 3 for _ in range(2) for i in range(2)]


def second_derivative(run):
    x = torch.ones(4, 3, requires_grad=True)
    [dx] = torch.autograd.grad(Exchange(x, [2, 2], [2, 2], group=run.world).wait().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_a_second_derivative_is_refused(pool):
    pool.run(2, second_derivative)


# -- in the layer ------------------------------------------------------------------------------------------------------

CASE = Case(Layer(shared=3, capacity=1.0), 2, 2)


class Story(Recorder):
    """Rows that start to travel, and that are waited for."""

    def begins(self, call):
        if call.op == "all_to_all_single":
            self.calls.append("start")

    def waits(self, call):
        if call.op == "all_to_all_single":
            self.calls.append("wait")


class _Mark(torch.autograd.Function):
    """x; the story says when it is passed, in both directions."""

    @staticmethod
    def forward(ctx, x, story, word, word_back):
        ctx.story, ctx.word = story, word_back
        story.calls.append(word)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        ctx.story.calls.append(ctx.word)
        return dx, None, None, None


class Marked(nn.Module):
    """A module between two marks."""

    def __init__(self, module, story, name):
        super().__init__()
        self.module, self.story, self.name = module, story, name

    def forward(self, x, *more):
        x = _Mark.apply(x, self.story, f"<{self.name}", f"d{self.name}>")
        return _Mark.apply(self.module(x, *more), self.story, f"{self.name}>", f"<d{self.name}")


def told(run, case):
    """(of forward, of backward)"""
    moe, story = distributed(run, case), Story()
    moe.shared, moe.experts = Marked(moe.shared, story, "shared"), Marked(moe.experts, story, "experts")
    [mine] = case.rows(run.rank)
    x, dout = (part(tensor, mine, case.mine(run.rank), 0.0) for tensor in case.tensors())
    with watching(story):
        y = moe(x.requires_grad_(), sequences(case, run.rank, mine))
        story.calls.append("|")
        y.backward(dout)
    return " ".join(story.calls)


FORWARD = "start <shared shared> wait <experts experts> start wait"
BACKWARD = "start wait <dexperts dexperts> start <dshared dshared> wait"


def waited_at_once(run, case):
    """As a plain all_to_all, in front of the shared expert."""
    true_start, true_wait = Exchange.__init__, Exchange.wait

    def start(exchange, *args, **kwargs):
        true_start(exchange, *args, **kwargs)
        exchange.came = true_wait(exchange)

    with mock.patch.multiple(Exchange, __init__=start, wait=lambda exchange: exchange.came):
        return told(run, case)


def test_without_overlap_the_story_is_another(pool):
    [story, _] = pool.run(2, waited_at_once, CASE)
    assert story == (
        "start wait <shared shared> <experts experts> start wait | "
        "start wait <dexperts dexperts> <dshared dshared> start wait"
    )


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_shared_expert_computes_while_rows_travel(pool, ranks):
    """Forward: the dispatch starts before it and is waited for after it. Backward: so does what returns from there."""
    stories = pool.run(ranks, told, replace(CASE, ranks=ranks, ep=ranks))
    assert stories == [f"{FORWARD} | {BACKWARD}"] * ranks


def test_on_one_rank_nothing_travels(pool):
    [story] = pool.run(1, told, replace(CASE, ranks=1, ep=1))
    assert "start" not in story and "wait" not in story


def calls_of_a_step(run, case):
    """The collectives of forward and of backward: (op, ranks of the group), in order."""
    with recording() as recorder:
        moe = distributed(run, case)
        [mine] = case.rows(run.rank)
        x, dout = (part(t, mine, case.mine(run.rank), 0.0) for t in case.tensors())
        y = moe(x.requires_grad_(), sequences(case, run.rank, mine))
        recorder.calls.append("|")
        y.backward(dout)
    return " ".join(call if isinstance(call, str) else f"{call.op}{call.ranks}" for call in recorder.calls)


def test_the_sequence_of_a_step(pool):
    """Choices over those that share a row; counts, rows there, rows back over those that share the experts."""
    for rank, story in enumerate(pool.run(4, calls_of_a_step, Case(Layer(capacity=1.0), 4, 4, 2))):
        row = (0, 1) if rank < 2 else (2, 3)
        there = "all_to_all_single(0, 1, 2, 3)"
        counts = "all_gather_single(0, 1, 2, 3)"
        assert story == f"all_gather_single{row} {counts} {there} {there} | {there} {there}"


def under_anomaly_mode(run, case):
    with torch.autograd.detect_anomaly():
        return outcome(run, case)


@pytest.mark.filterwarnings("ignore:Anomaly")
@pytest.mark.parametrize("ranks", [2, 3])
def test_anomaly_mode(pool, ranks):
    """Which looks at every gradient on its way, the ones that have not arrived as well."""
    case = replace(CASE, ranks=ranks, ep=ranks)
    assert worst(case, pool.run(ranks, under_anomaly_mode, case)) <= 1


# -- backward in halves ------------------------------------------------------------------------------------------------


def in_halves(run, case, how):
    """(of each half how often rows were sent, whether the bits are those of a backward in one)"""
    moe = distributed(run, case)
    [mine] = case.rows(run.rank)
    where = sequences(case, run.rank, mine)
    x, dout = (part(tensor, mine, case.mine(run.rank), 0.0) for tensor in case.tensors())
    params = list(moe.parameters())
    expected = torch.autograd.grad(moe(x.requires_grad_(), where), [x, *params], dout)
    y = moe(x, where)
    with recording() as first:
        got, rest = how(y, dout, x)
    with recording() as second:
        got = [got, *rest(params)]
    sent = tuple([call.op for call in recorder.calls].count("all_to_all_single") for recorder in (first, second))
    return sent, all(map(torch.equal, got, expected))


def by_borders(y, dout, x):
    """As a pipeline does it."""
    [dx], left = backward_input([Root(get_gradient_edge(y), dout)], [x])

    def rest(params):
        left.run()
        return [param.grad for param in params]

    return dx, rest


def by_grad(y, dout, x):
    """Twice through the graph: what both halves need is sent in both, and no more."""
    [dx] = torch.autograd.grad(y, x, dout, retain_graph=True)
    return dx, lambda params: torch.autograd.grad(y, params, dout)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("how", "sent"), [(by_borders, (2, 0)), (by_grad, (2, 1))])
@pytest.mark.parametrize("layer", [Layer(), CASE.layer, Layer(balance=0.0, z=0.0, choices=3)])
def test_in_halves_rows_are_sent_once(pool, layer, how, sent, ranks):
    """By a pipeline's halves everything travels in the first. The bits are the same."""
    for result in pool.run(ranks, in_halves, Case(layer, ranks, ranks), how):
        assert result == (sent, True)


# -- who has nothing to send -------------------------------------------------------------------------------------------


def first_layer(run, case):
    """On rank 0 the input needs no gradient, as an empty batch's may not: the calls of backward."""
    moe = distributed(run, case)
    [mine] = case.rows(run.rank)
    x, dout = (part(tensor, mine, case.mine(run.rank), 0.0) for tensor in case.tensors())
    x.requires_grad_(run.rank > 0)
    y = moe(x, sequences(case, run.rank, mine))
    with recording() as recorder:
        y.backward(dout)
    return [call.op for call in recorder.calls], bool(moe.experts.up.grad.abs().sum() > 0)


def test_an_input_without_gradient_hangs_nobody(pool):
    """Its rank makes the same calls as the others."""
    assert pool.run(3, first_layer, Case(Layer(), 3, 3)) == [(["all_to_all_single"] * 2, True)] * 3


def evaluated(run, case):
    moe = distributed(run, case).eval()
    [mine] = case.rows(run.rank)
    x = part(case.tensors()[0], mine, case.mine(run.rank), 0.0)
    with torch.no_grad():
        y = moe(x, sequences(case, run.rank, mine))
    return torch.equal(y, moe(x, sequences(case, run.rank, mine)).detach()), y.requires_grad


def test_without_autograd(pool):
    assert pool.run(3, evaluated, Case(Layer(shared=3), 3, 3)) == [(True, False)] * 3
