"""Models that wrap refuses: the same message on every rank, within seconds, naming the first difference."""

from collections import OrderedDict
from unittest import mock

import pytest
import torch
from torch import nn

from collectives import replicas
from ddp import bucketed, naive, overlapped

SECONDS = 10.0


def vector(n=3, dtype=torch.float32, **more):
    return nn.Parameter(torch.zeros(n, dtype=dtype), **more)


def base():
    model = nn.ParameterDict({"a": vector(), "b": nn.Parameter(torch.zeros(2, 3)), "c": vector(4)})
    model.register_buffer("count", torch.zeros(2))
    return model


def changed(key, value):
    model = base()
    model[key] = value
    return model


def reordered():
    return nn.ParameterDict(OrderedDict((name, base()[name]) for name in "bac"))


def renamed():
    model = nn.ParameterDict({"a": vector(), "b2": nn.Parameter(torch.zeros(2, 3)), "c": vector(4)})
    model.register_buffer("count", torch.zeros(2))
    return model


def shorter():
    model = base()
    del model["c"]
    return model


def frozen():
    model = base()
    model["b"].requires_grad_(False)
    return model


def shared():
    model = base()
    model["c"] = model["a"]
    return model


def on_meta():
    return changed("b", nn.Parameter(torch.zeros(2, 3, device="meta")))


def other_buffer():
    model = base()
    model.count = torch.zeros(2, dtype=torch.int16)
    return model


def fewer_buffers():
    model = base()
    model.count = None
    return model


def sparse():
    model = base()
    model.embed = nn.Embedding(4, 2, sparse=True)
    return model


def dense():
    model = base()
    model.embed = nn.Embedding(4, 2)
    return model


A, B, C, COUNT = "a [3] float32", "b [2, 3] float32", "c [4] float32", "count [2] float32"  # of base(), in its order
DIFFERENT = {  # what one rank builds, the first tensor that differs, what it is usually and on that rank
    "shape": (lambda: changed("b", nn.Parameter(torch.zeros(3, 2))), 1, B, "b [3, 2] float32"),
    "numel": (lambda: changed("a", vector(5)), 0, A, "a [5] float32"),
    "dtype": (lambda: changed("c", vector(4, torch.float16)), 2, C, "c [4] float16"),
    "strides": (lambda: changed("b", nn.Parameter(torch.zeros(3, 2).t())), 1, B, f"{B} with strides (1, 2)"),
    "order": (reordered, 0, A, B),
    "name": (renamed, 1, B, "b2 [2, 3] float32"),
    "one more": (lambda: changed("d", vector(1)), 3, COUNT, "d [1] float32"),
    "one less": (shorter, 2, C, COUNT),
    "frozen": (frozen, 1, B, f"{B} frozen"),
    "shared": (shared, 2, C, COUNT),
    "meta": (on_meta, 1, B, f"{B} on meta"),
    "buffer": (other_buffer, 3, COUNT, "count [2] int16"),
    "no buffer": (fewer_buffers, 3, COUNT, "nothing"),
}


def refused(run, wrap, build, odd, members):
    """The message of wrap on the members of a group, one of which builds its model in another way."""
    group = run.new_group(members)
    if group is None:
        return None
    model = DIFFERENT[build][0]() if run.rank == odd else base()
    with pytest.raises(ValueError, match="the models differ") as error:
        wrap(model, group)
    return str(error.value)


@pytest.mark.parametrize(("odd", "members"), [(1, [0, 1]), (0, [0, 1, 2]), (3, [1, 3])])
@pytest.mark.parametrize("what", DIFFERENT)
def test_models_that_differ_are_refused_on_every_rank(pool, what, odd, members):
    """With the ranks of the world, whatever the group; the first difference, though more may follow it."""
    results = pool.run(max(members) + 1, refused, overlapped.wrap, what, odd, members, timeout=SECONDS)
    _, number, first, other = DIFFERENT[what]
    rank = odd
    if odd == members[0]:
        first, other, rank = other, first, members[1]
    message = (
        f"the models differ: tensor {number} is {first} on rank {members[0]}, {other} on rank {rank}; "
        "build the same model on every rank"
    )
    assert results == [message if member in members else None for member in range(len(results))]


