"""Buckets: how parameters are dealt into them, where gradients lie, and what they are before, while and after the
collective runs.
"""

import itertools

import pytest
import torch
from torch import nn

from collectives import comm
from collectives.flat import Bucket, deal

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def model(text):
    """Parameters by name: `a1 b20h` are a with 1 element of 8 bytes, and b with 20 of 2 bytes."""
    dtypes = {"d": F64, "s": F32, "h": BF16}
    params = {}
    for word in text.split():
        kind = word[-1] if word[-1] in dtypes else "d"
        params[word[0]] = nn.Parameter(torch.zeros(int(word[1:].rstrip("dsh")), dtype=dtypes[kind]))
    return params


def dealt(text, cap):
    """The buckets as text: each a word of its members' letters."""
    params = model(text)
    names = {param: name for name, param in params.items()}
    return " ".join("".join(names[param] for param in bucket) for bucket in deal(list(params.values()), cap))


@pytest.mark.parametrize(
    ("params", "cap", "buckets"),
    [
        ("a1 b3 c1000 d7", 1, "d c b a"),  # each its own
        ("a1 b3 c1000 d7", 16, "d c b a"),  # b and a are 32 bytes together
        ("a1 b3 c1000 d7", 32, "d c ba"),
        ("a1 b3 c1000 d7", 1 << 20, "dcba"),
        ("a1 b1 c1 d1 e1", 16, "ed cb a"),  # the last one, a, is not full
        ("a1 b1 c9 d1 e1", 16, "ed c ba"),  # c is larger than the cap
        ("a2 b1 c1", 16, "cb a"),  # full is full
        ("a0 b0 c1", 8, "cba"),  # empty ones fit into any
        ("a0 b1", 1, "b a"),
        ("a1s b1h c1s d1h", 100, "db ca"),  # one dtype each; b comes before a
        ("a1h b1h c1s d1h", 100, "c dba"),  # c is complete before a, the last of the bucket that was opened first
        ("a1h b1s c1h d1s e1h f1s", 4, "f d ec b a"),  # what fills up in one dtype does not close the other's
        ("a1", 100, "a"),
        ("", 100, ""),
    ],
)
def test_dealt_in_reverse_order_into_buckets_of_one_dtype(params, cap, buckets):
    """A bucket stands where backward completes it: at its last member's place."""
    assert dealt(params, cap) == buckets


def test_every_parameter_is_dealt_once_and_every_bucket_fits():
    for seed, cap in itertools.product(range(20), (1, 16, 64, 1000)):
        numbers = torch.Generator().manual_seed(seed)
        sizes = torch.randint(12, (9,), generator=numbers).tolist()
        kinds = torch.randint(3, (9,), generator=numbers).tolist()
        params = [nn.Parameter(torch.zeros(n, dtype=(F32, F64, BF16)[k])) for n, k in zip(sizes, kinds, strict=True)]
        buckets = deal(params, cap)
        assert sorted(id(p) for bucket in buckets for p in bucket) == sorted(map(id, params))
        assert all(len({p.dtype for p in bucket}) == 1 for bucket in buckets)
        assert all(len(bucket) == 1 or sum(p.nbytes for p in bucket) <= cap for bucket in buckets)
        place = {id(p): i for i, p in enumerate(reversed(params))}
        places = [[place[id(p)] for p in bucket] for bucket in buckets]
        assert all(members == sorted(members) for members in places)
        assert [members[-1] for members in places] == sorted(members[-1] for members in places)


# -- a bucket ----------------------------------------------------------------------------------------------------------


def layouts():
    zeros = [torch.zeros(3, 2), torch.zeros(2, 3).t(), torch.zeros(()), torch.zeros(0, 2), torch.zeros(4, 4)[::2]]
    return [nn.Parameter(tensor) for tensor in (*zeros, torch.zeros(2, 3, 4).permute(1, 2, 0))]


def test_views_fill_the_buffer_in_order_without_overlap():
    """In the parameter's shape and strides, where it is dense; a strided one lies dense in the bucket."""
    params = layouts()
    bucket = Bucket(params)
    for number, param in enumerate(params):
        view = bucket.views[param]
        assert view.shape == param.shape
        assert view.stride() == (param.stride() if number != 4 else (4, 1))
        view += number + 1
    sizes = torch.tensor([param.numel() for param in params])
    assert bucket.buffer.tolist() == torch.arange(1, 7).repeat_interleave(sizes).tolist()


