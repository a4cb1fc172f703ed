"""Naive data parallelism against one plain process with the whole batch, in float64; its traffic; its traps."""

import contextlib
from unittest import mock

import pytest
import torch
from torch import nn

from collectives import comm, demo, layout
from collectives.p2p import Handle
from ddp import naive

ULP = torch.finfo(torch.float64).eps
STEPS, WIDTH, IDS = 3, 6, 7
COLLECTIVES = ("all_reduce", "reduce_scatter_single", "all_gather_single", "all_to_all_single", "broadcast", "reduce")


class Net(nn.Module):
    """An embedding, a matrix used twice, a weight that lies transposed in memory, a scalar, and one nobody uses."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(IDS, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.turned = nn.Parameter(torch.randn(WIDTH, 5).t())
        self.scale = nn.Parameter(torch.rand(()) + 1)
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, ids):
        x = self.embed(ids)  # [B, D]
        x = self.twice(torch.tanh(self.twice(self.norm(x))))
        return torch.tanh(self.scale * x) @ self.turned.t()  # [B, 5]


def net(seed):
    torch.manual_seed(seed)
    return Net().double()


def data(rows, step):
    """Ids and a fixed random cotangent for the rows of a global batch."""
    numbers = torch.Generator().manual_seed(step)
    ids = torch.randint(IDS, (rows,), generator=numbers)
    return ids, torch.randn(rows, 5, generator=numbers, dtype=torch.float64)


def sgd(params):
    return torch.optim.SGD(params, lr=0.3, momentum=0.9)


def snapshot(model):
    """(gradients, values) of a model by name; a gradient may be None."""
    params = dict(model.named_parameters())
    grads = {name: None if param.grad is None else param.grad.clone() for name, param in params.items()}
    return grads, {name: param.detach().clone() for name, param in params.items()}


def plain(rows, seed=0):
    """What one process does with whole batches: [(gradients before the update, values after it)] of each step."""
    model = net(seed)
    optimizer, done = sgd(model.parameters()), []
    for step in range(STEPS):
        ids, cotangent = data(rows, step)
        optimizer.zero_grad()
        ((model(ids) * cotangent).sum() / rows).backward()
        grads, _ = snapshot(model)
        optimizer.step()
        done.append((grads, snapshot(model)[1]))
    return done


def train(run, shares, average, microbatches, change):
    """The same steps on rows dealt out in these shares: (values after wrap, [(gradients, values)]) of this rank.

    A rank's loss is its part of the batch's mean, times the ranks if they average. change: what the steps run under.
    """
    model = net(run.rank)
    handle = naive.wrap(model, run.world, average=average)
    initial = snapshot(model)[1]
    optimizer, done = sgd(handle.parameters()), []
    rows = sum(shares)
    scale = (run.size if average else 1) / rows
    with change():
        for step in range(STEPS):
            mine = [part.split(shares)[run.rank] for part in data(rows, step)]
            optimizer.zero_grad()
            parts = list(zip(*(part.tensor_split(microbatches) for part in mine), strict=True))
            for number, (ids, cotangent) in enumerate(parts, start=1):
                with contextlib.nullcontext() if number == microbatches else handle.no_sync():
                    if len(ids):
                        ((model(ids) * cotangent).sum() * scale).backward()
            handle.finish()
            grads, _ = snapshot(model)
            optimizer.step()
            handle.after_step()
            done.append((grads, snapshot(model)[1]))
    return initial, done


def worst(ours, expected, initial):
    """The largest error of a gradient and of an update, as a share of what is allowed."""
    share, before = 0.0, initial
    for (grads, values), (expected_grads, expected_values) in zip(ours, expected, strict=True):
        largest = max(float(grad.abs().max()) for grad in expected_grads.values() if grad is not None)
        for name, grad in expected_grads.items():
            if grad is None:
                assert grads[name] is None and torch.equal(values[name], initial[name])
                continue
            mine = torch.zeros_like(grad) if grads[name] is None else grads[name]
            share = max(share, float((mine - grad).abs().max()) / (1e-12 * float(grad.abs().max()) + 1e-14 * largest))
            moved, size = (float(x.abs().max()) for x in (expected_values[name] - before[name], expected_values[name]))
            assert moved > 1e-4 * size, f"{name} moves too little to judge its update"
            error = float((values[name] - expected_values[name]).abs().max())
            share = max(share, error / (1e-10 * moved + 4 * ULP * size))
        before = expected_values
    return share


SHARES = {1: [7], 2: [5, 2], 3: [4, 0, 3], 4: [1, 5, 0, 3]}


def judged(pool, ranks, average, microbatches=1, change=contextlib.nullcontext):
    """(worst error of any rank, what each rank did); all must have started from rank 0's weights."""
    results = pool.run(ranks, train, SHARES[ranks], average, microbatches, change)
    start, expected = snapshot(net(0))[1], plain(sum(SHARES[ranks]))
    for initial, _ in results:
        assert all(torch.equal(initial[name], value) for name, value in start.items())
    return max(worst(done, expected, start) for _, done in results), [done for _, done in results]


