"""The vocabulary-parallel cross-entropy against torch's, in float64: losses, gradients of logits, of the hidden state
and of the head's weight. T67.
"""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from collectives import layout
from tensor_parallel import (
    ColumnParallelLinear,
    Region,
    VocabParallelEmbedding,
    cross_entropy,
    vocab_parallel_cross_entropy,
)
from tensor_parallel.cut import nearly_even
from tests.recorder import recording
from tests.tensor_parallel.training import near

IGNORED = -100


def share(run, vocab):
    rows = nearly_even(vocab, run.size)[run.rank]
    return slice(rows.start, rows.stop)


def ours(run, logits, labels, factors, more):
    """(losses, gradient of this rank's logits) by this rank's part of the logits."""
    vocab = logits.size(-1)
    mine = logits[..., share(run, vocab)].clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(mine, labels, vocab, group=run.world, **more)
    (losses * factors).sum().backward()
    return losses.detach(), mine.grad


def torchs(logits, labels, factors, ignore_index=IGNORED):
    logits = logits.clone().requires_grad_()
    flat = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none", ignore_index=ignore_index)
    losses = flat.view(labels.shape)
    (losses * factors).sum().backward()
    return losses.detach(), logits.grad


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def judged(results, expected, ignored):
    """Equal within 1e-12, the losses with the same bits on all ranks, exactly zero where the label is ignored."""
    losses, grads = zip(*results, strict=True)
    true_losses, true_grad = expected
    grad = torch.cat(grads, -1)
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    assert near(losses[0], true_losses) <= 1
    assert near(grad, true_grad) <= 1
    assert not losses[0][ignored].any() and not grad[ignored].any()
    assert torch.isfinite(grad).all()


LABELS = torch.tensor([[0, 2, 3, 5, 6, 11], [IGNORED, 1, 4, IGNORED, 8, 9], [IGNORED] * 6])  # a row fully ignored


@pytest.mark.parametrize("size", [1.0, 1e4])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_t67_losses_are_torchs(pool, ranks, size):
    """Labels on both sides of every cut of 12 tokens by 3 and by 4; logits up to ±1e4, the largest on one rank."""
    logits = random(3, 6, 12) * size
    if size > 1:
        logits[:, :3, 1], logits[:, 3:, 10] = 1e4, -1e4
    factors = random(3, 6, seed=1)
    results = pool.run(ranks, ours, logits, LABELS, factors, {})
    judged(results, torchs(logits, LABELS, factors), LABELS == IGNORED)


@pytest.mark.parametrize("size", [1.0, -1e4])
@pytest.mark.parametrize(("vocab", "ranks"), [(13, 2), (13, 3), (13, 4), (10, 4), (5, 4), (4, 4), (7, 3)])
def test_t67_every_token_of_a_vocabulary_that_does_not_divide(pool, vocab, ranks, size):
    """One token whose logit is far from the others', on each rank in turn."""
    labels = torch.arange(vocab).repeat(3, 1)
    logits, factors = random(3, vocab, vocab), random(3, vocab, seed=1)
    logits[1] += size * torch.eye(vocab, dtype=torch.float64)
    logits[2] -= size * torch.eye(vocab, dtype=torch.float64)
    results = pool.run(ranks, ours, logits, labels, factors, {})
    judged(results, torchs(logits, labels, factors), torch.zeros_like(labels, dtype=torch.bool))


@pytest.mark.parametrize("ranks", [1, 3])
def test_t67_all_ignored_is_zero_and_no_nan(pool, ranks):
    logits, labels = random(2, 4, 12) * 1e4, torch.full((2, 4), IGNORED)
    for losses, grad in pool.run(ranks, ours, logits, labels, torch.ones(2, 4), {}):
        assert not losses.any() and not grad.any()


def test_what_becomes_of_an_ignored_loss_does_not_matter(pool):
    """Also a mean over no token at all: 0/0 backward is a gradient of inf or NaN for each loss."""
    logits, labels = random(1, 3, 12), torch.tensor([[IGNORED, 4, IGNORED]])
    factors = torch.tensor([[torch.inf, 1.0, torch.nan]], dtype=torch.float64)
    results = pool.run(2, ours, logits, labels, factors, {})
    expected = torchs(logits, labels, torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64))
    judged(results, expected, labels == IGNORED)


def test_tokens_that_cannot_be(pool):
    """A logit of -inf on every rank, where it looks in place of a label that it does not have, and elsewhere."""
    logits, factors = random(2, 4, 12), random(2, 4, seed=1)
    logits[..., [0, 3, 6, 11]] = -torch.inf
    labels = torch.tensor([[1, 2, 4, 5], [7, 8, 9, 10]])
    judged(pool.run(2, ours, logits, labels, factors, {}), torchs(logits, labels, factors), labels == IGNORED)