def test_notes_lie_behind_the_views():
    params = layouts()
    bucket = Bucket(params, notes=3)
    for view in bucket.views.values():
        view.fill_(1)
    bucket.notes.copy_(torch.tensor([7, 8, 9]))
    assert bucket.buffer.tolist() == [1] * sum(param.numel() for param in params) + [7, 8, 9]
    assert Bucket(params).notes.numel() == 0


@pytest.mark.parametrize("notes", [0, 4])
def test_a_bucket_without_parameters_has_room_for_notes_only(notes):
    bucket = Bucket([], notes=notes, device=torch.device("meta"))
    assert (bucket.buffer.numel(), bucket.buffer.dtype, bucket.buffer.device.type) == (notes, F32, "meta")
    assert bucket.notes.numel() == notes and bucket.views == {} and bucket.missing == set()
    assert Bucket([], notes=notes).buffer.device.type == "cpu"


def test_collect_moves_a_gradient_into_its_place():
    """Copied if it is another tensor, in any order in memory; left alone if it is the view."""
    params = layouts()
    bucket = Bucket(params)
    for param in params:
        grad = torch.randn(param.shape[::-1]).permute(tuple(reversed(range(param.ndim))))
        param.grad = grad.clone()
        bucket.collect(param)
        assert param.grad is bucket.views[param] and torch.equal(param.grad, grad)
        param.grad += 1
        bucket.collect(param)
        assert param.grad is bucket.views[param] and torch.equal(param.grad, grad + 1)


def once_round(run, wire):
    """A bucket of three, whose second has no gradient on rank 0, for two steps: what it and p.grad are, on the way.

    In the second step the bucket expects no more than was used in the first, by which the first parameter was not.
    """
    params = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    bucket = Bucket(params)
    for step in range(2):
        assert bucket.work is None and bucket.used == set() and bucket.missing == set(params[step:])
        for number, param in enumerate(params):
            param.grad = None if number == 1 and run.rank == 0 else torch.full((2,), 4.0 * number + step)
        own = params[2].grad
        bucket.start(comm.SUM, group=run.world, wire=wire)
        assert bucket.work is not None and all(param.grad is None for param in params)
        assert bucket.used == ({*params} if run.rank else {params[0], params[2]})
        assert bucket.sent.dtype == (wire or torch.float32)
        own += 1000  # autograd's own tensor is free again
        bucket.wait()
        assert bucket.work is None and all(param.grad is None for param in params)
        bucket.hand_out(set(params[1:]))
        assert params[0].grad is None and all(param.grad is bucket.views[param] for param in params[1:])
        assert bucket.buffer.tolist() == [
            *[run.size * step] * 2,
            *[(run.size - 1) * (4 + step)] * 2,
            *[run.size * (8 + step)] * 2,
        ]
    return bucket.sent is bucket.buffer


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_bucket_goes_round(pool, ranks, wire):
    assert pool.run(ranks, once_round, wire) == [True] * ranks


def notes_on_the_way(run, dtype, op, wire):
    """Rank r notes 2^r at place r and 1 at the last, in two steps: what comes back, with the gradient's."""
    param = nn.Parameter(torch.zeros(2, dtype=dtype))
    bucket, steps = Bucket([param], notes=run.size + 1), []
    for _ in range(2):
        param.grad = torch.tensor([4.0 * run.size, 0], dtype=dtype)
        bucket.notes.copy_(torch.tensor([2**run.rank * (place == run.rank) for place in range(run.size)] + [1]))
        bucket.start(op, group=run.world, wire=wire)
        bucket.wait()
        bucket.hand_out({param})
        assert bucket.notes.dtype == param.grad.dtype == dtype
        steps.append((param.grad.tolist(), bucket.notes.tolist()))
    return steps


@pytest.mark.parametrize("wire", [None, BF16])
@pytest.mark.parametrize("op", [comm.SUM, comm.AVG])
@pytest.mark.parametrize("dtype", [F64, F32, BF16, torch.float16])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_notes_travel_with_the_gradients(pool, ranks, dtype, op, wire):
    """And are reduced as they are."""
    parts = ranks if op == comm.AVG else 1
    notes = [2**rank / parts for rank in range(ranks)] + [ranks / parts]
    step = [4.0 * ranks * ranks / parts, 0], notes
    assert pool.run(ranks, notes_on_the_way, dtype, op, wire) == [[step] * 2] * ranks