def same_bits(replicas):
    return all(
        torch.equal(mine[name], first[name])
        for replica in replicas
        for (_, mine), (_, first) in zip(replica, replicas[0], strict=True)
        for name in first
    )


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_gradients_and_updates_are_those_of_one_process(pool, ranks, average):
    error, replicas = judged(pool, ranks, average)
    assert error <= 1
    assert same_bits(replicas)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_accumulation(pool, ranks, average):
    """Four microbatches a step; with so few rows some of them are empty."""
    assert judged(pool, ranks, average, microbatches=4)[0] <= 1


def reduce_random(run, average):
    """(this rank's own gradient, the reduced one) of a float32 vector."""
    weight = nn.Parameter(torch.ones(1000))
    handle = naive.wrap(nn.ParameterList([weight]), run.world, average=average)
    weight.grad = torch.randn(1000, generator=torch.Generator().manual_seed(run.rank))
    own = weight.grad.clone()
    handle.finish()
    return own, weight.grad


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_element_is_added_in_rank_order(pool, ranks, average):
    """So no other way to pack gradients into buffers may change a bit."""
    results = pool.run(ranks, reduce_random, average)
    total = torch.zeros(1000)
    for own, _ in results:
        total += own
    for _, reduced in results:
        assert torch.equal(reduced, total / ranks if average else total)


# -- mutations: the parity above must notice ---------------------------------------------------------------------------


def without_reduction():
    return mock.patch.object(comm, "all_reduce", lambda *args, **more: Handle([]))


def without_sum():
    """The ranks agree on what is used, but every gradient stays what it was."""
    true = comm.all_reduce
    return mock.patch.object(
        comm, "all_reduce", lambda x, op, **more: true(x, op, **more) if op == comm.MAX else Handle([])
    )


def mean_for_sum():
    return mock.patch.object(comm, "SUM", comm.AVG)


def sum_for_mean():
    return mock.patch.object(comm, "AVG", comm.SUM)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("change", "average"),
    [
        (without_reduction, False),
        (without_sum, False),
        (without_sum, True),
        (mean_for_sum, False),
        (sum_for_mean, True),
    ],
)
def test_parity_sees_a_wrong_reduction(pool, ranks, change, average):
    assert judged(pool, ranks, average, change=change)[0] > 1e9


# -- no_sync (T15) -----------------------------------------------------------------------------------------------------


def accumulate(run, covers):
    """Four microbatches, no_sync around forward, backward or both of all but the last: (gradient, calls)."""
    weight = nn.Linear(2, 1, bias=False).double()
    handle = naive.wrap(weight, run.world)
    with recording() as calls:
        for micro in range(4):
            quiet = handle.no_sync if micro < 3 else contextlib.nullcontext
            with quiet() if "forward" in covers else contextlib.nullcontext():
                out = weight(torch.tensor([[1.0, 10.0**micro * (run.rank + 1)]], dtype=torch.float64))
                if covers == "forward, backward":
                    out.sum().backward()
            with quiet() if covers == "backward" else contextlib.nullcontext():
                if covers != "forward, backward":
                    out.sum().backward()
        handle.finish()
    return weight.weight.grad, calls