@pytest.mark.parametrize("ignore_index", [0, 7, -1])
def test_another_label_is_ignored(pool, ignore_index):
    """Also one that a rank has in its vocabulary."""
    labels = torch.tensor([[0, 7, 3, 11, ignore_index]])
    logits, factors = random(1, 5, 12), random(1, 5, seed=1)
    results = pool.run(3, ours, logits, labels, factors, {"ignore_index": ignore_index})
    judged(results, torchs(logits, labels, factors, ignore_index), labels == ignore_index)


@pytest.mark.parametrize("shape", [(), (5,), (0, 4), (2, 3, 2)])
def test_labels_of_any_shape(pool, shape):
    labels = torch.randint(12, shape, generator=torch.Generator().manual_seed(0))
    logits, factors = random(*shape, 12), random(*shape, seed=1)
    results = pool.run(3, ours, logits, labels, factors, {})
    true_losses, true_grad = torchs(logits.view(-1, 12), labels.view(-1), factors.view(-1))
    assert all(losses.shape == labels.shape for losses, _ in results)
    if labels.numel():
        losses, grad = results[0][0], torch.cat([grad for _, grad in results], -1)
        assert near(losses.view(-1), true_losses) <= 1 and near(grad.view(-1, 12), true_grad) <= 1


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11), (torch.float32, 1e-6)])
def test_short_floats_are_computed_in_float32(pool, dtype, error):
    """Losses as exact as float32 makes them of the same logits; gradients come in the logits' own format."""
    logits, labels = (5 * random(4, 6, 12)).to(dtype), torch.randint(12, (4, 6))
    true_losses, true_grad = torchs(logits.double(), labels, torch.ones(4, 6))
    for rank, (losses, grad) in enumerate(pool.run(3, ours, logits, labels, torch.ones(4, 6), {})):
        assert losses.dtype == torch.float32 and grad.dtype == dtype
        assert (losses - true_losses).abs().max() < 1e-5
        assert (grad - true_grad[..., 4 * rank : 4 * rank + 4]).abs().max() < error


def head(run, given, settings):
    """(gradient of the hidden state, this rank's rows of the weight's)."""
    hidden, weight, labels, factors = given
    linear = nn.Linear(*weight.shape[::-1], bias=False).double()
    linear.weight.data.copy_(weight)
    rows = nearly_even(len(weight), run.size)
    head = ColumnParallelLinear(linear, Region(run.world, **settings), pieces=[rows])
    tokens = hidden.tensor_split(run.size, -2)[run.rank] if settings else hidden
    x = tokens.clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(head(x), labels, len(weight), group=run.world)
    (losses * factors).sum().backward()
    return x.grad, head.weight.grad


@pytest.mark.parametrize(
    "settings", [{}, {"sequence_parallel": True}, {"sequence_parallel": True, "save_gathered": True}]
)
@pytest.mark.parametrize(("vocab", "ranks"), [(12, 3), (12, 4), (13, 3)])
def test_t67_gradients_of_the_hidden_state_and_of_the_head(pool, vocab, ranks, settings):
    """The hidden state's is summed over the ranks, once."""
    hidden, weight, factors = random(2, 12, 8), random(vocab, 8, seed=1), random(2, 12, seed=2)
    labels = torch.randint(vocab, (2, 12), generator=torch.Generator().manual_seed(0))
    labels[1, 3:7] = IGNORED
    x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    losses = F.cross_entropy((x @ w.t()).transpose(1, 2), labels, reduction="none")
    (losses * factors).sum().backward()
    dx, dw = zip(*pool.run(ranks, head, (hidden, weight, labels, factors), settings), strict=True)
    assert near(torch.cat(dw), w.grad) <= 1
    assert near(torch.cat(dx, 1), x.grad) <= 1 if settings else all(near(each, x.grad) <= 1 for each in dx)


def again(run):
    """Whether a second backward through a graph that was kept gives the same bits."""
    logits = random(3, 6, 6, seed=run.rank).requires_grad_()
    losses = vocab_parallel_cross_entropy(logits, LABELS, 12, group=run.world).sum()
    [first], [second] = (torch.autograd.grad(losses, [logits], retain_graph=True) for _ in "12")
    return torch.equal(first, second)


def test_a_second_backward_through_a_graph_that_is_kept(pool):
    assert pool.run(2, again) == [True] * 2


