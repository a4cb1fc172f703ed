"""Every method against attention in one process, in float64: the output and every gradient, on every rank; what is
padded, what is masked, what needs no gradient, and bits that must not move.
"""

import itertools
import random
import time

import pytest
import torch

from context_parallel import ORDERS
from tests import passthrough
from tests.context_parallel.cases import METHODS, Case, attend, expected, near, outcome, outcomes, part, worst
from tests.recorder import recording

RANKS_AND_METHODS = [
    *itertools.product((1, 2, 3, 4), METHODS),
    *[
        (4, "ring_ulysses 2"),
        (1, "ring_ulysses 1"),
        (2, "ring_ulysses 1"),
        (2, "ring_ulysses 2"),
        (3, "ring_ulysses 3"),
    ],
    *[(4, "ring_ulysses 1"), (4, "ring_ulysses 4")],
]
LENGTHS = (16, 15, 14, 20, 3)  # 3: of four ranks one has nothing but padding
HEADS = {  # that so many ranks can share
    **{ranks: [(4, 2), (4, 1), (8, 4)] for ranks in (1, 2, 4)},
    3: [(6, 3), (6, 1), (3, 3)],
}
DOCUMENTS = {
    "one": lambda T: {},
    "1 and T-1": lambda T: {"lengths": (1, T - 1)},  # and T-1 and 1 in the second row
    "short": lambda T: {"lengths": (3, 5, 1, 2)},
    "single tokens": lambda T: {"lengths": (1,) * T},
    "holes": lambda T: {"lengths": (5, 4), "holes": (0, 6, 7)},
}
EVERY = list(itertools.product(RANKS_AND_METHODS, ORDERS, (True, False)))
EACH_METHOD = pytest.mark.parametrize("method", [*METHODS, "ring_ulysses 2"])


def cases(ranks, method, order, causal):
    """All lengths, documents and numbers of heads."""
    return [
        Case(method, order, causal, T, H=H, KV=KV, **DOCUMENTS[documents](T))
        for T, documents, (H, KV) in itertools.product(LENGTHS, DOCUMENTS, HEADS[ranks])
    ]


def judge(pool, ranks, chosen, job=outcomes):
    for case, results in zip(chosen, zip(*pool.run(ranks, job, chosen), strict=True), strict=True):
        assert worst(case, results) <= 1, case


@pytest.mark.parametrize("number", range(len(EVERY)))
def test_ranks_compute_what_one_process_does(pool, number):
    """Of each combination a few cases, others for the next."""
    (ranks, method), order, causal = EVERY[number]
    judge(pool, ranks, cases(ranks, method, order, causal)[number % 17 :: 17])


@pytest.mark.drill
@pytest.mark.parametrize("number", range(len(EVERY)))
def test_ranks_compute_what_one_process_does_in_every_case(pool, number):
    (ranks, method), order, causal = EVERY[number]
    judge(pool, ranks, cases(ranks, method, order, causal))


@pytest.mark.drill
@pytest.mark.parametrize(("ranks", "neighbours"), [(6, 2), (6, 3), (8, 2), (8, 4)])
@pytest.mark.parametrize("order", ORDERS)
def test_larger_rectangles(pool, ranks, neighbours, order):
    chosen = [
        Case(f"ring_ulysses {neighbours}", order, causal, T, H=12, KV=KV, lengths=lengths)
        for causal, T, KV, lengths in itertools.product((True, False), (48, 37), (1, 12), ((), (9, 20, 1)))
    ]
    judge(pool, ranks, chosen)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("method", METHODS)
def test_over_bare_torch_distributed(pool, ranks, method):
    """And nothing goes by another way."""
    H, KV = HEADS[ranks][0]
    chosen = [Case(method, order, T=15, H=H, KV=KV, lengths=(5, 6)) for order in ORDERS]
    judge(pool, ranks, chosen, passed_through)


def passed_through(run, chosen):
    with recording() as recorder:
        results = passthrough.run(run, outcomes, chosen)
    assert not recorder.calls
    return results


@EACH_METHOD
def test_in_float32(pool, method):
    judge(pool, 4, [Case(method, order, T=30, lengths=(9, 4), dtype=torch.float32) for order in ORDERS])


@EACH_METHOD
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_have_the_dtype_of_what_they_belong_to(pool, method, dtype):
    """What is accumulated in float32 does not come out of it."""
    for results in pool.run(4, outcome, Case(method, dtype=dtype)):
        assert {x.dtype for x in results} == {dtype}


# -- not all of it -----------------------------------------------------------------------------------------------------


def some_gradients(run, case, wanted):
    mine = case.slots(run.size)[run.rank]
    *inputs, dout = (part(x, mine) for x in case.tensors())
    for x, wants in zip(inputs, wanted, strict=True):
        x.requires_grad_(wants)
    attend(run, case.method)(*inputs, case.places(run.size)).backward(dout)
    return [x.grad for x in inputs]


