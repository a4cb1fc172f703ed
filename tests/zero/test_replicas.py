"""What wrap does to weights, buffers, layouts, dtypes and groups; what is left of a handle that is dropped."""

import functools
import gc
import weakref

import pytest
import torch
from torch import nn

from collectives import layout, ledger
from tests.recorder import recording
from tests.shards import assembled, pieces, snapshot
from tests.training import net
from tests.zero.versions import drilled, each_stage, each_version, vectors
from zero import Mixed, stage0, stage1, stage2

F64 = torch.float64


def wrapped(run, wrap, members):
    """T48. Seeds differ: the pieces and the weights after wrap, on the members."""
    group = run.new_group(members)
    if group is None:
        return None
    model = net(run.rank)
    handle = wrap(model, group)
    with handle.whole():
        return pieces(handle), snapshot(model)


@pytest.mark.parametrize("members", [[0, 1, 2, 3], drilled([2, 3]), [1, 3]])
@each_version
def test_after_wrap_all_have_the_first_members_weights(pool, wrap, members):
    """Bit for bit, frozen ones too."""
    held, wholes = zip(*(result for result in pool.run(4, wrapped, wrap, members) if result), strict=True)
    expected, (_, values) = snapshot(net(members[0])), assembled(held)
    for name, value in expected.items():
        assert torch.equal(values[name], value) and all(torch.equal(whole[name], value) for whole in wholes)


def checked(run, wrap):
    """Declarations before and after the ranks compare them, and how the handle tells of them."""
    model = net(0)
    handle = wrap(model, run.world)
    before = [(p.held.copies, p.held.copy, p.held.name, p.held.decay) for p in handle.parameters() if p.held.boxes]
    layout.check(handle.parameters(), run.world)
    after = [(p.held.copies, p.held.copy, p.held.name, p.held.decay) for p in handle.parameters() if p.held.boxes]
    assert before == after
    assert all(
        p.dim() == 1 and p.requires_grad == q.requires_grad
        for p, q in zip(handle.parameters(), model.parameters(), strict=True)
    )
    return before, handle.padding()


@pytest.mark.parametrize("ranks", [drilled(1), drilled(2), 3, 4])
@each_stage
def test_the_ranks_together_hold_each_tensor_exactly(pool, wrap, ranks):
    """By layout.check; and matrices decay, where nobody has declared what does."""
    numel = sum(param.numel() for param in net(0).parameters())
    for held, padding in pool.run(ranks, checked, wrap):
        assert padding.startswith(f"{numel:,} parameters in ") and padding.endswith("of padding")
        for copies, _, name, decay in held:
            assert copies == (ranks if wrap.func is stage0.wrap else 1)
            assert decay == (net(0).get_parameter(name).dim() > 1)


def declared_sums(run):
    """A parameter's reasons for a sum, before and after wrap over one of them."""
    model, group = nn.Linear(2, 2), run.new_group([0, 1], "tp")
    layout.declare(model, lambda name: layout.Constant(0.0), lambda name: "bias" in name)
    for param in model.parameters():
        param.held.sums = {"dp": run.world, "tp": group}
    held = [shard.held for shard in stage2.wrap(model, run.world).parameters()]
    return [(h.name, sorted(h.sums), h.decay, h.init) for h in held], [sorted(p.held.sums) for p in model.parameters()]


def test_a_declared_parameter_keeps_what_it_declares(pool):
    zeros = layout.Constant(0.0)
    shards = [("weight", ["tp"], False, zeros), ("bias", ["tp"], True, zeros)]
    assert pool.run(2, declared_sums) == [(shards, [["dp", "tp"]] * 2)] * 2


# -- groups ------------------------------------------------------------------------------------------------------------


def step_in_group(run, wrap, members):
    """A step over some of the ranks: what a member holds, and the bytes it sent in wrap and step."""
    group = run.new_group(members)
    if group is None:
        return None
    torch.manual_seed(run.rank)
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 1, bias=False)).double()
    with recording() as recorder:
        handle = wrap(model, group, average=False)
        (model(torch.eye(2, dtype=F64)) * 10.0**run.rank).sum().backward()
        handle.finish()
        handle.after_step()
    return pieces(handle), sum(map(ledger.wire_bytes, recorder.calls))


@pytest.mark.parametrize("members", [drilled([2, 3]), [1, 3], [0, 1, 3]])
@each_version
def test_sums_over_the_members_only(pool, wrap, members):
    """T06."""
    held, sent = zip(*(result for result in pool.run(4, step_in_group, wrap, members) if result), strict=True)
    torch.manual_seed(members[0])
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 1, bias=False)).double()
    (model(torch.eye(2, dtype=F64)) * sum(10.0**member for member in members)).sum().backward()
    grads, _ = assembled(held)
    for name, param in model.named_parameters():
        assert torch.allclose(grads[name], param.grad, rtol=1e-12, atol=1e-9)
    assert len(held) == len(members) and min(sent) > 0


