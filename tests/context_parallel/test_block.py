"""One block of attention: the fused kernel and the explicit one, both against autograd of the definition."""

import functools
import itertools
import math

import pytest
import torch

from context_parallel import block, online
from tests.context_parallel import dense
from tests.context_parallel.cases import near

SHAPES = {  # B, H, KV, queries, keys, K
    "as many keys": (2, 4, 4, 8, 8, 4),
    "groups of queries": (2, 6, 2, 5, 9, 3),
    "one key head": (1, 4, 1, 9, 5, 2),
    "heads of one number": (2, 2, 1, 6, 6, 1),
    "heads of 64, long": (1, 2, 2, 130, 70, 64),
    "one query": (3, 2, 1, 1, 7, 5),
    "one key": (3, 2, 2, 7, 1, 5),
}


@pytest.fixture(params=["fused", "explicit"])
def way(request, monkeypatch):
    """By the kernel, or as on a device that has none."""
    if request.param == "explicit":
        monkeypatch.setattr(block, "fused", block.explicit)
        monkeypatch.setattr(block, "fused_backward", block.explicit_backward)


EACH_WAY = pytest.mark.usefixtures("way")


def seen(kind, B, queries, keys):
    """(what is visible [B, queries, keys], mask as a block has it, causal)."""
    everything = torch.ones(B, queries, keys, dtype=torch.bool)
    if kind == "full":
        return everything, None, False
    if kind == "causal":
        return everything.tril(), None, True
    some = dense.random(5, B, queries, keys) > 0.3
    some[:, 0] = False  # a row that sees nothing
    some[-1] = False  # a whole row of the batch
    return some, some[:, None], False


def given(shape, dtype=torch.float64):
    """q, k, v and the gradient of the output."""
    B, H, KV, queries, keys, K = shape
    sizes = (H, queries), (KV, keys), (KV, keys), (H, queries)
    return [dense.random(n, B, *size, K, dtype=dtype) for n, size in enumerate(sizes)]


def right(tensors, visible):
    """(output, dq, dk, dv) and the log-sum-exp, by autograd in float64."""
    q, k, v, dout = (x.detach().double() for x in tensors)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = dense.masked(*inputs, visible)
    out.backward(dout)
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / math.sqrt(q.shape[-1])
    lse = scores.masked_fill(~visible[:, None], -math.inf).logsumexp(-1)
    return [x.detach() for x in (out, q.grad, k.grad, v.grad)], lse.detach()


def check(tensors, kind, size=1.0):
    """Values and gradients within rounding; where nothing is seen exactly 0 and -inf. size: of queries and keys, and so
    of the rounding of their gradients.
    """
    q, k, v, dout = tensors
    visible, mask, causal = seen(kind, q.shape[0], q.shape[2], k.shape[2])
    out, lse = block.forward(q, k, v, mask, causal)
    dq, dk, dv = block.backward(dout, (q, k, v), (out, lse), mask, causal)
    true, true_lse = right(tensors, visible)
    for ours, one, unit in zip((out, dq, dk, dv), true, (1, size, size, 1), strict=True):
        assert near(ours / unit, one / unit, out.dtype) <= 1
    nothing = ~visible.any(-1)[:, None].expand_as(lse)
    assert (lse[nothing] == -math.inf).all() and not out[nothing].any() and not dq[nothing].any()
    assert near(lse[~nothing], true_lse[~nothing], out.dtype) <= 1


@EACH_WAY
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_block_is_the_definition(dtype, shape):
    for kind in ("full", "masked", *(["causal"] if SHAPES[shape][3] == SHAPES[shape][4] else [])):
        check(given(SHAPES[shape], dtype), kind)


def test_half_precision_is_computed_in_float32():
    """Inputs are rounded, nothing else is: results come in float32, and as near as those of float32."""
    for kind, dtype in itertools.product(("full", "causal", "masked"), (torch.bfloat16, torch.float16)):
        tensors = given(SHAPES["as many keys"], dtype)
        out, lse = block.forward(*tensors[:3])
        assert out.dtype == lse.dtype == torch.float32
        check(tensors, kind)


@EACH_WAY
@pytest.mark.parametrize("kind", ["full", "causal", "masked"])
def test_autocast_rounds_nothing(kind):
    """What is float32 on purpose stays so, forward and backward."""
    with torch.autocast("cpu", torch.bfloat16):
        check(given(SHAPES["as many keys"], torch.float32), kind)


@EACH_WAY
@pytest.mark.parametrize(("dtype", "scale"), [(torch.float64, 1e1), (torch.float64, 1e3), (torch.float32, 1e3)])
def test_large_logits(dtype, scale):
    """Scores of hundreds, and of a million: nothing overflows. Of whole numbers they are exact. (In float32 an lse of
    hundreds is rounded by 1e-5, and the probabilities of a backward with it; those of a million are 0 or 1.)
    """
    q, k, v, dout = given(SHAPES["as many keys"], dtype)
    for kind in ("full", "causal", "masked"):
        check([(q * scale).round(), (k * scale).round(), v, dout], kind, scale)