class Sizes(TorchDispatchMode):
    """Finds operations whose result's size is in the data: a GPU's queue must run empty before the next one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        masks = args[1] if func._overloadpacket == torch.ops.aten.index else ()
        assert not any(mask is not None and mask.dtype == torch.bool for mask in masks), func
        assert func._overloadpacket not in (torch.ops.aten.nonzero, torch.ops.aten._local_scalar_dense), func
        return func(*args, **(kwargs or {}))


def without_a_look(run, labels):
    """A loss, where tensors are not on the CPU: nobody looks at labels."""
    logits = random(3, 6, 12 // run.size).requires_grad_()
    with mock.patch.object(cross_entropy, "check_range"), Sizes():
        losses = vocab_parallel_cross_entropy(logits, labels, 12, group=run.world)
        losses.sum().backward()
    return losses.shape


def test_a_loss_does_not_wait_for_the_numbers(pool):
    assert pool.run(1, without_a_look, LABELS) == [LABELS.shape]


# -- what is refused ---------------------------------------------------------------------------------------------------


def refused(run, logits, labels, vocab):
    """What is raised, and how much was sent before."""
    with recording() as recorder:
        try:
            vocab_parallel_cross_entropy(logits, labels, vocab, group=run.world)
        except (ValueError, IndexError) as error:
            return type(error), str(error), len(recorder.calls)


@pytest.mark.parametrize(
    ("logits", "labels", "vocab", "text"),
    [
        ((2, 3, 12), (2, 3), 12, "logits [2, 3, 12]: rank {} of tp=2 has [2, 3] labels and 6 of 12 logits"),
        ((2, 6), (2, 3), 12, "logits [2, 6]: rank {} of tp=2 has [2, 3] labels and 6 of 12 logits for"),
        ((2, 3, 6), (6,), 12, "logits [2, 3, 6]: rank {} of tp=2 has [6] labels and 6 of 12 logits for"),
        ((1, 1), (1,), 1, "tp=2 is more than 1 tokens of a vocabulary"),
    ],
)
def test_wrong_shapes(pool, logits, labels, vocab, text):
    answers = pool.run(2, refused, torch.zeros(logits), torch.zeros(labels, dtype=torch.int64), vocab)
    for rank, (raised, told, sent) in enumerate(answers):
        assert raised is ValueError and text.format(rank) in told and sent == 0


@pytest.mark.parametrize("label", [12, -1, -7, 1000])
def test_a_label_outside_is_an_error_on_every_rank(pool, label):
    labels = torch.tensor([[0, label, IGNORED]])
    expected = (IndexError, f"label {label} is not in a vocabulary of 12, which counts from 0", 0)
    assert pool.run(2, refused, torch.zeros(1, 3, 6), labels, 12) == [expected] * 2


# -- the embedding -----------------------------------------------------------------------------------------------------


def looked_up(run, weight, ids, cotangent):
    """(rows looked up, gradient of this rank's rows)."""
    embedding = nn.Embedding(*weight.shape, _weight=weight.clone())
    table = VocabParallelEmbedding(embedding, Region(run.world))
    assert table.weight is embedding.weight
    out = table(ids)
    out.backward(cotangent)
    return out.detach(), table.weight.grad, table.weight.held.boxes


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_rows_are_exactly_torchs(pool, ranks):
    """A sum of zeros and one row; what is never looked up has a gradient of exactly zero."""
    weight, cotangent = random(13, 6), random(3, 8, 6, seed=1)
    ids = torch.tensor([[0, 3, 4, 6, 7, 9, 12, 0], [10, 10, 3, 0, 1, 12, 6, 7], [4, 4, 4, 4, 4, 4, 4, 4]])
    full = weight.clone().requires_grad_()
    F.embedding(ids, full).backward(cotangent)
    outs, grads, boxes = zip(*pool.run(ranks, looked_up, weight, ids, cotangent), strict=True)
    assert all(torch.equal(out, weight[ids]) for out in outs)
    grad = torch.cat(grads)
    assert near(grad, full.grad) <= 1
    assert not grad[[2, 5, 8, 11]].any()
    assert [box.local[0] for [box] in boxes] == [len(rows) for rows in nearly_even(13, ranks)]
    assert all(box == layout.Box((13, 6), box.offset, (box.local[0], 6)) for [box] in boxes)


def outside(run, ids):
    table = VocabParallelEmbedding(nn.Embedding(12, 4), Region(run.world))
    with recording() as recorder:
        try:
            table(ids)
        except IndexError as error:
            return str(error), len(recorder.calls)


@pytest.mark.parametrize("token", [12, -1, -100])
def test_a_token_outside_is_an_error_on_every_rank(pool, token):
    text = f"token {token} is not in a vocabulary of 12, which counts from 0"
    assert pool.run(2, outside, torch.tensor([[0, token]])) == [(text, 0)] * 2


def of_the_whole_table(run, settings):
    try:
        VocabParallelEmbedding(nn.Embedding(12, 4, **settings), Region(run.world))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("setting", "value"), [("max_norm", 1.0), ("padding_idx", 0), ("scale_grad_by_freq", True), ("sparse", True)]
)
def test_what_looks_at_the_whole_table_is_refused(pool, setting, value):
    [told, _] = pool.run(2, of_the_whole_table, {setting: value})
    assert told == f"an embedding with {setting} cannot be cut by its vocabulary; make it without"
