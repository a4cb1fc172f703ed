"""Collectives with a backward: both directions against plain torch, exactly; who needs which meaning; what is sent."""

import functools
import itertools
from unittest import mock

import pytest
import torch
from torch import nn

from collectives import allocated
from collectives import differentiable as d
from collectives.ledger import Ledger
from collectives.watch import watching
from tests import passthrough
from tests.collectives.duals import LAYOUTS, cases, draw, ends_of, mine, simplest

# ---- both directions, against plain torch


def differences(run, case, layouts=("dense", "dense"), dtype=torch.float64):
    """What this rank gets otherwise than by the plain version. Cotangents differ by rank."""
    x_layout, dout_layout = layouts
    xs = case.inputs(x_layout, dtype)
    ys = case.plain(xs)
    douts = [draw(dout_layout, dtype, y.shape, 1, rank) for rank, y in enumerate(ys)]
    dxs = torch.autograd.grad(ys, xs, douts, materialize_grads=True)
    x = mine(case.inputs(x_layout, dtype), run.rank)
    y = case.call(x, group=run.world)
    (dx,) = torch.autograd.grad(y, x, mine(douts, run.rank))
    found = {
        "result": not torch.equal(y, mine(ys, run.rank)),
        "gradient": dx.shape != x.shape or not torch.equal(dx, mine(dxs, run.rank)),
        "input": not torch.equal(x, mine(xs, run.rank)),
        "memory": y.data_ptr() != x.data_ptr() and (y._is_view() or not y.is_contiguous()),
    }
    return [what for what, wrong in found.items() if wrong]


def all_differences(run, layouts, dtype):
    table = itertools.product(cases(run.size).items(), layouts)
    found = {(name, pair): differences(run, case, pair, dtype) for (name, case), pair in table}
    return {which: what for which, what in found.items() if what}


IN_TURN = list(zip(LAYOUTS, list(LAYOUTS)[1:] + list(LAYOUTS)[:1], strict=True))


@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [
        *((ranks, torch.float64) for ranks in (1, 2, 3)),
        (3, torch.bfloat16),
        pytest.param(4, torch.float64, marks=pytest.mark.drill),
    ],
)
def test_both_directions(pool, ranks, dtype):
    assert pool.run(ranks, all_differences, IN_TURN, dtype) == ranks * [{}]


def test_over_bare_torch_distributed(pool):
    assert pool.run(3, passthrough.run, all_differences, IN_TURN, torch.float64) == 3 * [{}]


# Backward is done by the dual of this name; in its place, something that may look right.
FAULTS = {
    # nothing done, nothing sent
    "identity_all_reduce": ("all_reduce_identity", lambda dout, group: dout),
    "all_reduce_all_reduce": ("all_reduce_all_reduce", lambda dout, group: dout),
    "split_all_gather": ("all_gather_split", lambda dout, dim, sizes, group: torch.cat(len(sizes) * [dout], dim)),
    "reduce_scatter_all_gather": (
        *("all_gather_reduce_scatter", lambda dout, dim, sizes, group: torch.cat(len(sizes) * [dout], dim)),
    ),
    "all_to_all": ("all_to_all", lambda dout, split, cat, sizes, _, group: torch.cat(dout.split(sizes, split), cat)),
    "all_to_all_rows symmetric": ("all_to_all_rows", lambda dout, gives, takes, group: dout),
    "broadcast_reduce": ("reduce_broadcast", lambda dout, root, group: dout),
    "reduce_broadcast": ("broadcast_reduce", lambda dout, root, group: dout),
    # the other meaning
    "all_reduce_identity": ("identity_all_reduce", d.all_reduce_all_reduce),
    "all_gather_reduce_scatter": ("reduce_scatter_all_gather", d.split_all_gather),
    "all_gather_split": ("split_all_gather", d.reduce_scatter_all_gather),
}