# -- strides -----------------------------------------------------------------------------------------------------------


def cut_out(x):
    """Its numbers inside of a larger tensor."""
    larger = x.new_full((x.shape[0] + 1, x.shape[1] + 2, x.shape[2] + 3, x.shape[3] + 1), 7.0)
    larger[1:, 1:-1, 2:-1, 1:] = x
    return larger[1:, 1:-1, 2:-1, 1:]


def spread(x):
    """Every second number is another."""
    return torch.stack([x, torch.full_like(x, 7.0)], -1).flatten(-2)[..., ::2]


LAYOUTS = {
    "tokens before heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),  # as a model makes them
    "numbers before tokens": lambda x: x.mT.contiguous().mT,
    "numbers first": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "cut out": cut_out,
    "spread": spread,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", ["as many keys", "groups of queries", "heads of one number", "one query"])
def test_any_strides(layout, shape):
    """Of each tensor by itself, and of all."""
    for which in (0, 1, 2, 3, None):
        tensors = [LAYOUTS[layout](x) if which in (n, None) else x for n, x in enumerate(given(SHAPES[shape]))]
        for kind in ("full", "masked"):
            check(tensors, kind)


@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (3,), (0, 1, 2, 3)])
def test_expanded_tensors(dims):
    """As the gradient of a sum is, or keys of all rows alike."""
    for which in range(4):
        tensors = given(SHAPES["as many keys"])
        narrow = tensors[which]
        for dim in dims:
            narrow = narrow.narrow(dim, 0, 1)
        tensors[which] = narrow.expand(tensors[which].shape)
        for kind in ("full", "causal", "masked"):
            check(tensors, kind)


@EACH_WAY
def test_results_of_any_strides():
    """The output and lse that backward gets are parts of larger ones, or turned."""
    q, k, v, dout = given(SHAPES["as many keys"])
    visible, mask, causal = seen("causal", 2, 8, 8)
    out, lse = block.forward(q, k, v, mask, causal)
    turned = lse.transpose(1, 2).contiguous().transpose(1, 2)
    larger = torch.full((2, 4, 11), 7.0, dtype=lse.dtype)
    larger[:, :, 2:10] = lse
    for one, other in ((turned, LAYOUTS["tokens before heads"](out)), (larger[:, :, 2:10], cut_out(out))):
        grads = block.backward(dout, (q, k, v), (other, one), mask, causal)
        for ours, true in zip(grads, right((q, k, v, dout), visible)[0][1:], strict=True):
            assert near(ours, true) <= 1


def test_no_rows():
    *inputs, dout = given((0, 4, 2, 5, 5, 4))
    out, lse = block.forward(*inputs)
    assert out.shape == dout.shape and lse.shape == dout.shape[:-1]
    assert [x.shape for x in block.backward(dout, tuple(inputs), (out, lse))] == [x.shape for x in inputs]


# -- blocks of one whole -----------------------------------------------------------------------------------------------


@EACH_WAY
@pytest.mark.parametrize("apart", [0.0, 150.0, -150.0])
def test_parts_of_the_keys_add_up(apart):
    """Outputs are merged by their lse; gradients, given the whole output and lse, are summed. Keys of three blocks, of
    which the last have scores so much higher or lower; some queries see only some blocks, or nothing.
    """
    q, k, v, dout = given((2, 4, 2, 7, 9, 4))
    k[:, :, 6:] += apart
    q.abs_()
    visible, mask, _ = seen("masked", 2, 7, 9)
    parts = [slice(0, 4), slice(4, 6), slice(6, 9)]
    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -math.inf, dtype=q.dtype)
    for keys in parts:
        online._merge(out, lse, *block.forward(q, k[:, :, keys], v[:, :, keys], mask[..., keys], False))
    terms = [block.backward(dout, (q, k[:, :, s], v[:, :, s]), (out, lse), mask[..., s]) for s in parts]
    dq = sum(term[0] for term in terms)
    dk, dv = (torch.cat([term[n] for term in terms], 2) for n in (1, 2))
    (true_out, *true), true_lse = right((q, k, v, dout), visible)
    finite = true_lse > -math.inf
    assert torch.equal(lse > -math.inf, finite) and near(lse[finite], true_lse[finite]) <= 1
    unit = max(1.0, abs(apart))  # the size of keys, and so of what dq is rounded to
    for ours, one in zip((out, dq / unit, dk, dv), (true_out, true[0] / unit, *true[1:]), strict=True):
        assert near(ours, one) <= 1


def test_both_ways_are_taken_on_their_device(monkeypatch):
    """The CPU has the kernel; other devices the explicit block, here a meta tensor."""
    called = []
    for name in ("fused", "explicit"):
        monkeypatch.setattr(block, name, functools.partial(lambda name, *args: called.append(name), name))
    q = torch.zeros(1, 1, 2, 2)
    block.forward(q, q, q)
    block.forward(*3 * [q.to("meta")])
    assert called == ["fused", "explicit"]
