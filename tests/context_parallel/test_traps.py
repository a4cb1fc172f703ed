"""Known traps of context parallelism, by their names."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F

from context_parallel import Places, cut, ring_attention, slots
from context_parallel.ulysses import by_heads, check_heads
from tests.context_parallel import dense
from tests.context_parallel.cases import METHODS, Case, attend, outcome, outcomes, rounded_otherwise, worst
from tests.training import furthest

EACH_METHOD = pytest.mark.parametrize("method", [*METHODS, "ring_ulysses 2"])

# -- T73: merging partial softmax overflows ----------------------------------------------------------------------------


def far_apart(case, ranks, loud):
    """Scores of the keys on rank `loud` are 150 above the others'; all are exact in float32."""
    q, k, v, dout = case.tensors()
    q, k = ((x * 2).round() / 8 for x in (q, k))
    q[..., 0], k[..., 0] = 2.0, 0.0  # and K^-½ is ½
    k[:, :, case.slots(ranks)[loud], 0] = 150.0
    return [q, k, v, dout]


@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("ranks", "loud"), [(2, 0), (2, 1), (4, 0), (4, 2), (4, 3)])
def test_t73_blocks_150_apart(pool, method, causal, ranks, loud):
    """Without a mask the ranks see the loud block first, in between and last: the order of blocks does not matter. The
    output is right to 1e-6, gradients to twice the error of one device: an lse of 150 is rounded by 1e-5.
    """
    case = Case(method, "contiguous", causal, dtype=torch.float32)
    tensors = far_apart(case, ranks, loud)
    true = gradients(lambda q, k, v: dense.attention(q, k, v, case.documents(), causal), [x.double() for x in tensors])
    plain = functools.partial(F.scaled_dot_product_attention, is_causal=causal, enable_gqa=True)
    results = [torch.cat(pieces, 2) for pieces in zip(*pool.run(ranks, outcome, case, tensors), strict=True)]
    assert furthest(results[0], true[0]) <= 1e-6
    for ours, single, right in zip(results[1:], gradients(plain, tensors)[1:], true[1:], strict=True):
        assert furthest(ours, right) <= 2 * furthest(single, right) + 1e-6


def gradients(attention, tensors):
    """(output, dq, dk, dv)."""
    inputs = [x.detach().clone().requires_grad_() for x in tensors[:3]]
    out = attention(*inputs)
    out.backward(tensors[3])
    return [x.detach() for x in (out, *(x.grad for x in inputs))]


# -- T75: partial results kept in low precision ------------------------------------------------------------------------

LAYERS, STACK = 8, Case(T=64, B=4, H=4, KV=2, K=16)


def stack(attention, tensors):
    """(output, dq, dk, dv) of layers that each add to the queries."""

    def layers(q, k, v):
        for _ in range(LAYERS):
            q = q + attention(q, k, v)
        return q

    return [x.double() for x in gradients(layers, tensors)]


def stack_on_ranks(run, method, tensors):
    everyones = STACK.slots(run.size)
    places = Places.of(STACK.documents(), everyones)
    attention = functools.partial(attend(run, method), places=places)
    return stack(attention, [cut(x, everyones[run.rank], dim=2) for x in tensors])


def errors(results, true):
    """Of each tensor, as a share of its size."""
    return [float((ours - right).norm() / right.norm()) for ours, right in zip(results, true, strict=True)]


@pytest.mark.parametrize(
    ("method", "ranks"),
    [("ring", 2), ("ring", 4), ("ring", 8), ("all_gather", 4), ("ulysses", 4), ("ring_ulysses 2", 4)],
)
def test_t75_bf16_is_as_good_as_on_one_device(pool, method, ranks):
    """At most twice its error against float64, in each of output, dq, dk and dv; and not growing with the ring: eight
    ranks are as near as one.
    """
    tensors = [x.bfloat16() for x in STACK.tensors()]
    plain = functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    true = stack(plain, [x.double() for x in tensors])
    single = errors(stack(plain, tensors), true)
    alone = errors(pool.run(1, stack_on_ranks, "ring", tensors)[0], true)
    everyones, results = STACK.slots(ranks), []
    for pieces in zip(*pool.run(ranks, stack_on_ranks, method, tensors), strict=True):
        results.append(torch.empty(*pieces[0].shape[:2], STACK.T, STACK.K, dtype=torch.float64))
        for mine, piece in zip(everyones, pieces, strict=True):
            results[-1][:, :, mine] = piece
    for ours, of_one, of_ring_of_one in zip(errors(results, true), single, alone, strict=True):
        assert ours <= 2 * of_one
        assert ours <= 1.1 * of_ring_of_one


@pytest.mark.parametrize(
    ("method", "ranks"),
    [("ring", 1), ("ring", 2), ("ring", 8), ("all_gather", 4), ("ulysses", 4), ("ring_ulysses 2", 4)],
)
def test_t75_results_are_rounded_once(pool, method, ranks):
    """Of one layer each number is that of float64, rounded to bf16 at the end, but for few that lie between two."""
    case = Case(method, T=64, H=8, KV=4, K=16, lengths=(40,), dtype=torch.bfloat16)
    assert rounded_otherwise(case, pool.run(ranks, outcome, case)) < 0.01


# -- T76: rotary positions ---------------------------------------------------------------------------------------------