def wrapped_unseen(run):
    """What a is after wrap, if nobody compares two models in which a and b stand in another order."""
    model = nn.ParameterDict(OrderedDict((name, vector()) for name in ("ab" if run.rank == 0 else "ba")))
    nn.init.ones_(model["a"])
    with mock.patch.object(replicas, "_compare", lambda settings, mine, group: None):
        naive.wrap(model, run.world)
    return model["a"][0].item()


def test_without_the_comparison_nothing_would_be_refused(pool):
    """And the replicas would not be equal."""
    assert pool.run(2, wrapped_unseen) == [1, 0]


def meta_buffer():
    return nn.BatchNorm1d(2, device="meta")


def complex_parameter():
    return nn.ParameterDict({"phase": vector(2, torch.complex64)})


def expanded_buffer():
    model = nn.Module()
    model.register_buffer("mask", torch.zeros(1).expand(3))
    return model


REFUSED = {
    "expanded": (expanded_buffer, "mask has elements that share their memory: make it contiguous"),
    "meta buffer": (meta_buffer, "buffer running_mean is on the meta device: give it values before wrap"),
    "complex": (complex_parameter, "phase is complex: keep it as a real tensor with a last dimension of 2"),
    "sparse": (sparse, "embed makes sparse gradients, .* sparse=False"),
}


def refused_everywhere(run, what):
    build, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        naive.wrap(build(), run.world)


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_cannot_be_replicated_is_refused(pool, ranks, what):
    pool.run(ranks, refused_everywhere, what, timeout=SECONDS)


def sparse_on_one(run, odd):
    with pytest.raises(ValueError) as error:
        naive.wrap(sparse() if run.rank == odd else dense(), run.world)
    return str(error.value)


@pytest.mark.parametrize("odd", [0, 1])
def test_sparse_gradients_on_one_rank_are_refused_on_all(pool, odd):
    first, second = pool.run(2, sparse_on_one, odd, timeout=SECONDS)
    assert first == second and "embed with sparse gradients" in first


@pytest.mark.parametrize("version", ["bucketed", "overlapped"])
def test_a_cap_of_nothing_is_refused(pool, version):
    pool.run(2, cap_of_nothing, version, timeout=SECONDS)


def cap_of_nothing(run, version):
    with pytest.raises(ValueError, match="a bucket of cap=0 bytes holds nothing: give it at least 1"):
        {"bucketed": bucketed, "overlapped": overlapped}[version].wrap(base(), run.world, cap=0)


def wrapped_otherwise(run, odd):
    with pytest.raises(ValueError) as error:
        overlapped.wrap(base(), run.world, **(odd if run.rank == 1 else {}))
    return str(error.value)


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        ({"cap": 7}, "average=True, cap=7, wire=None"),
        ({"average": False}, "average=False, cap=100, wire=None"),
        ({"wire": torch.bfloat16}, "average=True, cap=100, wire=torch.bfloat16"),
    ],
)
def test_settings_that_differ_are_refused_on_every_rank(pool, odd, told):
    usual = f"average=True, cap={bucketed.CAP}, wire=None"
    told = told.replace("cap=100", f"cap={bucketed.CAP}")
    message = f"wrap was called with {usual} on rank 0, with {told} on rank 1; give the same on every rank"
    assert pool.run(3, wrapped_otherwise, odd, timeout=SECONDS) == [message] * 3


def wire_of(run, dtype):
    with pytest.raises(ValueError, match=f"wire={dtype} cannot carry sums of gradients"):
        overlapped.wrap(base(), run.world, wire=dtype, average=False)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64])
def test_a_wire_that_cannot_carry_a_sum_is_refused(pool, dtype):
    pool.run(2, wire_of, dtype, timeout=SECONDS)


def something_sparse(run):
    """An attribute of that name is no sparse gradient."""
    model = base()
    model.part = nn.Linear(2, 2)
    model.part.sparse = True
    naive.wrap(model, run.world)


def test_an_attribute_called_sparse_is_not_refused(pool):
    pool.run(2, something_sparse, timeout=SECONDS)
