"""In float32 and bf16: ranks are as near to float64 as one rank is, and bits do not move from run to run."""

from dataclasses import replace

import pytest
import torch

from tests.expert_parallel.cases import Case, one_rank, outcome, same_choices, true
from tests.expert_parallel.reference import Layer

LAYERS = {
    "top-2 within capacity": Layer(capacity=0.75),
    "top-3, shared": Layer(choices=3, shared=4, scale=1.5, renormalise=False),
    "sigmoid, bias": Layer(score="sigmoid", bias=tuple(0.4 * (-1) ** e for e in range(12)), scale=2.5, shared=4),
}


def error(case, results):
    """Of y, dx and every gradient the error against float64, as a share of its size: the largest of all."""
    result, dx, grads = true(case)
    wholes = {"y": result.y.detach(), "dx": dx, **grads}
    missed = dict.fromkeys(wholes, 0.0)
    seen = set()
    for rank, ours in enumerate(results):
        rows = torch.cat(case.rows(rank))
        missed["y"] += float((ours.y.double() - wholes["y"][rows]).square().sum())
        missed["dx"] += float((ours.dx.double() - wholes["dx"][rows]).square().sum())
        for name, (boxes, grad) in ours.grads.items():
            if (name, boxes) not in seen:
                seen.add((name, boxes))
                [box] = boxes
                whole = wholes[name][box.offset[0] : box.offset[0] + box.local[0]]
                missed[name] += float((grad.double() - whole).square().sum())
    return {name: (off / float(wholes[name].square().sum())) ** 0.5 for name, off in missed.items()}


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("mesh", [(2, 2), (3, 3), (4, 4), (4, 2)])
def test_as_near_as_one_rank(pool, name, mesh, dtype, most):
    """Choices are the same, and so is the error; of gradients that are sums over ranks at most twice that, or that of
    data parallelism alone: each rank's term is rounded.
    """
    case = Case(LAYERS[name], *mesh, dtype=dtype)
    cases = case, one_rank(case), replace(case, ep=1)
    results = [pool.run(each.ranks, outcome, each) for each in cases]
    assert all(map(same_choices, cases, results))
    ours, single, data = map(error, cases, results)
    for what, off in ours.items():
        whole = what in ("y", "dx") or (what.startswith("experts") and case.ep == case.ranks)
        assert single[what] < most, what
        assert off <= (1.1 * single[what] if whole else 2 * max(single[what], data[what])), what


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_have_the_dtype_of_what_they_belong_to(pool, dtype):
    for ours in pool.run(2, outcome, Case(Layer(shared=4), 2, 2, dtype=dtype)):
        assert {ours.y.dtype, ours.dx.dtype, *(grad.dtype for _, grad in ours.grads.values())} == {dtype}


def same_rows(run, case):
    """Twice, and on ranks that deal the rows out otherwise: y by rows."""
    return [outcome(run, case).y for _ in range(2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_runs_have_the_same_bits(pool, dtype):
    for first, second in pool.run(4, same_rows, Case(Layer(capacity=1.0), 4, 4, dtype=dtype)):
        assert torch.equal(first, second)
