"""Which collectives a step makes, in which order, when they start, and what they send."""

import functools

import pytest
import torch
from torch import nn

from collectives import comm, demo
from ddp import bucketed, naive, overlapped
from tests.ddp.versions import each_version, recording

MB = 1 << 20
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
PLAIN = {"naive": naive.wrap, "bucketed": bucketed.wrap, "overlapped": overlapped.wrap}


class Chain(nn.Module):
    """Scalars passed through layers of 1, 2, 3 and 4 weights, in any order; marks where backward has got to."""

    def __init__(self, sizes=(1, 2, 3, 4), dtypes=(F64,) * 4):
        super().__init__()
        self.layers = nn.ParameterList(
            nn.Parameter(torch.linspace(0.5, 0.9, size).to(dtype)) for size, dtype in zip(sizes, dtypes, strict=True)
        )

    def forward(self, x, order, marks):
        for i in order:
            x = torch.tanh(x * self.layers[i].double().sum())
            # The gradient arrives here after that of all later layers, and before that of this one.
            x.register_hook(lambda dout, i=i: marks.append(f"back in {i}"))
        return x


def steps_of(run, wrap, make, orders, quiet=0):
    """What happens in each of two steps, in which rank r runs its layers in orders[r], the first `quiet` microbatches
    of two under no_sync: marks, and the elements of the collectives.
    """
    model = make()
    handle, steps = wrap(model, run.world, average=False), []
    for _ in range(2):
        model.zero_grad()
        with recording() as events:
            for micro in range(1 + quiet):
                marks = events if micro == quiet else []
                x = torch.tensor(0.1 * (run.rank + 1), dtype=F64, requires_grad=True)
                loss = model(x, orders[run.rank], marks)
                if micro < quiet:
                    with handle.no_sync():
                        loss.backward()
                    events.append("microbatch")
                else:
                    loss.backward()
            events.append("finish")
            handle.finish()
        steps.append([event if isinstance(event, str) else event[1] for event in events])
    return steps, [param.grad.clone() if param.grad is not None else None for param in model.layers]


def picture(text):
    """A schedule as it is typed: numbers are collectives of this many elements, `1+8` of 1 and 8 notes, `b3` is
    backward reaching layer 3.
    """
    words = [f"back in {word[1:]}" if word.startswith("b") else word for word in text.split()]
    return [sum(map(int, word.split("+"))) if word[0].isdigit() else word for word in words]


# Four layers of 8, 16, 24 and 32 bytes; backward reaches the last first. The naive version agrees on 4 numbers, one a
# parameter; the others' last bucket has 2 notes a parameter.
SCHEDULES = {
    ("naive", None): "b3 b2 b1 b0 finish 4 1 2 3 4",
    ("bucketed", 1): "b3 b2 b1 b0 finish 4 3 2 1+8",
    ("bucketed", 16): "b3 b2 b1 b0 finish 4 3 2 1+8",
    ("bucketed", 24): "b3 b2 b1 b0 finish 4 3 3+8",
    ("bucketed", MB): "b3 b2 b1 b0 finish 10+8",
    ("overlapped", 1): "b3 4 b2 3 b1 2 b0 finish 1+8",
    ("overlapped", 16): "b3 4 b2 3 b1 2 b0 finish 1+8",
    ("overlapped", 24): "b3 4 b2 3 b1 b0 finish 3+8",
    ("overlapped", 56): "b3 b2 7 b1 b0 finish 3+8",
    ("overlapped", MB): "b3 b2 b1 b0 finish 10+8",
}


def capped(version, cap):
    return PLAIN[version] if cap is None else functools.partial(PLAIN[version], cap=cap)


@pytest.mark.parametrize(("version", "cap"), SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 3])
def test_launches(pool, ranks, version, cap):
    """bucketed starts in finish; overlapped as soon as a bucket is complete, the first long before backward ends, the
    last in finish.
    """
    orders = [(0, 1, 2, 3)] * ranks
    for steps, _ in pool.run(ranks, steps_of, capped(version, cap), Chain, orders):
        assert steps == [picture(SCHEDULES[version, cap])] * 2