def with_fault(run, function):
    case = next(case for name, case in cases(run.size).items() if name.startswith(function))
    dual, wrong = FAULTS[function]
    with mock.patch.object(d, dual, wrong):
        return differences(run, case)


@pytest.mark.parametrize("function", FAULTS)
def test_a_wrong_backward_is_found(pool, function):
    found = pool.run(3, with_fault, function)
    assert ["gradient"] in found and all(what in ([], ["gradient"]) for what in found)


def jacobians(run, name):
    """This rank's rows of forward's Jacobian, and of backward's: from every basis vector of all ranks together."""
    case = cases(run.size)[name]
    rows = [case.call(mine(basis, run.rank), group=run.world).flatten() for basis in bases(case.shapes)]
    x = torch.zeros(mine(case.shapes, run.rank), dtype=torch.float64, requires_grad=True)
    y = case.call(x, group=run.world)
    ends = ends_of(case)
    back = [torch.autograd.grad(y, x, mine(e, run.rank), retain_graph=True)[0].flatten() for e in bases(ends)]
    return torch.stack(rows, 1), torch.stack(back, 1), len(ends)


def bases(shapes):
    """Every basis vector of tensors of these shapes together, as the list of its parts."""
    numbers = [torch.Size(shape).numel() for shape in shapes]
    for vector in torch.eye(sum(numbers), dtype=torch.float64):
        yield [part.view(shape) for part, shape in zip(vector.split(numbers), shapes, strict=True)]


def together(parts, ends):
    """All ranks' rows; of copies, which must be alike, those of one."""
    if ends > 1:
        return torch.cat(parts)
    assert all(torch.equal(part, parts[0]) for part in parts)
    return parts[0]


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.drill)])
def test_backward_is_the_transpose_of_forward(pool, ranks):
    for name in simplest(ranks):
        forward, backward, ends = zip(*pool.run(ranks, jacobians, name), strict=True)
        there, back = together(forward, ends[0]), together(backward, len(cases(ranks)[name].shapes))
        assert there.any() and torch.equal(there, back.T), name


# ---- the two meanings


def of_independent_losses(run, function):
    """x_r = r + 1, y their sum, and every rank's loss is y²: the gradient of x."""
    x = torch.tensor(run.rank + 1.0, requires_grad=True)
    function(x, group=run.world).square().backward()
    return x.grad.item()


def test_one_loss_that_all_compute_or_losses_that_are_added(pool):
    assert pool.run(2, of_independent_losses, d.all_reduce_identity) == [6, 6]
    assert pool.run(2, of_independent_losses, d.all_reduce_all_reduce) == [12, 12]


def from_and_to_the_first(run, members):
    """Rank r has x = r and the cotangent 10r: what it gets, both ways, for both functions."""
    group = run.new_group(members)
    if group is None:
        return None
    got = []
    for function in (d.broadcast_reduce, d.reduce_broadcast):
        x = torch.tensor(float(run.rank), requires_grad=True)
        y = function(x, 0, group=group)
        y.backward(torch.tensor(10.0 * run.rank))
        got += [y.item(), x.grad.item()]
    return got


def test_roots_are_ranks_in_the_group(pool):
    assert pool.run(4, from_and_to_the_first, [2, 3]) == [None, None, [2, 50, 5, 20], [2, 0, 0, 20]]
    assert pool.run(4, from_and_to_the_first, [1, 3]) == [None, [1, 40, 4, 10], None, [1, 0, 0, 10]]


ENDS = {  # of the part that is cut, and whether x and y are cut too, along the tokens
    "f and g": (d.identity_all_reduce, d.all_reduce_identity, False),
    "without f": (lambda x, group: x, d.all_reduce_identity, False),
    "losses added": (d.identity_all_reduce, d.all_reduce_all_reduce, False),
    "sequence parallel": (d.all_gather_reduce_scatter, d.reduce_scatter_all_gather, True),
    "all go on alike": (d.all_gather_split, d.reduce_scatter_all_gather, True),
}