@pytest.mark.parametrize(("ranks", "member"), [(1, 0), (4, 2)])
@each_version
def test_a_group_of_one_rank_sends_nothing(pool, wrap, ranks, member):
    _, sent = pool.run(ranks, step_in_group, wrap, [member])[member]
    assert sent == 0


def two_groups(run, wrap):
    """Dense parameters over all ranks, the expert's over every second: what a rank holds of both."""
    torch.manual_seed(run.rank)
    model = nn.ModuleDict({"dense": vectors("5 3"), "expert": vectors("4 7")})
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(run.rank)
    pairs = [run.new_group([0, 2]), run.new_group([1, 3])]
    handles = [
        wrap(model, run.world, params=list(model["dense"].parameters()), average=False),
        wrap(model, pairs[run.rank % 2], params=list(model["expert"].parameters()), average=False),
    ]
    for _ in range(2):
        for handle in handles:
            for shard in handle.parameters():
                shard.grad = None
        x = torch.tensor(10.0**run.rank, dtype=F64)
        (model["dense"](x) + model["expert"](x)).backward()
        for handle in handles:
            handle.finish()
    return [pieces(handle) for handle in handles]


@each_version
def test_two_groups_of_parameters_of_one_module(pool, wrap):
    dense, expert = zip(*pool.run(4, two_groups, wrap), strict=True)
    for ranks, total, first in ((dense, 1111, 0), (expert[::2], 101, 0), (expert[1::2], 1010, 1)):
        grads, values = assembled(ranks)
        assert all(grad.eq(total).all() for grad in grads.values())
        assert all(value.eq(first).all() for value in values.values())


def named_twice(run, wrap):
    """A parameter that is named twice, and one that is not treated."""
    model = vectors("3 4")
    handle = wrap(model, run.world, params=[model[0].weight] * 2, average=False)
    model(torch.tensor(10.0**run.rank, dtype=F64)).backward()
    handle.finish()
    return pieces(handle), model[1].weight.grad


@each_version
def test_a_parameter_named_twice_is_treated_once_and_others_are_left_alone(pool, wrap):
    held, others = zip(*pool.run(3, named_twice, wrap), strict=True)
    grads, _ = assembled(held)
    assert [grad.tolist() for grad in grads.values()] == [[111.0] * 3]
    assert all(grad.eq(10.0**rank).all() for rank, grad in enumerate(others))


# -- dtypes, memory ----------------------------------------------------------------------------------------------------


def of_many_kinds():
    """T60: dtypes, layouts and sizes in one model."""
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    shapes = ((), (0, 3), (1,), (7,), (5, 4))
    flat = [torch.zeros(shape, dtype=dtype) for dtype in dtypes for shape in shapes]
    turned = [torch.zeros(4, 5, dtype=dtype).t() for dtype in dtypes]
    gaps = [torch.zeros(6, 4, dtype=dtype)[::2] for dtype in dtypes]
    return nn.ParameterList(nn.Parameter(tensor) for tensor in (*flat, *turned, *gaps))


def whole_numbers(param, rank):
    """A gradient whose sums are exact in any dtype: it tells position and rank."""
    return (torch.arange(param.numel()) % 5 + 8 * (rank + 1)).view(param.shape).to(param.dtype)


