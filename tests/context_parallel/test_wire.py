"""What a rank sends, forward and backward: the sequence of calls, the bytes of formula and of sockets."""

import itertools

import pytest
import torch

from collectives import comm, demo
from collectives.ledger import Ledger
from collectives.watch import watching
from context_parallel import ORDERS
from tests.context_parallel.cases import METHODS, Case, attend, part
from tests.recorder import recording

SHAPE = Case(B=2, T=96, H=12, KV=6, K=8)  # which divides by 1, 2, 3 and 4 ranks, in every order
EACH_METHOD = pytest.mark.parametrize("method", [*METHODS, "ring_ulysses 2"])


def step(run, case, times=1):
    """Calls, bytes in the ledger and on the sockets, each of (forward, backward), of the last of so many times."""
    mine = case.slots(run.size)[run.rank]
    q, k, v, dout = (part(x, mine) for x in case.tensors())
    inputs = [x.requires_grad_() for x in (q, k, v)]
    attention, places = attend(run, case.method), case.places(run.size)
    for _ in range(times):
        out, *forward = counted(run, attention, *inputs, places)
        _, *backward = counted(run, out.backward, dout)
    return tuple(zip(forward, backward, strict=True))


def counted(run, call, *args):
    """What it returns, its calls (op, about, elements, ranks of the group), bytes in the ledger, and on the sockets."""
    comm.barrier(group=run.world)
    before = demo.bytes_written()
    with watching(book := Ledger()), recording() as recorder:
        result = call(*args)
    sent = demo.bytes_since(before)
    told = [(c.op, c.about, c.elements, c.ranks) for c in recorder.calls]
    return result, told, sum(row.algorithm for row in book.rows()), sent


def elements(case, ranks):
    """b = B·T/P·D_kv, and the same of queries."""
    n = case.B * case.slots(ranks).shape[1] * case.K
    return n * case.KV, n * case.H


def formula(case, ranks):
    """Bytes that a rank sends in forward and in backward. e: of an element; a: of one that is accumulated."""
    P, e = ranks, case.dtype.itemsize
    a = max(e, 4)
    kv, queries = elements(case, P)
    if case.method == "ring":
        return 2 * (P - 1) * kv * e, 2 * (P - 1) * kv * e + (2 * P * kv * a if P > 1 else 0)
    if case.method.startswith("all_gather"):
        again = 0 if "kept" in case.method else 2 * (P - 1) * kv * e
        return 2 * (P - 1) * kv * e, 2 * (P - 1) * kv * a + again
    U = P if case.method == "ulysses" else int(case.method.split()[1])
    R, copies = P // U, max(1, U // case.KV)
    exchanged = (2 * queries + 2 * kv * copies) * (U - 1) // U * e
    ring = 2 * (R - 1) * kv * copies * e
    return exchanged + ring, exchanged + ring + (2 * R * kv * copies * a if R > 1 else 0)


def check_bytes(results, case, ranks):
    for calls, ledger, sent in results:
        assert ledger == formula(case, ranks)
        for ours, true, made in zip(sent, ledger, calls, strict=True):
            assert ours is None or abs(ours - true) <= 0.01 * true + 4096 * len(made)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_bytes_are_the_formula(pool, method, ranks):
    """In the ledger exactly; on the sockets within 1 % and 4 KB a call."""
    H, KV = (12, 6) if ranks == 3 or method != "ulysses" else (12, 12)
    case = Case(method, **shape(H=H, KV=KV))
    check_bytes(pool.run(ranks, step, case, 2), case, ranks)


def shape(**changes):
    return {name: getattr(SHAPE, name) for name in ("B", "T", "H", "KV", "K")} | changes


@pytest.mark.parametrize(("ranks", "neighbours"), [(4, 2), (4, 1), (4, 4), (2, 2)])
def test_bytes_of_both(pool, ranks, neighbours):
    case = Case(f"ring_ulysses {neighbours}", **shape(H=8, KV=4))
    check_bytes(pool.run(ranks, step, case, 2), case, ranks)


@pytest.mark.parametrize("method", ["ulysses", "ring_ulysses 2"])
@pytest.mark.parametrize("KV", [1, 2])
def test_copies_of_heads_are_sent(pool, method, KV):
    """Where there are fewer KV heads than ranks that share them; no more of them than that."""
    case = Case(method, **shape(H=8, KV=KV))
    check_bytes(pool.run(4, step, case, 2), case, 4)