def mlp_errors(run, ends):
    """Of every gradient of an MLP that is cut by columns, then by rows, in units of the uncut one's largest entry."""
    torch.manual_seed(0)
    x, up, down, c = (torch.randn(s, dtype=torch.float64) for s in ((2, 5, 3), (7, 3), (3, 7), (2, 5, 3)))
    leaves = [leaf.requires_grad_() for leaf in (x, up, down)]
    (nn.functional.gelu(x @ up.T) @ down.T).tanh().mul(c).sum().backward()

    def piece(tensor, dim):
        return tensor.detach().tensor_split(run.size, dim)[run.rank].clone()

    enter, leave, by_tokens = ENDS[ends]
    if by_tokens:
        sizes = [len(part) for part in torch.arange(5).tensor_split(run.size)]
        enter, leave = (functools.partial(end, dim=1, sizes=sizes) for end in (enter, leave))
    x_cut, c_cut = (piece(t, 1) if by_tokens else t.detach().clone() for t in (x, c))
    cut = [leaf.requires_grad_() for leaf in (x_cut, piece(up, 0), piece(down, 1))]
    h = nn.functional.gelu(enter(cut[0], group=run.world) @ cut[1].T)  # [B, T, F/tp]
    leave(h @ cut[2].T, group=run.world).tanh().mul(c_cut).sum().backward()
    expected = [piece(x.grad, 1) if by_tokens else x.grad, piece(up.grad, 0), piece(down.grad, 1)]
    pairs = zip(cut, expected, leaves, strict=True)
    return [float((ours.grad - true).abs().max() / leaf.grad.abs().max()) for ours, true, leaf in pairs]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("ends", ["f and g", "sequence parallel"])
def test_a_cut_mlp_has_the_gradients_of_the_uncut_one(pool, ends, ranks):
    assert max(max(errors) for errors in pool.run(ranks, mlp_errors, ends)) < 1e-12


@pytest.mark.parametrize("ends", ["without f", "losses added", "all go on alike"])
def test_with_the_other_meaning_it_has_not(pool, ends):
    for errors in pool.run(3, mlp_errors, ends):
        assert errors[0] > 0.01, "x's gradient is wrong on every rank"


# ---- what is sent, kept and refused

SENT = {  # forward, backward
    "identity_all_reduce": ([], ["all_reduce"]),
    "all_reduce_identity": (["all_reduce"], []),
    "all_reduce_all_reduce": (["all_reduce"], ["all_reduce"]),
    "all_gather_reduce_scatter 0 None": (["all_gather_single"], ["reduce_scatter_single"]),
    "all_gather_reduce_scatter 0 [1, 0, 3]": (["all_gather"], ["reduce_scatter"]),
    "all_gather_split 0 None": (["all_gather_single"], []),
    "split_all_gather 0 None": ([], ["all_gather_single"]),
    "reduce_scatter_all_gather 0 None": (["reduce_scatter_single"], ["all_gather_single"]),
    "all_to_all (0, 1) None None": (["all_to_all_single"], ["all_to_all_single"]),
    "all_to_all_rows asymmetric": (["all_to_all_single"], ["all_to_all_single"]),
    "broadcast_reduce 0": (["broadcast"], ["reduce"]),
    "reduce_broadcast 0": (["reduce"], ["broadcast"]),
}


def sent(run, name):
    """The operations of forward and of backward, a name for every call; and whether the result lies where x does."""
    case = cases(run.size)[name]
    x = mine(case.inputs(), run.rank)
    with watching(there := Ledger()):
        y = case.call(x, group=run.world)
    with watching(back := Ledger()):
        y.sum().backward()
    ops = ([row.op for row in book.rows() for _ in range(row.calls)] for book in (there, back))
    return *ops, y.data_ptr() == x.data_ptr() != 0


def test_number_and_kind_of_collectives(pool):
    assert {name.split()[0] for name in SENT} == {name.split()[0] for name in simplest(3)}
    for name, both in SENT.items():
        assert pool.run(3, sent, name) == 3 * [(*both, name.split("_")[0] == "identity")], name


