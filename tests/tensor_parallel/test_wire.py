"""What a layer sends, forward and backward: the sequence of its collectives, the bytes of formula and sockets."""

import pytest
import torch

from collectives import comm, demo
from collectives.ledger import Ledger
from collectives.partials import sum_partials
from collectives.watch import watching
from tensor_parallel import Region, VocabParallelEmbedding, vocab_parallel_cross_entropy
from tests.recorder import recording
from tests.tensor_parallel.models import Shape
from tests.tensor_parallel.training import MODES, Recipe, cut_module

ROWS, TOKENS = 2, 240  # 240 divides by 1, 2, 3 and 4
TIMES = {"tp": 8, "sp": 10, "sp, whole inputs kept": 8}  # of B·T·D·(P-1)/P
ATTENTION_AND_MLP = {  # op and how often it sends all of B·T·D, in forward, in backward
    "tp": ("sum, sum", "sum, sum"),
    "sp": ("gather, reduce, gather, reduce", "gather, gather, reduce, gather, gather, reduce"),
    "sp, whole inputs kept": ("gather, reduce, gather, reduce", "gather, reduce, gather, reduce"),
}


def shape_for(ranks, **more):
    """As many heads of keys as of queries, so that nothing but the layer's own sums is sent."""
    heads = 6 if ranks == 3 else 4
    return Shape(heads=heads, kv_heads=heads, **more)


def stream(run, shape, mode, dtype=torch.float64):
    """What comes into a layer on this rank."""
    tokens = TOKENS if mode == "tp" else TOKENS // run.size
    return torch.randn(ROWS, tokens, shape.width, dtype=dtype, requires_grad=True)


def told(recorder, n):
    """The collectives of n elements, as words."""
    return recorder.told({n: "x"}).replace(" x", "")


def layer(run, shape, mode):
    """(words of forward, of backward, {op: (calls, bytes in the ledger)}, bytes on sockets, other groups) of the second
    pass.
    """
    block = cut_module(run, shape, MODES[mode])
    x, n = stream(run, shape, mode), ROWS * TOKENS * shape.width
    block(x).sum().backward()
    comm.barrier(group=run.world)
    with watching(book := Ledger()):
        before = demo.bytes_written()
        with recording() as forward:
            y = block(x)
        with recording() as backward:
            y.sum().backward()
        sent = demo.bytes_since(before)
    calls = forward.calls + backward.calls
    assert all(call.elements == n and call.group == run.world for call in calls)
    return told(forward, n), told(backward, n), {row.op: (row.calls, row.algorithm) for row in book.rows()}, sent


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("ranks", "variant"),
    [(2, {}), (3, {"fused": True}), (4, {}), pytest.param(4, {"fused": True}, marks=pytest.mark.drill)],
)
def test_a_layer(pool, ranks, variant, mode):
    """8·B·T·D·(P-1)/P elements, 10 where inputs are gathered again: exactly; the sockets within 1 % and 4 KB a call."""
    shape = shape_for(ranks, **variant)
    formula = TIMES[mode] * ROWS * TOKENS * shape.width * (ranks - 1) / ranks * 8
    for forward, backward, ledger, sent in pool.run(ranks, layer, shape, mode):
        assert (forward, backward) == ATTENTION_AND_MLP[mode]
        assert sum(nbytes for _, nbytes in ledger.values()) == pytest.approx(formula, rel=1e-12)
        calls = sum(calls for calls, _ in ledger.values())
        assert sent is None or abs(sent - formula) <= 0.01 * formula + 4096 * calls


def frozen(run, mode):
    """The words of a backward without a gradient of the input, and of one without gradients of weights."""
    words = []
    for input_wants, weights_want in ((False, True), (True, False)):
        block = cut_module(run, shape_for(run.size), MODES[mode]).mlp.requires_grad_(weights_want)
        x = stream(run, shape_for(run.size), mode).requires_grad_(input_wants)
        y = block(x)
        with recording() as recorder:
            y.sum().backward()
        words.append(told(recorder, ROWS * TOKENS * x.size(-1)))
    return words


@pytest.mark.parametrize(
    ("mode", "without_input", "without_weights"),
    [
        ("tp", "", "sum"),
        ("sp", "gather, gather", "gather, reduce"),
        ("sp, whole inputs kept", "gather", "gather, reduce"),
    ],
)
def test_what_needs_no_gradient_sends_nothing(pool, mode, without_input, without_weights):
    """Neither the sum of dx, nor x once more for a dW that nobody wants."""
    assert pool.run(2, frozen, mode) == [[without_input, without_weights]] * 2