@pytest.mark.parametrize("covers", ["forward, backward", "forward", "backward", "nothing"])
def test_no_sync_in_any_place_gives_the_mean_of_the_sums(pool, covers):
    for grad, calls in pool.run(2, accumulate, covers):
        assert grad.tolist() == [[4.0, 1111 * 1.5]]
        assert calls == [("all_reduce", 1), ("all_reduce", 2)]  # the agreement, one gradient; not four times


def fail_and_go_on(run):
    """An exception inside no_sync, then a step as usual."""
    weight = nn.Linear(1, 1, bias=False).double()
    handle = naive.wrap(weight, run.world)
    with pytest.raises(ZeroDivisionError), handle.no_sync():
        weight(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
        raise ZeroDivisionError
    weight.zero_grad()
    weight(torch.full((1, 1), run.rank + 1, dtype=torch.float64)).sum().backward()
    handle.finish()
    return weight.weight.grad.item()


def test_an_exception_inside_no_sync_leaves_nothing_switched_off(pool):
    assert pool.run(2, fail_and_go_on) == [1.5, 1.5]


# -- parameters that are used by some, by none, twice, later -----------------------------------------------------------


def use_one_each(run):
    """Rank r uses n1 on even, n2 on odd ranks, with x = r + 1, in two steps: gradients of n1, n2, n3, and values."""
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(1, dtype=torch.float64)) for name in ("n1", "n2", "n3")})
    handle = naive.wrap(model, run.world)
    optimizer = torch.optim.SGD(handle.parameters(), lr=1, momentum=0.5, weight_decay=0.5)
    grads = []
    for _ in range(2):
        optimizer.zero_grad()
        (model["n1" if run.rank % 2 == 0 else "n2"] * (run.rank + 1)).sum().backward()
        handle.finish()
        grads.append([None if p.grad is None else p.grad.item() for p in model.values()])
        optimizer.step()
    return grads, [p.item() for p in model.values()]


def test_a_parameter_used_by_one_rank_counts_as_zero_on_the_others(pool):
    """T13: the divisor is the number of ranks, not of those that used it. One that nobody uses is not even decayed."""
    for grads, values in pool.run(2, use_one_each):
        assert grads == [[0.5, 1.0, None], [0.5, 1.0, None]]
        assert values == [-1.0, -2.0, 1.0]  # 1 - 1 - 1 and 1 - 1.5 - 1.5, with weight decay and momentum


class Shared(nn.Module):
    """y = W(W x) + ..., and a bias that belongs to two layers, one of them unused."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))
        self.c.bias = self.b.bias

    def forward(self, x):
        return self.b(self.a(torch.tanh(self.a(x))))


def shared_parameters(run, x, cotangent):
    """(gradients by name, calls) of a step on this rank's rows."""
    torch.manual_seed(run.rank)
    model = Shared().double()
    handle = naive.wrap(model, run.world, average=False)
    x, cotangent = (part.tensor_split(run.size)[run.rank] for part in (x, cotangent))
    (model(x) * cotangent).sum().backward()
    with recording() as calls:
        handle.finish()
    return snapshot(model)[0], calls


@pytest.mark.parametrize("ranks", [2, 3])
def test_one_reduction_for_each_distinct_parameter(pool, ranks):
    """T16."""
    torch.manual_seed(0)
    model, x, cotangent = Shared().double(), *torch.randn(2, 5, 3, dtype=torch.float64)
    (model(x) * cotangent).sum().backward()
    for grads, calls in pool.run(ranks, shared_parameters, x, cotangent):
        assert calls == [("all_reduce", 5), ("all_reduce", 9), ("all_reduce", 3), ("all_reduce", 9), ("all_reduce", 3)]
        assert grads.pop("c.weight") is None
        for name, grad in grads.items():
            expected = model.get_parameter(name).grad
            assert (grad - expected).abs().max() <= 1e-12 * expected.abs().max()