def test_one_rank_sends_nothing(pool):
    for name in simplest(1):
        assert pool.run(1, sent, name) == [([], [], name.split("_")[0] == "identity")], name


def without_gradient(run):
    """Integers, tensors that require no gradient, and whatever does under no_grad: the names of those that fail."""
    failed = []
    for name in simplest(run.size):
        case = cases(run.size)[name]
        xs = case.inputs()
        x, true = mine(xs, run.rank), mine(case.plain(xs), run.rank).detach()
        with torch.no_grad():
            unrecorded = case.call(x, group=run.world)
        results = [case.call(x.detach().long(), group=run.world), case.call(x.detach(), group=run.world), unrecorded]
        recorded = [y for y in results if y.requires_grad and y is not x]
        if recorded or any(not torch.equal(y.double(), true) for y in results):
            failed.append(name)
    return failed


@pytest.mark.parametrize("ranks", [1, 3])
def test_without_a_gradient(pool, ranks):
    assert pool.run(ranks, without_gradient) == ranks * [[]]


def peaks(run):
    """Rows that forward takes, its result too, when it gathers equal and uneven ones."""
    x, sizes, held = torch.ones(512, 512), [512, 256], []
    calls = [
        lambda: d.all_gather_split(x, 0, group=run.world),
        lambda: d.all_gather_split(x[: sizes[run.rank]], 0, sizes, group=run.world),
    ]
    peak = functools.partial(allocated.peak_bytes, device=x.device, prepare=held.clear)
    return [peak(lambda call=call: held.append(call())) / x[0].nbytes for call in calls]


def test_rows_are_gathered_without_a_copy(pool):
    assert pool.run(2, peaks) == 2 * [[1024, 768]]


REFUSED = {
    "do not divide dim -1 of length 4; give sizes=, as [2, 1, 1]": lambda x, on: d.split_all_gather(x, -1, **on),
    "sizes=[5, -2, 1]: give 3 lengths that add": lambda x, on: d.split_all_gather(x, 1, [5, -2, 1], **on),
    "sizes=[2, 2]: give 3 lengths that add": lambda x, on: d.reduce_scatter_all_gather(x, 1, [2, 2], **on),
    "sizes=[3, 3, 3]: give 3 lengths along dim 1, 4": lambda x, on: d.all_gather_split(x, 1, [3, 3, 3], **on),
    "give split_sizes=, as [2, 1, 1]": lambda x, on: d.all_to_all(x, 1, 0, **on),
    "cat_sizes=[4]: give 3 lengths": lambda x, on: d.all_to_all(x, 0, 1, cat_sizes=[4], **on),
    "are both 0": lambda x, on: d.all_to_all(x, 0, -2, **on),
    "need 3 numbers each": lambda x, on: d.all_to_all_rows(x, [3], [3], **on),
    "takes=[2, 2, 2]: need 3 numbers each, equal at": lambda x, on: d.all_to_all_rows(x, [1, 1, 1], [2, 2, 2], **on),
    "root 3 is not in a group of 3 ranks": lambda x, on: d.broadcast_reduce(x, 3, **on),
    "root -1 is not in a group of 3 ranks": lambda x, on: d.reduce_broadcast(x, -1, **on),
    "this rank is no member of the group": lambda x, on: d.all_gather_split(x, 0, group=None),
    "gives to add up to the 3 rows": lambda x, on: d.all_to_all_rows(x, [1, 1, 2], [1, 1, 2], **on),
}


def refusals(run, name):
    with watching(book := Ledger()), pytest.raises(ValueError) as caught:
        REFUSED[name](torch.ones(3, 4), {"group": run.world})
    return str(caught.value), book.rows()


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused_on_every_rank_before_anything_is_sent(pool, message):
    for text, sent in pool.run(3, refusals, message):
        assert message in text and sent == []
