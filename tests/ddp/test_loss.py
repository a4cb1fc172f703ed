"""What the loss is divided by: the valid tokens of all ranks, of which a rank may have none."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from collectives import comm
from ddp import naive
from tests.ddp.versions import each_version


def mean_of_all_tokens(run, wrap, tokens):
    """Loss w x of a token; the mean over all tokens of all ranks: its gradient by w, None if no rank has a token."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    handle = wrap(nn.ParameterList([weight]), run.world, average=False)
    x = torch.tensor(tokens[run.rank], dtype=torch.float64)
    count = torch.tensor(len(x))
    comm.all_reduce(count, group=run.world)
    if len(x):
        ((weight * x).sum() / count).backward()
    handle.finish()
    return None if weight.grad is None else weight.grad.item()


@pytest.mark.parametrize(
    ("tokens", "grad"), [(([1], [5, 5, 5]), 4), (([1, 2, 6], []), 3), (([], [], [7]), 7), (([], []), None)]
)
@each_version
def test_the_mean_over_tokens_is_no_mean_of_means(pool, wrap, tokens, grad):
    """T24: 4, where a mean of the ranks' means is 3. A rank without a token adds nothing."""
    assert pool.run(len(tokens), mean_of_all_tokens, wrap, tokens) == [grad] * len(tokens)


def masked(run, wrap, labels):
    """(finite loss, gradients, whether the weights moved) of a step with weight decay; -100 is no label."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    handle = wrap(model, run.world, average=False)
    optimizer = torch.optim.AdamW(handle.parameters(), lr=0.1)
    mine = torch.tensor(labels[run.rank])
    count = (mine >= 0).sum()
    comm.all_reduce(count, group=run.world)
    x = torch.randn(len(mine), 3, generator=torch.Generator().manual_seed(run.rank), dtype=torch.float64)
    loss = cross_entropy(model(x), mine, reduction="sum") / count.clamp(min=1)
    loss.backward()
    handle.finish()
    before = model.weight.detach().clone()
    if count:
        optimizer.step()
    return loss.isfinite().item(), [p.grad.clone() for p in model.parameters()], not model.weight.equal(before)


@each_version
def test_ranks_without_a_valid_label(pool, wrap):
    """T26: one masked rank adds exact zeros; if all are masked the gradient is zero and nobody steps."""
    some, none = ([1, -100, 3], [-100, -100]), ([-100], [-100, -100])
    alone = pool.run(1, masked, naive.wrap, some[:1])[0]
    for finite, grads, moved in pool.run(2, masked, wrap, some):
        assert finite and moved and all(map(torch.equal, grads, alone[1]))
    for finite, grads, moved in pool.run(2, masked, wrap, none):
        assert finite and not moved and not any(grad.any() for grad in grads)