@pytest.mark.parametrize(("version", "cap"), [("bucketed", 1), ("overlapped", 1), ("overlapped", MB)])
def test_nothing_starts_under_no_sync(pool, version, cap):
    """The last microbatch has the schedule of a step by itself."""
    orders = [(0, 1, 2, 3)] * 2
    for steps, _ in pool.run(2, steps_of, capped(version, cap), Chain, orders, 2):
        assert steps == [picture("microbatch microbatch " + SCHEDULES[version, cap])] * 2


mixed = functools.partial(Chain, (1, 3, 1000, 7), (F32, F32, BF16, F32))
MIXED = {1: "7 1000 3 1+8", 16: "7 1000 4+8", MB: "1000 11+8"}


@pytest.mark.parametrize("cap", MIXED)
@pytest.mark.parametrize("version", ["bucketed", "overlapped"])
def test_launches_of_several_dtypes(pool, version, cap):
    """T22: a bucket has one dtype, and its place in the order is that of its last member."""
    orders = [(0, 1, 2, 3)] * 2
    expected = pool.run(2, steps_of, naive.wrap, mixed, orders)[0][1]
    for steps, grads in pool.run(2, steps_of, capped(version, cap), mixed, orders):
        assert all(map(torch.equal, grads, expected))
        for step in steps:
            collectives = [event for event in step if not isinstance(event, str)]
            assert collectives == picture(MIXED[cap])


def test_every_rank_starts_in_the_same_order_whatever_its_backward_reaches_first(pool):
    """A bucket that is complete early waits for those before it; what a rank never uses, finish starts."""
    orders = [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1), (1, 3)]
    expected = [
        "b3 4 b2 3 b1 2 b0 finish 1+8",
        "b0 b1 b2 b3 4 3 2 finish 1+8",
        "b1 b3 4 b0 b2 3 2 finish 1+8",
        "b3 4 b1 finish 3 2 1+8",
    ]
    results = pool.run(4, steps_of, functools.partial(overlapped.wrap, cap=1), Chain, orders)
    true = pool.run(4, steps_of, naive.wrap, Chain, orders)
    for (steps, grads), text, (_, theirs) in zip(results, expected, true, strict=True):
        assert steps == [picture(text)] * 2
        assert all(map(torch.equal, grads, theirs))


def test_the_same_bits_whatever_the_order(pool):
    """Each rank uses its layers in another order, some not at all, in buckets of one, two and all layers."""
    orders = [(0, 1, 2, 3), (3, 1), (2, 0, 3)]
    true = pool.run(3, steps_of, naive.wrap, Chain, orders)
    for version, cap in SCHEDULES:
        for (_, grads), (_, theirs) in zip(
            pool.run(3, steps_of, capped(version, cap), Chain, orders), true, strict=True
        ):
            assert all(map(torch.equal, grads, theirs)), (version, cap)


def first_step(run, used):
    """The launches and the gradients of a first step, in which rank r uses the layers used[r]."""
    model = Chain()
    handle = overlapped.wrap(model, run.world, cap=1)
    with recording() as events:
        model(torch.tensor(0.5, dtype=F64), used[run.rank], []).backward()
        events.append("finish")
        handle.finish()
    return [event if isinstance(event, str) else event[1] for event in events], [
        None if param.grad is None else param.grad.clone() for param in model.layers
    ]


def test_the_first_step_with_an_unused_parameter_is_right(pool):
    """No rank waits for a bucket that another cannot fill, and none has yet seen what is used."""
    (first, grads), (second, theirs) = pool.run(2, first_step, [(0, 1, 2), (0, 1)])
    assert first == picture("finish 4 3 2 1+8")
    assert second == picture("finish 4 3 2 1+8")
    assert grads[3] is None and theirs[3] is None
    assert all(torch.equal(a, b) for a, b in zip(grads[:3], theirs[:3], strict=True))