def rotated(x, positions):
    """[B, H, T, K] by the angles of positions [T]: a query and a key see how far apart they are."""
    half = x.shape[-1] // 2
    angles = positions[:, None] / 7.0 ** torch.arange(half, dtype=x.dtype)
    a, b = x.split(half, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def with_positions(run, case):
    everyones = case.slots(run.size)
    mine = everyones[run.rank]
    q, k, v, _ = (cut(x, mine, dim=2) for x in case.tensors())
    positions = cut(torch.arange(case.T), mine, dim=0)
    return attend(run, case.method)(rotated(q, positions), rotated(k, positions), v, case.places(run.size))


@EACH_METHOD
@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped"])
def test_t76_positions_are_cut_as_tokens_are(pool, method, order):
    for ranks in (4,) if "2" in method else (2, 4):
        case = Case(method, order)
        q, k, v, _ = case.tensors()
        positions = torch.arange(case.T)
        true = dense.attention(rotated(q, positions), rotated(k, positions), v, case.documents())
        for mine, out in zip(case.slots(ranks), pool.run(ranks, with_positions, case), strict=True):
            assert furthest(out, true[:, :, mine]) <= 1e-12


# -- T80: lengths that do not divide -----------------------------------------------------------------------------------


@EACH_METHOD
@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize(("ranks", "T"), [(2, 15), (2, 14), (4, 20), (4, 15)])
def test_t80_padding_is_seen_by_nobody(pool, method, order, ranks, T):
    """Nor sees anything: padded queries give exactly 0, and so are all gradients there, whatever stands there."""
    if ranks == 2:
        method = method.replace("ring_ulysses 2", "ring_ulysses 1")
    chosen = [Case(method, order, causal, T) for causal in (True, False)]
    for case, results in zip(chosen, zip(*pool.run(ranks, outcomes, chosen), strict=True), strict=True):
        assert worst(case, results) <= 1


# -- T83: heads that ranks share ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("H", "KV"), [(8, 2), (4, 4), (8, 1), (12, 4)])
def test_t83_heads_that_four_ranks_can_share(pool, H, KV):
    """With fewer KV heads than ranks each is copied, and the gradients of the copies are added."""
    case = Case("ulysses", H=H, KV=KV, B=2)
    assert worst(case, pool.run(4, outcome, case)) <= 1


@pytest.mark.parametrize(
    ("H", "KV", "ranks", "fine"),
    [
        (6, 3, 4, "[1, 3, 6]"),
        (4, 2, 3, "[1, 2, 4]"),
        (4, 2, 8, "[1, 2, 4]"),
        (1, 1, 2, "[1]"),
        (8, 8, 3, "[1, 2, 4, 8]"),
    ],
)
def test_t83_heads_that_they_cannot_share(H, KV, ranks, fine):
    with pytest.raises(ValueError) as error:
        check_heads(H, KV, ranks)
    assert str(error.value) == f"{ranks} ranks cannot share {H} heads with {KV} KV heads; use one of {fine}"


def refused(run, case):
    try:
        outcome(run, case)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("method", ["ulysses", "ring_ulysses 4"])
def test_t83_are_refused_on_every_rank(pool, method):
    text = "4 ranks cannot share 6 heads with 3 KV heads; use one of [1, 3, 6]"
    assert pool.run(4, refused, Case(method, H=6, KV=3)) == [text] * 4


# -- T84: all-to-all with a batch --------------------------------------------------------------------------------------


def heads_of(run, order):
    """What the attention of a rank is handed, and what comes back from it, untouched."""
    b, h, s = torch.arange(3.0)[:, None, None], torch.arange(4.0)[:, None], torch.arange(8.0)
    whole = (b * 1000 + s * 10 + h)[..., None]
    everyones = slots(order, 8, run.size)
    own = whole[:, :, everyones[run.rank]]
    handed = []

    def attention(q, k, v):
        handed.append((q, k, v))
        return q

    there = everyones.flatten().argsort()
    back = by_heads(own, own, own, (there, there.argsort()), attention, group=run.world)
    return handed[0], torch.equal(back, own), whole


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped"])
def test_t84_all_tokens_of_some_heads(pool, ranks, order):
    """In order, rows apart; and the way back restores every bit."""
    share = 4 // ranks
    for rank, (handed, restored, whole) in enumerate(pool.run(ranks, heads_of, order)):
        assert all(torch.equal(x, whole[:, share * rank : share * (rank + 1)]) for x in handed)
        assert restored


@EACH_METHOD
def test_t84_three_rows_are_three_times_one(pool, method):
    case = Case(method, T=8, lengths=())
    together = pool.run(4, outcome, case)
    for row in range(3):
        tensors = [x[row : row + 1] for x in case.tensors()]
        one = pool.run(4, outcome, Case(method, T=8, B=1), tensors)
        for of_three, of_one in itertools.chain.from_iterable(map(zip, together, one)):
            assert furthest(of_three[row : row + 1], of_one) <= 1e-14


# -- T86: gradients end on their owner ---------------------------------------------------------------------------------


def own_document(run):
    """dv where each rank's tokens are a document by themselves, all keys are alike, and dout is the rank's number."""
    n, everyones = 3, slots("contiguous", 3 * run.size, run.size)
    places = Places.of((torch.arange(n * run.size) // n)[None], everyones, causal=False)
    q, k = torch.zeros(1, 2, n, 4), torch.zeros(1, 1, n, 4)
    v = torch.zeros(1, 1, n, 4, requires_grad=True)
    out = ring_attention(q, k, v, places, group=run.world)
    out.backward(torch.full_like(out, run.rank + 1.0))
    return v.grad


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_t86_gradients_come_home(pool, ranks):
    """Two heads of three queries that look a third at each key: 2 times the number of the rank."""
    for rank, dv in enumerate(pool.run(ranks, own_document)):
        torch.testing.assert_close(dv, torch.full_like(dv, 2.0 * (rank + 1)))