def frozen_then_unfrozen(run, steps):
    """Layer 0 is frozen for two steps and trains in two more. Values after each step, and the optimizer's states."""
    model, dealt = two_layers(), [rows.tensor_split(run.size)[run.rank] for rows in two_layers_rows()]
    model[0].requires_grad_(False)
    handle = naive.wrap(model, run.world, average=False)
    optimizer, values = sgd(model.parameters()), []
    for step in range(steps):
        if step == 2:
            model[0].requires_grad_(True)
        optimizer.zero_grad()
        model(dealt[step]).square().sum().backward()
        handle.finish()
        optimizer.step()
        values.append(snapshot(model)[1])
    return values, len(optimizer.state)


def two_layers():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double()


def two_layers_rows():
    return torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def two_layers_alone():
    model = two_layers()
    optimizer, values = sgd(model.parameters()), []
    for step, x in enumerate(two_layers_rows()):
        model[0].requires_grad_(step >= 2)
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        values.append(snapshot(model)[1])
    return values


def test_frozen_parameters_stay_and_have_no_state(pool):
    """T17, the first half."""
    for values, states in pool.run(2, frozen_then_unfrozen, 2):
        assert states == 2
        assert all(torch.equal(step["0.weight"], two_layers()[0].weight) for step in values)


def test_unfrozen_parameters_train(pool):
    """T17, the second half: frozen ones are treated too, so nothing is to be done when they are unfrozen."""
    expected = two_layers_alone()
    for values, _ in pool.run(2, frozen_then_unfrozen, 4):
        before = snapshot(two_layers())[1]
        for step, (ours, theirs) in enumerate(zip(values, expected, strict=True)):
            for name, value in theirs.items():
                moved = float((value - before[name]).abs().max())
                assert (moved == 0) == (step < 2 and name.startswith("0."))
                assert float((ours[name] - value).abs().max()) <= 1e-10 * moved + 4 * ULP * float(value.abs().max())
            before = theirs


# -- what wrap does to weights, buffers, layouts, dtypes ---------------------------------------------------------------


class Buffers(nn.Module):
    """Parameters, and buffers of several dtypes, one of them strided, one not saved."""

    def __init__(self):
        super().__init__()
        self.batch = nn.BatchNorm1d(3)
        self.weight = nn.Parameter(torch.randn(3, 4).t())
        self.batch.num_batches_tracked += int(torch.randint(1000, ()))
        self.batch.running_mean.normal_()
        self.register_buffer("table", torch.randn(4, 3).t(), persistent=False)
        self.register_buffer("mask", torch.rand(20) < 0.5)
        self.register_buffer("low", torch.randn(5).bfloat16())