# -- bytes -------------------------------------------------------------------------------------------------------------


def big():
    return nn.Sequential(nn.Linear(300, 400), nn.BatchNorm1d(400), nn.Linear(400, 201, bias=False)).double()


def traffic_of(run, wrap, members):
    """((calls, bytes) of wrap, of a step, bytes of no step at all), on the members of a group."""
    group = run.new_group(members)
    if group is None:
        return None
    model, x = big(), torch.ones(4, 300, dtype=torch.float64)
    comm.barrier(group=group)
    before = demo.bytes_written()
    with recording() as wrapping:
        handle = wrap(model, group)
    wrapped = demo.bytes_since(before)
    comm.barrier(group=group)
    before = demo.bytes_written()
    with recording() as stepping:
        model(x).sum().backward()
        handle.finish()
    stepped = demo.bytes_since(before)
    before = demo.bytes_written()
    with handle.no_sync():
        model(x).sum().backward()
    handle.after_step()
    handle.unshard(model)
    handle.reshard(model)
    handle.reduce(model)
    return (wrapping, wrapped), (stepping, stepped), demo.bytes_since(before)


SIZES = [120_000, 400, 400, 400, 80_400]  # of the parameters, in the order of the module
BUFFERS = 2 * 400 * 8 + 8  # bytes
NOTES = 2 * 5  # in the last bucket
STEP = {  # the elements of a step's all_reduces; the last is on the size of the buffers
    "naive": [5, *SIZES, 2],
    "bucketed": [sum(SIZES) + NOTES, 2],
    "1 byte": [*reversed(SIZES[1:]), SIZES[0] + NOTES, 2],
}


@pytest.mark.parametrize(("ranks", "members"), [(2, [0, 1]), (3, [0, 1, 2]), (4, [0, 1, 2, 3]), (4, [1, 3])])
@pytest.mark.parametrize("version", ["naive", "bucketed", "overlapped", "1 byte"])
def test_traffic(pool, version, ranks, members):
    """wrap: one broadcast a tensor, as bytes. A step: the gradients, once, what the ranks agree on, and all buffers in
    one broadcast.
    """
    size, n = len(members), 8 * sum(SIZES)
    wrap = PLAIN.get(version) or functools.partial(overlapped.wrap, cap=1)
    results = [result for result in pool.run(ranks, traffic_of, wrap, members) if result is not None]
    assert len(results) == size
    tensors = [8 * numel for numel in (*SIZES, 400, 400, 1)]
    for (wrapping, _), (stepping, _), nothing in results:
        assert wrapping == [("broadcast", nbytes) for nbytes in tensors]
        reductions = STEP["bucketed" if version == "overlapped" else version]
        assert stepping == [*(("all_reduce", numel) for numel in reductions), ("broadcast", BUFFERS)]
        assert nothing == 0
    for _, (stepping, sent), _ in results:
        expected = 2 * n * (size - 1) / size
        allowed = 0.01 * expected + 4096 * len(stepping)
        assert expected - allowed <= sent <= expected + allowed + BUFFERS * (size - 1)
    whole = n + BUFFERS
    total = sum(wrapped for (_, wrapped), *_ in results)  # who sends how much of a broadcast depends on the tree
    assert abs(total - whole * (size - 1)) <= 0.01 * whole * (size - 1) + 4096 * (len(tensors) + 1) * size


@pytest.mark.parametrize(("ranks", "member"), [(1, 0), (4, 2)])
@each_version
def test_a_group_of_one_rank_sends_nothing(pool, wrap, ranks, member):
    (_, wrapped), (_, stepped), nothing = pool.run(ranks, traffic_of, wrap, [member])[member]
    assert wrapped == stepped == nothing == 0
