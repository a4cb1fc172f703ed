"""What autograd keeps of a method, what of it falls with the ranks, and how many blocks of a ring live at once."""

import weakref
from unittest import mock

import pytest
import torch

from collectives.allocated import peak_bytes
from collectives.saved import saving
from context_parallel import ring
from tests.context_parallel.cases import METHODS, Case, attend, part

CASE = {"B": 2, "T": 96, "H": 12, "KV": 6, "K": 8}


def kept(run, case):
    """Bytes that autograd keeps of a call."""
    mine = case.slots(run.size)[run.rank]
    q, k, v, _ = (part(x, mine).clone() for x in case.tensors())
    with saving() as saved:
        out = attend(run, case.method)(
            q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), case.places(run.size)
        )
        nbytes = saved.nbytes()
    del out
    return nbytes


def formula(case, ranks):
    """q, k, v, out, lse; e: bytes of an element, a: of one that is accumulated."""
    P, e = ranks, case.dtype.itemsize
    a, N = max(4, e), case.B * case.T
    queries, kv = N * case.H * case.K, 2 * N * case.KV * case.K
    own = (queries * e + queries * a + N * case.H * a) // P
    if case.method in ("ring", "all_gather"):
        return own + kv * e // P
    if case.method == "all_gather, kept":
        return own + kv * e
    U = P if case.method == "ulysses" else int(case.method.split()[1])
    copies = max(1, U // case.KV)
    indices = 2 * 8 * case.T * U // P  # from ranks to slots, and back
    return own + kv * e * copies // P + indices


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_bytes_kept_are_the_formula(pool, method, ranks, dtype):
    case = Case(method, **CASE | {"KV": 12 if method == "ulysses" else 6}, dtype=dtype)
    assert pool.run(ranks, kept, case) == [formula(case, ranks)] * ranks


@pytest.mark.parametrize(
    ("method", "KV"), [("ring_ulysses 2", 6), ("ring_ulysses 2", 1), ("ulysses", 1), ("ulysses", 2), ("ulysses", 4)]
)
def test_bytes_kept_where_heads_are_exchanged(pool, method, KV):
    """KV heads that are copied are kept as often."""
    case = Case(method, **CASE | {"KV": KV})
    assert pool.run(4, kept, case) == [formula(case, 4)] * 4


def test_what_falls_with_the_ranks(pool):
    """Half of it on twice as many: all of a ring and of gathered keys that are not kept, and of Ulysses all but some
    numbers a token; not keys that are kept, nor heads that are copied.
    """
    ratio = {}
    for method, KV in [*((method, 12) for method in METHODS), ("ulysses", 1)]:
        two, four = (pool.run(ranks, kept, Case(method, **CASE | {"KV": KV}))[0] for ranks in (2, 4))
        ratio[method, KV] = two / four
    assert ratio["ring", 12] == ratio["all_gather", 12] == 2
    assert 1.98 < ratio["ulysses", 12] < 2
    assert ratio["all_gather, kept", 12] < 1.4
    assert ratio["ulysses", 1] < 1.9


# -- on the way --------------------------------------------------------------------------------------------------------


def blocks_alive(run, case):
    """The most blocks of keys and values that live at once, in forward and in backward, and of gradients."""
    alive, most, true = {"kv": [], "dkv": []}, {"kv": 0, "dkv": 0}, ring.pass_on

    def counting(x, group):
        work, coming = true(x, group)
        kind = "dkv" if ring_dtype(x) else "kv"
        alive[kind] += [weakref.ref(x), weakref.ref(coming)]
        living = {id(tensor): tensor for one in alive[kind] if (tensor := one()) is not None}
        most[kind] = max(most[kind], len(living))
        return work, coming

    def ring_dtype(x):
        return x.dtype == torch.float32  # where k and v are bf16

    mine = case.slots(run.size)[run.rank]
    q, k, v, dout = (part(x, mine) for x in case.tensors())
    inputs = [x.requires_grad_() for x in (q, k, v)]
    with mock.patch.object(ring, "pass_on", counting):
        attend(run, case.method)(*inputs, case.places(run.size)).backward(dout)
    return most


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_ring_holds_few_blocks(pool, ranks):
    """The one that was used last, the one in hand and the one that comes: however many ranks there are."""
    for most in pool.run(ranks, blocks_alive, Case(**CASE | {"T": 64}, dtype=torch.bfloat16)):
        assert most["kv"] <= min(ranks, 3) and most["dkv"] <= 3


def peaks(run, case):
    """Bytes at the peak of a forward, and of a backward."""
    mine = case.slots(run.size)[run.rank]
    q, k, v, dout = (part(x, mine) for x in case.tensors())
    inputs = [x.requires_grad_() for x in (q, k, v)]
    attention, places, made = attend(run, case.method), case.places(run.size), []

    def forward():
        made[:] = [attention(*inputs, places)]

    def backward():
        for x in inputs:
            x.grad = None
        made.pop().backward(dout)

    return peak_bytes(forward, run.device, prepare=made.clear), peak_bytes(backward, run.device, prepare=forward)


def test_the_peak_of_a_ring_does_not_grow_with_the_row(pool):
    """32 tokens a rank: the same on 4 and on 8 ranks, where gathered keys take as much more as there are more."""
    block = 2 * 2 * 4 * 32 * 64 * 8  # bytes of k and v of a rank; gloo copies what is gathered of less than 1 MB
    peak = {}
    for method in ("ring", "all_gather, kept"):
        for ranks in (4, 8):
            case = Case(method, "contiguous", causal=False, T=32 * ranks, B=2, H=4, KV=4, K=64)
            peak[method, ranks] = [max(of_ranks) for of_ranks in zip(*pool.run(ranks, peaks, case), strict=True)]
    for four, eight in zip(peak["ring", 4], peak["ring", 8], strict=True):
        assert abs(eight - four) < block / 4
    for four, eight in zip(peak["all_gather, kept", 4], peak["all_gather, kept", 8], strict=True):
        assert eight - four > 3.5 * block