def wrapped_buffers(run, ranks):
    """Everything that the module holds after wrap, on the members of this group."""
    torch.manual_seed(run.rank)
    model, group = Buffers(), run.new_group(ranks) if ranks else None
    if group is not None:
        naive.wrap(model, group)
    return {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


@pytest.mark.parametrize("members", [[0, 1, 2, 3], [2, 3], [1, 3]])
def test_after_wrap_all_have_the_first_members_values(pool, members):
    """T48, T20, T06: bit for bit, buffers as well; the root is the first rank of the group."""
    results = pool.run(4, wrapped_buffers, members)
    untouched = pool.run(4, wrapped_buffers, [])
    for rank, tensors in enumerate(results):
        for name, tensor in tensors.items():
            source = members[0] if rank in members else rank
            assert torch.equal(tensor, untouched[source][name]), (rank, name)


def wrapped_frozen(run):
    torch.manual_seed(run.rank)
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    naive.wrap(model, run.world)
    return model.weight.detach().clone()


def test_frozen_weights_are_the_first_members_too(pool):
    """T48: a frozen weight that differs from rank to rank is a different model on each."""
    first, second = pool.run(2, wrapped_frozen)
    assert torch.equal(first, second)


def wrapped_twice(run):
    weight = nn.Parameter(torch.ones(2))
    handle = naive.wrap(nn.ParameterList([weight]), run.world, params=[weight, weight], average=False)
    weight.grad = torch.ones(2)
    handle.finish()
    return weight.grad


def test_a_parameter_named_twice_is_reduced_once(pool):
    assert all(grad.tolist() == [3, 3] for grad in pool.run(3, wrapped_twice))


def refused_meta_buffer(run):
    with pytest.raises(ValueError, match=r"buffers \['running_mean', 'running_var', .* are on the meta device"):
        naive.wrap(nn.BatchNorm1d(2, device="meta"), run.world)


def test_buffers_without_values_are_refused(pool):
    pool.run(2, refused_meta_buffer)


def reduce_in_group(run, ranks):
    """A step over some of the ranks: (gradient, value before) here, None on the others."""
    torch.manual_seed(run.rank)
    group = run.new_group(ranks)
    if group is None:
        return None
    model = nn.Linear(1, 1, bias=False).double()
    handle = naive.wrap(model, group, average=False)
    model(torch.full((1, 1), 10.0**run.rank, dtype=torch.float64)).sum().backward()
    handle.finish()
    return model.weight.grad.item(), model.weight.item()


@pytest.mark.parametrize("members", [[2, 3], [1, 3], [0, 1, 3]])
def test_sums_over_the_members_only(pool, members):
    """T06."""
    results = pool.run(4, reduce_in_group, members)
    torch.manual_seed(members[0])
    weight = nn.Linear(1, 1, bias=False).double().weight.item()
    for rank, result in enumerate(results):
        assert result == ((sum(10.0**member for member in members), weight) if rank in members else None)


def mixed_model():
    """dtypes, layouts and sizes in one model."""
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    shapes = ((), (0, 3), (1,), (7,), (5, 4))
    flat = [torch.zeros(shape, dtype=dtype) for dtype in dtypes for shape in shapes]
    turned = [torch.zeros(4, 5, dtype=dtype).t() for dtype in dtypes]
    gaps = [torch.zeros(6, 4, dtype=dtype)[::2] for dtype in dtypes]
    return nn.ParameterList(nn.Parameter(tensor) for tensor in (*flat, *turned, *gaps))


def whole_numbers(param, rank):
    """A gradient whose sums are exact in any dtype: it tells position and rank."""
    return (torch.arange(param.numel()) % 5 + 8 * (rank + 1)).view(param.shape).to(param.dtype)


def reduce_mixed(run):
    """(values after wrap, gradients) of a model whose values were the rank's number."""
    model = mixed_model()
    for param in model:
        nn.init.constant_(param, run.rank + 1)
    handle = naive.wrap(model, run.world, average=False)
    for param in model:
        (param * whole_numbers(param, run.rank)).sum().backward()
    handle.finish()
    return [param.detach() for param in model], [param.grad for param in model]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_dtype_and_layout_keeps_its_own(pool, ranks):
    for values, grads in pool.run(ranks, reduce_mixed):
        for param, value, grad in zip(mixed_model(), values, grads, strict=True):
            assert torch.equal(value, torch.ones_like(param))
            assert grad.dtype == param.dtype and grad.shape == param.shape
            assert torch.equal(grad, sum(whole_numbers(param, rank) for rank in range(ranks)))


class Tied(nn.Module):
    """Input and output share a weight."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


def wrap_on_meta(run):
    """(the same objects, still shared, still declared, device, calls of wrap, gradient) of a model built on meta."""
    with torch.device("meta"):
        model = Tied().double()
    layout.declare(model, lambda name: layout.Constant(0.5), lambda name: True)
    before, held = list(model.parameters()), model.embed.weight.held
    with recording() as calls:
        handle = naive.wrap(model, run.world, average=False, device=torch.device("cpu"))
    nn.init.constant_(model.embed.weight, 0.5)
    model(torch.tensor([run.rank])).sum().backward()
    handle.finish()
    same = [id(p) for p in handle.parameters()] == [id(p) for p in before] == [id(p) for p in model.parameters()]
    weight = model.head.weight
    return same, weight is model.embed.weight, weight.held == held, weight.device.type, calls, weight.grad


def test_meta_parameters_get_memory_and_stay_who_they_are(pool):
    """T44: still one tensor. Nothing is sent, there is nothing to send."""
    model = Tied().double()
    nn.init.constant_(model.embed.weight, 0.5)
    model(torch.arange(2)).sum().backward()
    for same, shared, declared, device, calls, grad in pool.run(2, wrap_on_meta):
        assert same and shared and declared
        assert device == "cpu"
        assert calls == []
        assert torch.equal(grad, model.embed.weight.grad)


# -- traffic -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def recording():
    """A list of (operation, elements) of every collective called meanwhile."""
    calls = []

    def recorded(name):
        true = getattr(comm, name)

        def call(tensor, *args, **more):
            calls.append((name, tensor.numel()))
            return true(tensor, *args, **more)

        return mock.patch.object(comm, name, call)

    with contextlib.ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(recorded(name))
        yield calls


def big():
    return nn.Sequential(nn.Linear(300, 400), nn.BatchNorm1d(400), nn.Linear(400, 201, bias=False)).double()


def traffic_of(run, members):
    """((calls, bytes) of wrap, of a step, bytes of no step at all), on the members of a group."""
    group = run.new_group(members)
    if group is None:
        return None
    model = big()
    comm.barrier(group=group)
    before = demo.bytes_written()
    with recording() as wrapping:
        handle = naive.wrap(model, group)
    wrapped = demo.bytes_since(before)
    model(torch.ones(4, 300, dtype=torch.float64)).sum().backward()
    comm.barrier(group=group)
    before = demo.bytes_written()
    with recording() as stepping:
        handle.finish()
    stepped = demo.bytes_since(before)
    before = demo.bytes_written()
    with handle.no_sync():
        model(torch.ones(4, 300, dtype=torch.float64)).sum().backward()
    handle.after_step()
    handle.unshard(model)
    handle.reshard(model)
    handle.reduce(model)
    return (wrapping, wrapped), (stepping, stepped), demo.bytes_since(before)


@pytest.mark.parametrize(("ranks", "members"), [(2, [0, 1]), (3, [0, 1, 2]), (4, [0, 1, 2, 3]), (4, [1, 3])])
def test_traffic(pool, ranks, members):
    """One broadcast a tensor; then an agreement and one all-reduce a parameter, in the order of the module."""
    model, size = big(), len(members)
    params = [param.numel() for param in model.parameters()]
    buffers = [buffer.numel() for buffer in model.buffers()]
    n = 8 * sum(params)
    results = [result for result in pool.run(ranks, traffic_of, members) if result is not None]
    assert len(results) == size
    for (wrapping, _), (stepping, sent), nothing in results:
        assert wrapping == [("broadcast", numel) for numel in (*params, *buffers)]
        assert stepping == [("all_reduce", numel) for numel in (len(params), *params)]
        expected = 2 * n * (size - 1) / size
        assert abs(sent - expected) <= 0.01 * expected + 4096 * len(stepping)
        assert nothing == 0
    whole = n + sum(buffer.nbytes for buffer in model.buffers())
    total = sum(wrapped for (_, wrapped), *_ in results)  # who sends how much of a broadcast depends on the tree
    assert abs(total - whole * (size - 1)) <= 0.01 * whole * (size - 1) + 4096 * len(results[0][0][0]) * size


@pytest.mark.parametrize(("ranks", "member"), [(1, 0), (4, 2)])
def test_a_group_of_one_rank_sends_nothing(pool, ranks, member):
    (_, wrapped), (_, stepped), nothing = pool.run(ranks, traffic_of, [member])[member]
    assert wrapped == stepped == nothing == 0


def nothing_to_train(run):
    """A frozen model, and a step in which no rank has a gradient."""
    frozen = naive.wrap(nn.Linear(2, 2).requires_grad_(False), run.world)
    frozen.finish()
    model = nn.Linear(2, 2)
    naive.wrap(model, run.world).finish()
    return [param.grad for param in (*frozen.parameters(), *model.parameters())]


def test_nothing_to_train(pool):
    assert pool.run(2, nothing_to_train) == [[None] * 4] * 2