def reduce_many_kinds(run, wrap):
    """What this rank holds after each of two steps, and the shapes and dtypes of the module's parameters."""
    model, steps = of_many_kinds(), []
    for param in model:
        nn.init.constant_(param, run.rank + 1)
    handle = wrap(model, run.world, average=False)
    optimizer = torch.optim.SGD(handle.parameters(), lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        for param in model:
            param.grad = whole_numbers(param, run.rank)
        handle.finish()
        optimizer.step()
        handle.after_step()
        steps.append(pieces(handle))
    with handle.whole():
        return steps, [param.detach().clone() for param in model]


@pytest.mark.parametrize("ranks", [drilled(1), drilled(2), 3])
@each_version
def test_every_dtype_and_shape_keeps_its_own(pool, wrap, ranks):
    """T22, T41, T60: also where a bucket would mix them; gradients put there by hand."""
    steps, wholes = zip(*pool.run(ranks, reduce_many_kinds, wrap), strict=True)
    for number, on_ranks in enumerate(zip(*steps, strict=True), start=1):
        grads, values = assembled(on_ranks)
        for name, param in of_many_kinds().named_parameters():
            grad = sum(whole_numbers(param, rank) for rank in range(ranks))
            expected = torch.ones_like(param) - number * grad
            assert grads[name].dtype == values[name].dtype == param.dtype
            if param.numel():
                assert torch.equal(grads[name], grad) and torch.equal(values[name], expected)
    for whole in wholes:
        for param, name, mine in zip(of_many_kinds(), values, whole, strict=True):
            assert mine.shape == param.shape and mine.dtype == param.dtype
            assert not param.numel() or torch.equal(mine, values[name])


def wrapped_on_meta(run, wrap, mixed):
    """A model built on meta, its shards filled by their boxes: (outputs, tied, collectives before the update)."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 7, bias=False))
        model[3].weight = model[0].weight
    true = filled_by_number()
    with recording() as recorder:
        handle = wrap(model, run.world, mixed=mixed, device=torch.device("cpu"))
    with torch.no_grad():
        for shard in handle.parameters():
            whole = true.get_parameter(shard.held.name)
            parts = [whole[box.slices(layout.Box.whole(whole.shape))].flatten() for box in shard.held.boxes]
            shard.copy_(torch.cat([*parts, torch.empty(0)]))
    handle.after_step()
    dtype = torch.bfloat16 if mixed else torch.float32
    with handle.whole():
        assert all(torch.equal(a, b.to(dtype)) for a, b in zip(model.parameters(), true.parameters(), strict=True))
    with torch.no_grad():
        out = model(torch.arange(7)).float()
    return out, model[3].weight is model[0].weight, [call.op for call in recorder.calls if call.op == "broadcast"]


def filled_by_number():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 7, bias=False))
    model[3].weight = model[0].weight
    return model


@pytest.mark.parametrize("mixed", [None, Mixed()])
@each_stage
def test_meta_parameters_get_memory_and_values_through_their_shards(pool, wrap, mixed):
    """T44, T49: still one tensor. Nothing is sent, there is nothing to send."""
    true = filled_by_number() if mixed is None else filled_by_number().bfloat16()
    with torch.no_grad():
        expected = true(torch.arange(7)).float()
    for out, tied, broadcasts in pool.run(2, wrapped_on_meta, wrap, mixed):
        assert torch.equal(out, expected) and tied and broadcasts == []


class Counting(nn.Module):
    """Buffers that every forward changes: in place and by rebinding (T20)."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("in_place", torch.rand(2))
        self.register_buffer("rebound", torch.rand(()))

    def forward(self, x):
        self.in_place += x.mean()
        self.rebound = self.rebound + x.mean()
        return self.norm(x)


def stepped_buffers(run, wrap):
    """Buffers after wrap, before finish and after it."""
    torch.manual_seed(run.rank)
    model = Counting()
    handle, seen = wrap(model, run.world), []
    seen.append({name: buffer.clone() for name, buffer in model.named_buffers()})
    model(torch.randn(4, 3)).sum().backward()
    seen.append({name: buffer.clone() for name, buffer in model.named_buffers()})
    handle.finish()
    seen.append({name: buffer.clone() for name, buffer in model.named_buffers()})
    return seen


@each_stage
def test_buffers_are_the_first_members(pool, wrap):
    first, second = pool.run(2, stepped_buffers, wrap)
    for step, equal in enumerate((True, False, True)):
        assert torch.equal(first[step]["in_place"], second[step]["in_place"]) == equal
        assert torch.equal(first[step]["rebound"], second[step]["rebound"]) == equal
        assert torch.equal(first[step]["norm.running_mean"], second[step]["norm.running_mean"]) == equal
    assert torch.equal(first[1]["rebound"], second[2]["rebound"])


def dropped(run, wraps):
    """Each version in turn on one module, dropped after a step; then a step without any: (gradients, calls)."""
    model, steps = vectors("4 4"), []
    for wrap in wraps:
        handle = wrap(model, run.world, average=False)
        model(torch.tensor(10.0**run.rank, dtype=F64)).backward()
        handle.finish()
        steps.append(pieces(handle))
        buckets = [weakref.ref(bucket) for bucket in handle.buckets]
        del handle
        gc.collect()
        assert all(bucket() is None for bucket in buckets)
    with recording() as recorder:
        model(torch.tensor(10.0**run.rank, dtype=F64)).backward()
    return steps, [param.grad.clone() for param in model.parameters()], recorder.calls


def test_hooks_of_a_dropped_handle_do_nothing_and_the_module_can_be_wrapped_again(pool):
    """In stages 0 to 2, where the module has its weights."""
    wraps = [functools.partial(stage.wrap, cap=1) for stage in (stage0, stage1, stage2)]
    steps, alone, calls = zip(*pool.run(2, dropped, wraps), strict=True)
    assert calls == ([], [])
    for held in zip(*steps, strict=True):
        assert all(grad.eq(11).all() for grad in assembled(held)[0].values())
    assert all(grad.eq(10.0**rank).all() for rank, grads in enumerate(alone) for grad in grads)
