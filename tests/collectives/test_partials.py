"""Gradients that are terms of a sum: over which groups, in which order, on which ranks there is none."""

import functools
from unittest import mock

import pytest
import torch
from torch import nn

from collectives import layout
from collectives.layout import Box, Held
from collectives.partials import sum_partials
from tests.recorder import recording

PAIRS = ((0, 1), (2, 3))


def param(name, grad, sums, dtype=torch.float64):
    """A parameter with this gradient, or None, and these sums."""
    value = nn.Parameter(torch.zeros(() if grad is None else grad.shape, dtype=dtype))
    value.held = Held(name, (Box.whole(value.shape),), None, True, dict(sums))
    value.grad = grad
    return value


def groups(run):
    """Of four ranks all, and the pair that this rank is in."""
    pairs = [run.new_group(pair) for pair in PAIRS]
    return {"tp": run.world, "kv": next(group for group in pairs if group is not None)}


def digit(rank, *shape):
    """A number that tells of each rank whether it was counted, and how often."""
    return torch.full(shape, 10.0**rank, dtype=torch.float64)


def summed(run, labels):
    """The gradients of parameters with no sum, with one, with both."""
    mine = groups(run)
    sums = {"none": {}, "kv": {"kv": mine["kv"]}, "tp": {"tp": mine["tp"]}, "both": mine}
    params = [param(name, digit(run.rank, 2, 3), chosen) for name, chosen in sums.items()]
    before = [each.grad for each in params]
    with recording() as recorder:
        sum_partials(iter(params), labels)
    assert all(each.grad is grad for each, grad in zip(params, before, strict=True))  # in place
    found = {each.held.name: {int(number) for number in each.grad.flatten().tolist()} for each in params}
    return found, [(call.size, call.elements) for call in recorder.calls]


@pytest.mark.parametrize(
    ("labels", "expected", "calls"),
    [  # what the ranks of the first pair have, of the second; one buffer a group, with a number for each parameter
        ((), {"none": None, "kv": None, "tp": None, "both": None}, []),
        (("kv",), {"none": None, "kv": (11, 1100), "tp": None, "both": (11, 1100)}, [(2, 14)]),
        (("tp",), {"none": None, "kv": None, "tp": 1111, "both": 1111}, [(4, 14)]),
        (("kv", "tp"), {"none": None, "kv": (11, 1100), "tp": 1111, "both": 2222}, [(2, 14), (4, 14)]),
        (("tp", "kv"), {"none": None, "kv": (11, 1100), "tp": 1111, "both": 2222}, [(4, 14), (2, 14)]),
        (("cp", "dp"), {"none": None, "kv": None, "tp": None, "both": None}, []),
    ],
)
def test_what_a_declaration_calls_a_partial_sum_is_summed(pool, labels, expected, calls):
    for rank, (found, made) in enumerate(pool.run(4, summed, labels)):
        for name, total in expected.items():
            mine = 10**rank if total is None else total[rank // 2] if isinstance(total, tuple) else total
            assert found[name] == {mine}, name
        assert made == calls


def with_some_missing(run, missing):
    """{name: gradient} where some ranks have none."""
    params = [
        param(name, None if run.rank in ranks else digit(run.rank), {"tp": run.world})
        for name, ranks in missing.items()
    ]
    sum_partials(params, ("tp",))
    return {each.held.name: None if each.grad is None else int(each.grad) for each in params}


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_gradient_that_some_do_not_have_is_zero_there(pool, ranks):
    """All of them have the sum; one that nobody has stays None."""
    missing = {"all": (), "first": (0,), "but the last": tuple(range(ranks - 1)), "nobody": tuple(range(ranks))}
    whole = sum(10**rank for rank in range(ranks))
    expected = {"all": whole, "first": whole - 1, "but the last": 10 ** (ranks - 1), "nobody": None}
    assert pool.run(ranks, with_some_missing, missing) == [expected] * ranks


def of_many_kinds(run):
    """{name: (dtype, shape, sum of the gradient)}, and the elements of each call."""
    kinds = {
        "float64": torch.ones(3, dtype=torch.float64),
        "float32": torch.ones(2, 2),
        "bfloat16": torch.ones(5, dtype=torch.bfloat16),
        "scalar": torch.ones(()),
        "empty": torch.ones(0, 4),
        "transposed": torch.arange(6.0).view(3, 2).t(),
        "a view": torch.ones(4)[1:3],
    }
    params = [param(name, grad, {"tp": run.world}, grad.dtype) for name, grad in kinds.items()]
    with recording() as recorder:
        sum_partials(params, ("tp",))
    found = {p.held.name: (p.grad.dtype, p.grad.tolist()) for p in params}
    return found, [(call.dtype, call.elements) for call in recorder.calls]


def test_every_kind_of_gradient(pool):
    """One buffer a type, empty shards too, and tensors that are not contiguous."""
    short = torch.bfloat16
    expected = {
        "float64": (torch.float64, [3.0] * 3),
        "float32": (torch.float32, [[3.0, 3.0]] * 2),
        "bfloat16": (short, [3.0] * 5),
        "scalar": (torch.float32, 3.0),
        "empty": (torch.float32, []),
        "transposed": (torch.float32, [[0.0, 6.0, 12.0], [3.0, 9.0, 15.0]]),
        "a view": (torch.float32, [3.0, 3.0]),
    }
    calls = [(torch.float64, 4), (torch.float32, 4 + 1 + 0 + 6 + 2 + 5), (short, 6)]
    assert pool.run(3, of_many_kinds) == [(expected, calls)] * 3


def short_gradient_of_a_long_parameter(run):
    """(dtypes of sums, the sum), where only the first rank has a gradient, of a shorter type than its parameter."""
    master = param("master", None, {"tp": run.world}, torch.float32)
    if run.rank == 0:
        master.grad_dtype = None
        master.grad = torch.tensor(3.0, dtype=torch.bfloat16)
    with recording() as recorder:
        sum_partials([master], ("tp",))
    return [call.dtype for call in recorder.calls], float(master.grad)


def test_a_sum_is_made_in_the_dtype_that_all_ranks_know(pool):
    assert pool.run(2, short_gradient_of_a_long_parameter) == [([torch.float32], 3.0)] * 2


def looked_at(run, missing):
    """How often a rank looks at a number: on a GPU it waits for it."""
    params = [param(str(i), None if i < missing else digit(run.rank), {"tp": run.world}) for i in range(3)]
    true, looks = torch.Tensor.__bool__, []

    def look(tensor):
        looks.append(tensor)
        return true(tensor)

    with mock.patch.multiple(torch.Tensor, __bool__=look, tolist=None, item=None):
        sum_partials(params, ("tp",))
    return len(looks)


@pytest.mark.parametrize("missing", [0, 2])
def test_only_for_a_gradient_that_is_missing_numbers_are_looked_at(pool, missing):
    assert pool.run(2, looked_at, missing) == [missing] * 2


def empty_on_this_rank(run):
    """A shard that a rank has nothing of, as where few rows are cut in many: all ranks of the sum hold the same."""
    params = [param("empty", digit(0, 0), {"tp": run.world}), param("none", None, {"tp": run.world})]
    sum_partials(params, ("tp",))
    return params[0].grad.shape, params[1].grad


def test_nothing_but_an_empty_shard(pool):
    assert pool.run(3, empty_on_this_rank) == [((0,), None)] * 3


def random(rank, size, dtype):
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype) * 10 ** (3 * (rank % 2))


