"""A region in use: the order of its backward, backward in halves, what it keeps and lets go, calls of every kind."""

import copy
import functools
import gc
import time
from unittest import mock

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from collectives.differentiable import all_gather_split, split_all_gather
from collectives.watch import Watcher, watching
from nd_mesh.recompute import recompute
from tensor_parallel import ColumnParallelLinear, Region, RowParallelLinear, entrance
from tests.recorder import SHORT, recording
from tests.tensor_parallel.models import Shape
from tests.tensor_parallel.training import MODES, cut_module, mine, near

D, HIDDEN, ROWS, TOKENS = 8, 12, 2, 4
EACH_MODE = pytest.mark.parametrize("mode", MODES)
SEQUENCES = pytest.mark.parametrize("mode", ["sp", "sp, whole inputs kept"])


class Layers(nn.Module):
    """Columns that share an input, and a row; plain, until `cut` makes them a region."""

    def __init__(self, columns=2, bias=True, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.columns = nn.ModuleList(nn.Linear(D, HIDDEN, bias=bias) for _ in range(columns))
        self.row = nn.Linear(HIDDEN, D, bias=bias)
        if tied:
            self.columns[1].weight = self.columns[0].weight
        self.double()

    def forward(self, x):
        return self.row(self.product(x))

    def product(self, x):
        y = self.columns[0](x).sin()
        for column in self.columns[1:]:
            y = y * column(x)
        return y

    def cut(self, run, mode):
        between = Region(run.world, **MODES[mode])
        self.columns = nn.ModuleList(ColumnParallelLinear(column, between) for column in self.columns)
        self.row = RowParallelLinear(self.row, between)
        return self


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole_input(run, mode, use, **settings):
    """What `use(layers, x)` makes of a whole x on ranks, whose x is cut where it has to be: the whole output, the
    gradient of x, this rank's gradients with their boxes.
    """
    layers = Layers(**settings).cut(run, mode)
    whole = numbers(ROWS, TOKENS, D).requires_grad_()
    x = split_all_gather(whole, 1, group=run.world) if mode != "tp" else whole
    y = use(layers, x)
    y = all_gather_split(y, 1, group=run.world) if mode != "tp" else y
    y.backward(numbers(*y.shape, seed=1))
    grads = {name: (p.held.boxes, p.grad) for name, p in layers.named_parameters() if name != "row.bias"}
    return y.detach(), whole.grad, grads


def judged(pool, use, ranks=2, modes=MODES, **settings):
    """The same as of plain layers, in each mode."""
    layers, x = Layers(**settings), numbers(ROWS, TOKENS, D).requires_grad_()
    y = use(layers, x)
    y.backward(numbers(*y.shape, seed=1))
    for mode in modes:
        for out, dx, grads in pool.run(ranks, functools.partial(whole_input, **settings), mode, use):
            assert near(out, y.detach()) <= 1
            assert near(dx, x.grad) <= 1
            for name, (boxes, grad) in grads.items():
                expected = layers.get_parameter(name).grad
                assert (grad is None) == (expected is None), name
                assert grad is None or near(grad, mine(boxes, expected)) <= 1, name


# -- the order of backward ---------------------------------------------------------------------------------------------


class Story(TorchDispatchMode, Watcher):
    """What a rank does, in order: launches and waits of collectives, products of dx and of dW."""

    def __init__(self):
        super().__init__()
        self.words = []

    def launched(self, call):
        if call.outer is None:
            self.words.append(f"start {SHORT[call.op]}")

    def waits(self, call):
        if call.outer is None:
            self.words.append(f"wait {SHORT[call.op]}")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket == torch.ops.aten.mm:
            self.words.append("dx" if out.size(-1) == D and len(out) == ROWS * TOKENS else "dW")
        return out


def backward_of_columns(run, mode, order, wants):
    """The story of the backward of two or three columns."""
    layers = Layers(len(order)).cut(run, mode)
    x = numbers(ROWS, TOKENS // (1 if mode == "tp" else run.size), D).requires_grad_("x" in wants)
    for column in layers.columns:
        column.requires_grad_("W" in wants)
    y = sum(layers.columns[i](x) for i in order)
    with Story() as story, watching(story):
        y.sum().backward()
    return ", ".join(story.words)


STORIES = {
    "tp": "dx, dx, start sum, dW, dW, wait sum",
    "sp": "start gather, dx, dx, start reduce, wait gather, dW, dW, wait reduce",
    "sp, whole inputs kept": "dx, dx, start reduce, dW, dW, wait reduce",
}


@EACH_MODE
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_dx_is_on_its_way_while_dw_is_computed(pool, mode, order):
    """In whatever order the columns are called. Handles are waited for last."""
    assert pool.run(2, backward_of_columns, mode, order, "xW") == [STORIES[mode]] * 2


@pytest.mark.parametrize(
    ("mode", "wants", "story"),
    [
        ("tp", "W", "dW, dW, dW"),
        ("sp", "W", "start gather, wait gather, dW, dW, dW"),
        ("tp", "x", "dx, dx, dx, start sum, wait sum"),
        ("sp", "x", "dx, dx, dx, start reduce, wait reduce"),
    ],
)
def test_what_nobody_wants_is_not_done(pool, mode, wants, story):
    assert pool.run(3 if mode == "tp" else 2, backward_of_columns, mode, (2, 0, 1), wants) == [story] * (
        3 if mode == "tp" else 2
    )


# -- backward in two halves --------------------------------------------------------------------------------------------


def in_halves(run, mode, input_first):
    """(words of the first half, of the second, largest difference from a backward in one)."""
    block = cut_module(run, Shape(kv_heads=4, qk_norm=True, router=True), MODES[mode])
    params = list(block.parameters())
    x = numbers(ROWS, TOKENS // (1 if mode == "tp" else run.size), 16).requires_grad_()
    cotangent = numbers(*x.shape, seed=1)
    with recording() as one:
        expected = torch.autograd.grad(block(x), [x, *params], cotangent)
    y, halves = block(x), [[x], params]
    with recording() as first:
        a = torch.autograd.grad(y, halves[not input_first], cotangent, retain_graph=True)
    with recording() as second:
        b = torch.autograd.grad(y, halves[input_first], cotangent)
    got = [*a, *b] if input_first else [*b, *a]
    same = all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    return [[call.op for call in recorder.calls].count("all_gather_single") for recorder in (one, first, second)], same


@pytest.mark.parametrize("input_first", [True, False])
@EACH_MODE
def test_halves_have_the_same_bits(pool, mode, input_first):
    for _, same in pool.run(2, in_halves, mode, input_first):
        assert same


def halves_of_a_region(run, mode):
    """The stories of a backward for the input, and then for the weights."""
    layers = Layers().cut(run, mode)
    x = numbers(ROWS, TOKENS // (1 if mode == "tp" else run.size), D).requires_grad_()
    y, stories = sum(column(x) for column in layers.columns), []
    weights = [column.weight for column in layers.columns]
    for inputs in ([x], weights):
        with Story() as story, watching(story):
            torch.autograd.grad(y.sum(), inputs, retain_graph=True)
        stories.append(", ".join(story.words))
    return stories


@pytest.mark.parametrize(
    ("mode", "for_input", "for_weights"),
    [
        ("tp", "dx, dx, start sum, wait sum", "dW, dW"),
        ("sp", "dx, dx, start reduce, wait reduce", "start gather, wait gather, dW, dW"),
        ("sp, whole inputs kept", "dx, dx, start reduce, wait reduce", "dW, dW"),
    ],
)
def test_no_half_does_the_work_of_the_other(pool, mode, for_input, for_weights):
    assert pool.run(2, halves_of_a_region, mode) == [[for_input, for_weights]] * 2


# -- memory ------------------------------------------------------------------------------------------------------------


def saved(run, mode):
    """Elements that the columns and the row keep for backward, parameters aside, each memory once."""
    layers = Layers(bias=False).cut(run, mode)
    x = numbers(ROWS, TOKENS // (1 if mode == "tp" else run.size), D).requires_grad_()
    own = {param.untyped_storage().data_ptr() for param in layers.parameters()}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = sum(column(x) for column in layers.columns)
        z = layers.row(y)
    assert z.requires_grad
    return sorted(numel for where, numel in kept.items() if where not in own), x.data_ptr() in kept


@pytest.mark.parametrize("ranks", [1, 2, 4])
@EACH_MODE
def test_what_is_kept_for_backward(pool, ranks, mode):
    """The input once, however many columns there are: the piece itself, or the whole; and the row's input, a part."""
    n, between = ROWS * TOKENS * D, ROWS * TOKENS * HIDDEN // ranks
    shared = n // ranks if mode == "sp" else n
    for kept, is_the_input in pool.run(ranks, saved, mode):
        assert kept == sorted([shared, between])
        assert is_the_input == (mode != "sp, whole inputs kept" or ranks == 1)


def test_a_stand_in_has_no_memory():
    """The products of all columns are there once."""
    stand_in = entrance._WeightGradient.apply(nn.Parameter(numbers(HIDDEN, D)), (ROWS, TOKENS), None)
    assert stand_in.shape == (ROWS, TOKENS, HIDDEN) and stand_in.untyped_storage().nbytes() == stand_in.itemsize


def settle(holds):
    """gloo's threads let go of a buffer a moment after the wait."""
    end = time.monotonic() + 1
    while not holds() and time.monotonic() < end:
        time.sleep(0.005)


def living(run, mode, uses, kept):
    """How many of the whole inputs that were gathered live after each forward, and after its backward, without the
    garbage collector's help; and whether the input itself does.
    """
    layers, seen, counts = Layers().cut(run, mode), [], []
    true = entrance._start_gather

    def start_gather(x, group):
        whole, work = true(x, group)
        seen.append(StorageWeakRef(whole.untyped_storage()))
        return whole, work

    def alive():
        return sum(not ref.expired() for ref in seen)

    gc.collect()
    gc.disable()
    try:
        with mock.patch.object(entrance, "_start_gather", start_gather):
            for use in uses:
                x = numbers(1, TOKENS // run.size, D).requires_grad_()  # a row alone is in order as it arrives
                given = StorageWeakRef(x.untyped_storage())
                y = use(layers, x)
                settle(lambda: alive() <= kept)
                counts.append(alive())
                y.sum().backward()
                del x, y
                settle(lambda: not alive())
                counts += [alive(), given.expired()]
        return counts, len(seen)
    finally:
        gc.enable()


def used(layers, x):
    return layers(x)


def one_left_out(layers, x):
    return layers.row(layers.columns[0](x).sin())


@pytest.mark.parametrize(("mode", "kept", "gathers"), [("sp", 0, 2), ("sp, whole inputs kept", 1, 1)])
def test_nothing_is_left_after_backward(pool, mode, kept, gathers):
    assert pool.run(2, living, mode, [used, used], kept) == [([kept, 0, True] * 2, 2 * gathers)] * 2


@SEQUENCES
def test_what_waits_for_a_column_goes_where_the_region_ends(pool, mode):
    """A column that was left out may still come until then."""
    kept = 1 if mode == "sp, whole inputs kept" else 0
    for counts, _ in pool.run(2, living, mode, [one_left_out, used], kept):
        assert counts == 2 * [kept, 0, True]


def the_first_once_more(layers, x):
    return layers.row(layers.columns[0](x) * layers.product(x))


def held_by_the_graph(run, mode, use, tied):
    """How many of the gathered inputs live after a backward while there is still the output, as there is of a loss."""
    layers, seen = Layers(columns=3, tied=tied).cut(run, mode), []
    true = entrance._start_gather

    def start_gather(x, group):
        whole, work = true(x, group)
        seen.append(StorageWeakRef(whole.untyped_storage()))
        return whole, work

    with mock.patch.object(entrance, "_start_gather", start_gather):
        y = use(layers, numbers(1, TOKENS // run.size, D).requires_grad_())  # a row alone is in order as it arrives
        y.sum().backward()
    settle(lambda: all(ref.expired() for ref in seen))
    return len(seen), sum(not ref.expired() for ref in seen)


@pytest.mark.parametrize(("use", "tied"), [(used, False), (used, True), (the_first_once_more, False)])
@SEQUENCES
def test_the_last_gradient_of_a_weight_lets_go_of_the_input(pool, mode, use, tied):
    """Also where two columns have one weight, or one column is called twice, which makes two entrances."""
    gathered = (2 if mode == "sp" else 1) * (2 if use is the_first_once_more else 1)
    assert pool.run(2, held_by_the_graph, mode, use, tied) == [(gathered, 0)] * 2


# -- calls of every kind -----------------------------------------------------------------------------------------------


def twice(layers, x):
    """The same x through the same columns, in one forward."""
    return layers.row(layers.product(x) * layers.product(x) + layers.columns[1](x))


def also_outside(layers, x):
    """The input goes on beside the region."""
    return layers(x).sin() * x + x


def in_another_order(layers, x):
    first, second = layers.columns
    return layers.row(second(x) * first(x).sin())


def one_of_two(layers, x):
    return layers.row(layers.columns[1](x))


def interleaved(layers, x):
    """Two inputs in turn."""
    first, second = layers.columns
    a, b = first(x), first(2 * x)
    return layers.row(a * second(x) + b * second(x * 3))


def interleaved_inputs(layers, x):
    first, second = layers.columns
    other = 2 * x
    a, b = first(x), first(other)
    return layers.row(a * second(x) + b * second(other))


def one_after_the_other(layers, x):
    """The output of a region is the next one's input."""
    return layers(layers(x))


def evaluated_before(layers, x):
    with torch.no_grad():
        layers(x)
        layers.columns[0](x)
    return layers(x)


def inferred_before(layers, x):
    with torch.inference_mode():
        layers(x.detach().clone())
    return layers(x)


def one_column_evaluated(layers, x):
    """The other one's gradient only."""
    with torch.no_grad():
        factor = layers.columns[0](x)
    return layers.row(factor * layers.columns[1](x))


def unfrozen_between(layers, x):
    first, second = layers.columns
    second.weight.requires_grad_(False)
    a = first(x)
    second.weight.requires_grad_(True)
    return layers.row(a * second(x))


def frozen_weights(layers, x):
    layers.columns[0].requires_grad_(False)
    layers.row.requires_grad_(False)
    return layers(x)


def changed_afterwards(layers, x):
    """The outputs of columns and row, in place."""
    return layers.row(layers.columns[0](x).mul_(2) + layers.columns[1](x).add_(1)).mul_(3)


def nothing_of_one(layers, x):
    """A column whose output goes nowhere."""
    layers.columns[1](x)
    return layers.row(layers.columns[0](x))


USES = [
    *(twice, also_outside, in_another_order, one_of_two, interleaved, interleaved_inputs, one_after_the_other),
    *(evaluated_before, inferred_before, one_column_evaluated, unfrozen_between, frozen_weights),
    *(changed_afterwards, nothing_of_one),
]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_calls_of_every_kind(pool, use):
    judged(pool, use)


def test_columns_that_share_a_weight(pool):
    judged(pool, used, tied=True)
    judged(pool, twice, tied=True)


@pytest.mark.parametrize("use", [twice, interleaved_inputs], ids=lambda use: use.__name__)
@pytest.mark.parametrize("ranks", [1, 4])
def test_on_other_numbers_of_ranks(pool, use, ranks):
    judged(pool, use, ranks)


def iterations(run, mode, left_out):
    """The same tensor in three iterations with updates between: the last gradients of the columns and of x, beside
    those of plain layers.
    """
    x, results = numbers(ROWS, TOKENS, D), []
    for layers in (Layers(), Layers().cut(run, mode)):
        cut = isinstance(layers.row, RowParallelLinear) and mode != "tp"
        given = (x.tensor_split(run.size, 1)[run.rank] if cut else x).clone().requires_grad_()
        optimizer = torch.optim.SGD(layers.columns.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            given.grad = None
            (one_left_out if step == left_out else used)(layers, given).square().sum().backward()
            optimizer.step()
        results.append((given.grad, [(p.grad, getattr(p, "held", None)) for p in layers.columns.parameters()]))
    (true_dx, true), (dx, ours) = results
    share = near(dx, true_dx.tensor_split(run.size, 1)[run.rank] if mode != "tp" else true_dx)
    return max(
        share, *(near(grad, mine(held.boxes, whole)) for (grad, held), (whole, _) in zip(ours, true, strict=True))
    )


@pytest.mark.parametrize("left_out", [None, 0, 1])
@EACH_MODE
def test_the_same_tensor_in_several_iterations(pool, mode, left_out):
    """Also after one in which a column was not called."""
    assert max(pool.run(2, iterations, mode, left_out)) <= 1


def microbatches(run, mode, joint):
    """Gradients of two forwards and their backwards in the other order, or one of both; beside one after the other."""
    results = []
    for together in (False, True):
        layers = Layers().cut(run, mode)
        inputs = [numbers(ROWS, TOKENS // (1 if mode == "tp" else run.size), D, seed=seed) for seed in (2, 3)]
        inputs = [x.requires_grad_() for x in inputs]
        if not together:
            for x in reversed(inputs):
                layers(x).square().sum().backward()
        else:
            losses = [layers(x).square().sum() for x in inputs]
            for loss in [sum(losses)] if joint else reversed(losses):
                loss.backward()
        results.append([tensor.grad for tensor in (*inputs, *layers.parameters())])
    return max(near(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("joint", [False, True])
@EACH_MODE
def test_two_forwards_then_two_backwards(pool, mode, joint):
    assert max(pool.run(2, microbatches, mode, joint)) <= 1


def again(run, mode):
    """Whether a second backward through a graph that was kept gives the same bits."""
    layers = Layers().cut(run, mode)
    x = numbers(ROWS, TOKENS // (1 if mode == "tp" else run.size), D).requires_grad_()
    y, tensors = layers(x).square().sum(), [x, *layers.parameters()]
    first = torch.autograd.grad(y, tensors, retain_graph=True)
    second = torch.autograd.grad(y, tensors)
    return all(map(torch.equal, first, second))


@EACH_MODE
def test_a_second_backward_through_a_graph_that_is_kept(pool, mode):
    assert pool.run(2, again, mode) == [True] * 2


def changed_in_place(run, mode):
    """What is raised in backward after the input has changed, or the gradient of the first column."""
    layers = Layers().cut(run, mode)
    x = numbers(ROWS, TOKENS // (1 if mode == "tp" else run.size), D)
    y = layers(x).sum()
    x.mul_(2)
    try:
        y.backward()
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("mode", ["tp", "sp"])
def test_an_input_that_has_changed_since_is_an_error(pool, mode):
    """As for nn.Linear; what is kept whole is a copy."""
    for told in pool.run(2, changed_in_place, mode):
        assert "has been modified by an inplace operation" in told
    assert pool.run(2, changed_in_place, "sp, whole inputs kept") == [None] * 2


def changed_between_calls(run, mode):
    """An input that changes in place between two columns: the outputs beside those of plain layers."""
    plain, layers = Layers(), Layers().cut(run, mode)
    outs = []
    for each in (plain, layers):
        x = numbers(ROWS, TOKENS, D)
        if each is layers and mode != "tp":
            x = x.tensor_split(run.size, 1)[run.rank].clone()
        with torch.no_grad():
            first = each.columns[0](x)
            x.mul_(2)
            outs.append(first + each.columns[1](x))
    rows = slice(HIDDEN // run.size * run.rank, HIDDEN // run.size * (run.rank + 1))
    return near(outs[1], outs[0][..., rows])


@EACH_MODE
def test_an_input_that_changes_between_two_columns(pool, mode):
    assert max(pool.run(2, changed_between_calls, mode)) <= 1


SHAPES = [(0, TOKENS, D), (ROWS, 0, D), (TOKENS, D), (2, 3, TOKENS, D), (1, TOKENS, D)]


def of_shape(run, mode, shape):
    layers, x = Layers().cut(run, mode), numbers(*shape)
    given = (x.tensor_split(run.size, -2)[run.rank] if mode != "tp" else x).clone().requires_grad_()
    y = layers(given)
    y.square().sum().backward()
    return y.detach(), given.grad, layers.columns[1].weight.grad, layers.columns[1].bias.grad


@pytest.mark.parametrize("shape", SHAPES)
@EACH_MODE
def test_inputs_of_any_number_of_dimensions(pool, mode, shape):
    """And of no row at all."""
    layers, x = Layers(), numbers(*shape).requires_grad_()
    y = layers(x)
    y.square().sum().backward()
    outs, dx, dw, db = zip(*pool.run(2, of_shape, mode, shape), strict=True)
    if mode != "tp":
        outs, dx = [torch.cat(outs, -2)], [torch.cat(dx, -2)]
    assert all(out.shape == y.shape for out in outs)
    if x.numel():
        assert all(near(out, y.detach()) <= 1 for out in outs) and all(near(each, x.grad) <= 1 for each in dx)
        assert near(torch.cat(dw), layers.columns[1].weight.grad) <= 1
        assert near(torch.cat(db), layers.columns[1].bias.grad) <= 1
    else:
        assert not any(grad.any() for grad in (*dw, *db))


def cotangent(y, seed):
    """Not contiguous."""
    return numbers(D, *y.shape[:2], seed=seed).movedim(0, 2)


def strided(run, mode):
    """Inputs and cotangents that are not contiguous."""
    layers = Layers().cut(run, mode)
    whole = numbers(TOKENS, D, ROWS)
    x = (whole.tensor_split(run.size, 0)[run.rank] if mode != "tp" else whole).clone().requires_grad_()
    y = layers(x.movedim(2, 0))
    y.backward(cotangent(y, run.rank if mode == "sp" else 0))
    return x.grad, layers.columns[0].weight.grad


@pytest.mark.parametrize("mode", ["tp", "sp"])
def test_tensors_that_are_not_contiguous(pool, mode):
    layers, x = Layers(), numbers(TOKENS, D, ROWS).requires_grad_()
    y = layers(x.movedim(2, 0))
    pieces = [cotangent(part, rank) for rank, part in enumerate(y.split(TOKENS // 2, 1))]
    y.backward(torch.cat(pieces, 1) if mode == "sp" else cotangent(y, 0))
    dx, dw = zip(*pool.run(2, strided, mode), strict=True)
    assert near(torch.cat(dx) if mode == "sp" else dx[0], x.grad) <= 1
    assert near(torch.cat(dw), layers.columns[0].weight.grad) <= 1


def copied(run):
    try:
        copy.deepcopy(Layers().cut(run, "tp"))
    except TypeError as error:
        return str(error)


def test_a_deep_copy_is_refused(pool):
    """A group cannot be copied."""
    assert all("ProcessGroup" in told for told in pool.run(2, copied))


def refused(run):
    try:
        Region(run.world, save_gathered=True)
    except ValueError as error:
        return str(error)


def test_a_mode_of_another_mode_is_refused(pool):
    text = "save_gathered=True is a mode of sequence_parallel=True: without it nothing is gathered"
    assert pool.run(2, refused) == [text] * 2


def autocasted(run, mode, dtype):
    """Gradients under autocast."""
    layers = Layers().float().cut(run, mode)
    whole = numbers(ROWS, TOKENS, D).to(dtype)
    x = (whole.tensor_split(run.size, 1)[run.rank] if mode != "tp" else whole).clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layers(x)
    y.float().square().sum().backward()
    return y.dtype, x.grad, layers.columns[0].weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@EACH_MODE
def test_autocast(pool, mode, dtype):
    layers, x = Layers().float(), numbers(ROWS, TOKENS, D).to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layers(x)
    y.float().square().sum().backward()
    kinds, dx, dw = zip(*pool.run(2, autocasted, mode, dtype), strict=True)
    dx, dw = torch.cat(dx, 1) if mode != "tp" else dx[0], torch.cat(dw)
    assert set(kinds) == {y.dtype} and (dx.dtype, dw.dtype) == (dtype, torch.float32)
    assert (dx - x.grad).abs().max() < 0.05 * x.grad.abs().max()
    expected = layers.columns[0].weight.grad
    assert (dw - expected).abs().max() < 0.05 * expected.abs().max()


# -- recomputation -----------------------------------------------------------------------------------------------------


def recomputed(run, mode, names):
    """Whether gradients have the bits of a backward without recomputation; how many forwards ran again."""
    results = []
    for parts in ([], names):
        block = cut_module(run, Shape(kv_heads=4), MODES[mode])
        counts = recompute([block.get_submodule(name) for name in parts])
        x = numbers(ROWS, TOKENS // (1 if mode == "tp" else run.size), 16).requires_grad_()
        block(x).square().sum().backward()
        results.append([tensor.grad for tensor in (x, *block.parameters())])
    return all(map(torch.equal, *results)), counts.reruns


@pytest.mark.parametrize(
    "names", [("",), ("attention",), ("attention", "mlp"), ("attention.q",), ("attention.k",), ("mlp.down",)]
)
@EACH_MODE
def test_recomputation_of_parts(pool, mode, names):
    assert pool.run(2, recomputed, mode, names) == [(True, len(names))] * 2