@EACH_METHOD
@pytest.mark.parametrize("wanted", [w for w in itertools.product((True, False), repeat=3) if any(w) and not all(w)])
def test_only_some_require_a_gradient(pool, method, wanted):
    case = Case(method, T=15, lengths=(6,))
    everyones = case.slots(4)
    for rank, grads in enumerate(pool.run(4, some_gradients, case, wanted)):
        inside = everyones[rank] < case.T
        for grad, true, wants in zip(grads, expected(case)[1:], wanted, strict=True):
            assert (grad is not None) == wants
            assert not wants or near(grad[:, :, inside], true[:, :, everyones[rank][inside]]) <= 1


def without_gradients(run, case):
    with torch.no_grad():
        mine = case.slots(run.size)[run.rank]
        q, k, v, _ = (part(x, mine) for x in case.tensors())
        return attend(run, case.method)(q, k, v, case.places(run.size))


@EACH_METHOD
def test_without_any_gradient(pool, method):
    """The bits of the output are the same."""
    case = Case(method, lengths=(6,))
    for out, (other, *_) in zip(pool.run(4, without_gradients, case), pool.run(4, outcome, case), strict=True):
        assert not out.requires_grad and torch.equal(out, other)


def second_derivative(run, case):
    mine = case.slots(run.size)[run.rank]
    q, k, v, dout = (part(x, mine).requires_grad_() for x in case.tensors())
    out = attend(run, case.method)(q, k, v, case.places(run.size))
    [dq] = torch.autograd.grad(out, q, dout, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()
    return outcome(run, case)


@EACH_METHOD
def test_a_second_derivative_is_refused(pool, method):
    """On every rank, and no message is left behind: what comes next is right."""
    case = Case(method)
    assert worst(case, pool.run(4, second_derivative, case)) <= 1


@EACH_METHOD
def test_nothing_to_see(pool, method):
    """Of tokens of no document everything is exactly zero, not only near it."""
    for results in pool.run(4, outcome, Case(method, holes=tuple(range(16)))):
        assert not any(x.any() for x in results)


@EACH_METHOD
def test_no_rows(pool, method):
    """A batch of none comes through."""
    for results in pool.run(4, outcome, Case(method, B=0)):
        assert [x.shape[0] for x in results] == [0] * 4


# -- bits --------------------------------------------------------------------------------------------------------------


def perturbed(run, case, tensor, slot):
    """The results without, and with another token at a slot."""
    tensors = case.tensors()
    others = [x.clone() for x in tensors]
    others[tensor][:, :, slot] += 3.0
    return outcome(run, case, tensors), outcome(run, case, others)


@EACH_METHOD
@pytest.mark.parametrize("causal", [True, False])
def test_a_token_of_one_document_moves_no_bit_of_another(pool, method, causal):
    """Whether query, key, value or gradient: the results of other documents are equal, its own are not."""
    case = Case(method, causal=causal, T=30, lengths=(7, 9), order="striped")
    documents, everyones = case.documents(), case.slots(4)
    for tensor, slot in itertools.product(range(4), (0, 8, 29)):
        moved = False
        for rank, (before, after) in enumerate(pool.run(4, perturbed, case, tensor, slot)):
            inside = everyones[rank] < case.T
            same = documents[:, everyones[rank][inside]] == documents[:, slot, None]
            for one, other in zip(before, after, strict=True):
                differs = (one != other).any(-1).any(1)[:, inside]
                assert not (differs & ~same).any()
                moved |= bool(differs.any())
        assert moved


def twice(run, case):
    """With other pauses."""
    results, pauses = [], random.Random(run.rank)
    for _ in range(2):
        time.sleep(pauses.random() * 0.02)
        results.append(outcome(run, case))
    return results


@EACH_METHOD
def test_two_runs_have_the_same_bits(pool, method):
    for first, second in pool.run(4, twice, Case(method, T=50, K=16, lengths=(20, 9), dtype=torch.float32)):
        assert all(map(torch.equal, first, second))


def shared_tensor(run, case):
    """q, k and v are parts of one tensor whose heads lie behind tokens, and the output's gradient is expanded."""
    mine = case.slots(run.size)[run.rank]
    tensors = [part(x, mine) for x in case.tensors()[:3]]
    packed = torch.cat([x.transpose(1, 2) for x in tensors], 2).requires_grad_()  # [B, T/P, H + 2 KV, K]
    q, k, v = (x.transpose(1, 2) for x in packed.split([case.H, case.KV, case.KV], 2))
    out = attend(run, case.method)(q, k, v, case.places(run.size))
    out.sum().backward()
    return [out.detach(), *(x.transpose(1, 2) for x in packed.grad.split([case.H, case.KV, case.KV], 2))]


@EACH_METHOD
def test_tensors_as_a_model_makes_them(pool, method):
    case = Case(method)
    ones = [*case.tensors()[:3], torch.ones(case.B, case.H, case.T, case.K, dtype=torch.float64)]
    for strided, plain in zip(pool.run(4, shared_tensor, case), pool.run(4, outcome, case, ones), strict=True):
        assert all(near(ours, theirs) <= 1 for ours, theirs in zip(strided, plain, strict=True))