def of_random_numbers(run, dtype, before):
    """A gradient that follows `before` other elements in the buffer."""
    params = [
        param(name, random(run.rank, n, dtype), {"tp": run.world}, dtype) for name, n in (("a", before), ("b", 99))
    ]
    sum_partials(params, ("tp",))
    return params[1].grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_have_the_bits_of_rank_order_on_all_ranks(pool, ranks, dtype):
    """Wherever in the buffer an element lies."""
    terms = [random(rank, 99, dtype).float() for rank in range(ranks)]
    for before in (0, 1, 7, 1000):
        found = pool.run(ranks, of_random_numbers, dtype, before)
        assert all(torch.equal(each, found[0]) for each in found)
        if dtype == torch.float32:
            assert torch.equal(found[0], functools.reduce(torch.add, terms))


def by_itself(run):
    """In a group of one the same object, and nothing sent."""
    params = [param("a", digit(0, 3), {"tp": run.world}), param("b", None, {"tp": run.world})]
    with recording() as recorder:
        sum_partials(params, ("kv", "tp"))
    return params[0].grad.tolist(), params[1].grad, len(recorder.calls)


def test_a_group_of_one_sends_nothing(pool):
    assert pool.run(1, by_itself) == [([1.0] * 3, None, 0)]


def after_a_step(run):
    """The sums of shards that were checked, and copies of which have equal bits afterwards."""
    each = param("norm", random(run.rank, 50, torch.float32), {"tp": run.world}, torch.float32)
    layout.check([each], run.world)
    try:
        layout.check_copies([(each.held, each.grad)], run.world)
    except RuntimeError as error:
        before = str(error)
    sum_partials([each], ("tp",))
    layout.check_copies([(each.held, each.grad)], run.world)
    return before, each.held.copies


def test_copies_are_equal_afterwards_and_not_before(pool):
    text = "norm: ranks [1, 2] differ in bits from rank 0, same boxes"
    assert pool.run(3, after_a_step) == [(text, 3)] * 3


def of_masters(run):
    """bfloat16 gradients of float32 parameters, as mixed precision has, where one rank has none."""
    params = [param(name, None, {"tp": run.world}, torch.float32) for name in ("a", "b")]
    for each in params:
        each.grad_dtype = None
    params[0].grad = torch.tensor(2.0**run.rank, dtype=torch.bfloat16)
    if run.rank == 1:
        params[1].grad = torch.tensor(3.0, dtype=torch.bfloat16)
    sum_partials(params, ("tp",))
    return [float(each.grad) for each in params]


def test_short_gradients_of_long_parameters(pool):
    assert pool.run(3, of_masters) == [[7.0, 3.0]] * 3