@pytest.mark.parametrize("method", ["ring", "all_gather", "all_gather, kept"])
def test_keys_are_sent_once_a_kv_head(pool, method):
    """However many queries share them: 1, 3 or 12."""
    for H in (1, 3, 12):
        case = Case(method, **shape(H=H, KV=1))
        assert formula(case, 4) == formula(Case(method, **shape(H=1, KV=1)), 4)
        check_bytes(pool.run(4, step, case, 2), case, 4)


@EACH_METHOD
def test_in_bf16_gradients_of_keys_travel_in_float32(pool, method):
    """Where they are added up on the way; an all_to_all adds nothing."""
    case = Case(method, **shape(H=8, KV=4), dtype=torch.bfloat16)
    check_bytes(pool.run(4, step, case, 2), case, 4)


@pytest.mark.parametrize("method", ["ring", "all_gather", "all_gather, kept", "ring_ulysses 2"])
def test_blocks_that_nobody_needs_travel_too(pool, method):
    """Documents that end with a rank's part, a mask that hides half, padding: the same calls."""
    told = set()
    for order, causal, lengths in itertools.product(ORDERS, (True, False), ((), (24, 24, 24), (1,) * 96)):
        case = Case(method, order, causal, **shape(H=8, KV=4), lengths=lengths)
        told.add(str([calls for calls, *_ in pool.run(4, step, case)]))
    assert len(told) == 1


# -- the sequence ------------------------------------------------------------------------------------------------------


def words(calls, names):
    return ", ".join(f"{op} {about or names[elements]}" for op, about, elements, _ in calls)


def test_the_sequence_of_a_ring(pool):
    """Of three ranks, by whose block it is: what is awaited in forward, the gradient one step behind in backward."""
    kv, _ = elements(SHAPE, 3)
    pictures = {
        0: ("kv 2, kv 1", "kv 2, dkv 2, kv 1, dkv 1, dkv 0"),
        1: ("kv 0, kv 2", "kv 0, dkv 0, kv 2, dkv 2, dkv 1"),
        2: ("kv 1, kv 0", "kv 1, dkv 1, kv 0, dkv 0, dkv 2"),
    }
    for rank, (told, *_) in enumerate(pool.run(3, step, SHAPE)):
        for calls, picture in zip(told, pictures[rank], strict=True):
            assert words(calls, {}).replace("exchange ", "") == picture
            assert {(op, count, group) for op, _, count, group in calls} == {("exchange", 2 * kv, (0, 1, 2))}


@pytest.mark.parametrize(
    ("method", "forward", "backward"),
    [
        ("all_gather", "all_gather_single kv", "all_gather_single kv, reduce_scatter_single kv"),
        ("all_gather, kept", "all_gather_single kv", "reduce_scatter_single kv"),
    ],
)
def test_the_sequence_of_a_gather(pool, method, forward, backward):
    kv, _ = elements(SHAPE, 3)
    for told, *_ in pool.run(3, step, Case(method, **shape())):
        assert [words(calls, {3 * 2 * kv: "kv"}) for calls in told] == [forward, backward]


def test_the_sequence_of_ulysses(pool):
    """Queries, keys and values there and the output back; gradients the other way."""
    kv, queries = elements(SHAPE, 3)
    for told, *_ in pool.run(3, step, Case("ulysses", **shape())):
        for calls in told:
            assert words(calls, {queries: "q", kv: "kv"}).replace("all_to_all_single ", "") == "q, kv, kv, q"


def test_the_sequence_of_both(pool):
    """The all_to_alls among neighbours, in between the ring of those that are as far from each other."""
    case = Case("ring_ulysses 2", **shape(H=8, KV=4))
    kv, queries = elements(case, 4)
    for rank, (told, *_) in enumerate(pool.run(4, step, case)):
        own, other = rank // 2, 1 - rank // 2
        pictures = (
            f"all q, all kv, all kv, kv {other}, all q",
            f"all q, kv {other}, dkv {other}, dkv {own}, all kv, all kv, all q",
        )
        for calls, picture in zip(told, pictures, strict=True):
            text = words(calls, {queries: "q", kv: "kv"})
            assert text.replace("exchange ", "").replace("all_to_all_single", "all") == picture
            groups = {(op, group) for op, _, _, group in calls}
            assert groups == {("all_to_all_single", (2 * own, 2 * own + 1)), ("exchange", (rank % 2, rank % 2 + 2))}


@EACH_METHOD
def test_a_group_of_one_sends_nothing(pool, method):
    case = Case(method.replace("2", "1"), T=15)
    for _, ledger, sent in pool.run(1, step, case):
        assert ledger == (0, 0) and sent in ((0, 0), (None, None))