def partial_sums(run, shape, mode, labels):
    """Elements that each sum of gradients carries."""
    block = cut_module(run, shape, MODES[mode])
    block(stream(run, shape, mode)).sum().backward()
    with recording() as recorder:
        sum_partials(block.parameters(), labels)
    return [(call.op, call.elements, call.size) for call in recorder.calls]


def test_what_stays_partial_is_one_buffer_a_group(pool):
    """Of four ranks with two key heads: norms and row biases over all, keys and values over pairs; one number more for
    each, whether it had a gradient.
    """
    width, head = 16, 4
    keys = 2 * (head * width + head)
    norms = 2 * width + width + 2 * width  # LayerNorm, RMSNorm, two biases of rows
    shape = Shape(heads=4, kv_heads=2)
    assert pool.run(4, partial_sums, shape, "tp", ("kv", "tp")) == [[("all_reduce", keys + 4, 2)]] * 4
    expected = [("all_reduce", keys + 4, 2), ("all_reduce", norms + 5, 4)]
    assert pool.run(4, partial_sums, shape, "sp", ("kv", "tp")) == [expected] * 4


# -- vocabulary --------------------------------------------------------------------------------------------------------


def loss(run, vocab, tokens):
    """({op: bytes} of forward, of backward, bytes on sockets)."""
    share = vocab // run.size
    logits = torch.randn(ROWS, tokens, share, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(vocab, (ROWS, tokens), generator=torch.Generator().manual_seed(0))
    comm.barrier(group=run.world)
    before = demo.bytes_written()
    with watching(forward := Ledger()):
        losses = vocab_parallel_cross_entropy(logits, labels, vocab, group=run.world)
    with watching(backward := Ledger()):
        losses.sum().backward()
    sent = demo.bytes_since(before)
    return (
        sum(row.algorithm for row in forward.rows()),
        len(backward.rows()),
        sum(r.calls for r in forward.rows()),
        sent,
    )


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_loss_sends_three_numbers_a_token(pool, ranks):
    """Whatever the vocabulary; logits are never gathered."""
    for vocab in (12, 1200):
        for forward, backward, calls, sent in pool.run(ranks, loss, vocab, TOKENS):
            formula = 2 * 3 * ROWS * TOKENS * 8 * (ranks - 1) / ranks
            assert (forward, backward, calls) == (pytest.approx(formula, rel=1e-12), 0, 2)
            assert sent is None or abs(sent - formula) <= 0.01 * formula + 2 * 4096


def embedding(run, mode):
    """The words of forward and of backward, for elements of B·T·D."""
    table = VocabParallelEmbedding(torch.nn.Embedding(37, 8), Region(run.world, **MODES[mode]))
    ids = torch.randint(37, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    with recording() as forward:
        x = table(ids)
    with recording() as backward:
        x.sum().backward()
    return [told(recorder, ROWS * TOKENS * 8) for recorder in (forward, backward)]


@pytest.mark.parametrize(("mode", "words"), [("tp", ["sum", ""]), ("sp", ["reduce", "gather"])])
def test_an_embedding(pool, mode, words):
    assert pool.run(2, embedding, mode) == [words] * 2


# -- one rank ----------------------------------------------------------------------------------------------------------


def by_itself(run, shape, mode):
    """Bytes by the ledger, bytes on sockets, of a whole step."""
    module = cut_module(run, shape, MODES[mode], Recipe())
    given = [torch.randint(shape.vocab, (ROWS, 7)) for _ in range(2)]
    with watching(book := Ledger()):
        before = demo.bytes_written()
        module(*given).sum().backward()
        sum_partials(module.parameters(), ("kv", "tp"))
        sent = demo.bytes_since(before)
    return sum(row.algorithm for row in book.rows()), sent


@pytest.mark.parametrize("mode", MODES)
def test_a_group_of_one_sends_nothing(pool, mode):
    """Not even where tokens do not divide by anything."""
    shape = Shape(vocab=37, qk_norm=True, router=True, gathered=True)
    assert pool.run(1, by_itself, shape, mode) in ([(0, 0)], [(0, None)])
