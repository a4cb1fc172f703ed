"""A lookup's gradient is a sum in float32, rounded once."""

import pytest
import torch
import torch.nn.functional as F

from collectives.lookup import Embedding, lookup


@pytest.mark.parametrize(("dtype", "times"), [(torch.bfloat16, 1000), (torch.float16, 3000)])
def test_a_token_that_comes_often(dtype, times):
    """Beyond 256 and 2048 there is no next whole number in these dtypes, but there is 1000, and 3000."""
    table = torch.randn(5, 3).to(dtype).requires_grad_()
    ids = torch.tensor([[2] * times, [0] * times])
    rows = lookup(ids, table)
    assert torch.equal(rows, table[ids]) and rows.dtype == dtype
    rows.backward(torch.ones_like(rows))
    assert table.grad.dtype == dtype
    assert table.grad.tolist() == [[times] * 3, [0] * 3, [times] * 3, [0] * 3, [0] * 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_ones_are_torch_s(dtype):
    module, ids = Embedding(7, 4).to(dtype), torch.tensor([3, 3, 6])
    cotangent = torch.randn(3, 4, dtype=dtype)
    module(ids).backward(cotangent)
    right = module.weight.detach().clone().requires_grad_()
    F.embedding(ids, right).backward(cotangent)
    assert torch.equal(module.weight.grad, right.grad)
