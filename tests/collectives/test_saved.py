"""What autograd keeps, against sizes known by hand and against the allocator."""

import gc

import torch
from torch import nn

from collectives.allocated import built_bytes
from collectives.saved import saving

X = 3 * 4 * 8  # bytes of an x


def x():
    return torch.ones(3, 4, dtype=torch.float64, requires_grad=True)


def kept(call, without=()):
    """Bytes that are kept for the backward of what `call` returns."""
    with saving() as saved:
        y = call()
    nbytes = saved.nbytes(without)
    del y
    return nbytes


def test_an_operation_keeps_what_its_backward_needs():
    assert kept(lambda: x() + x()) == 0
    assert kept(lambda: x().sin()) == X  # its input
    assert kept(lambda: x().exp()) == X  # its output
    assert kept(lambda: x() * x()) == 2 * X
    assert kept(lambda: x() * torch.ones(3, 4, dtype=torch.bool)) == X // 8


def test_a_storage_counts_once_and_whole():
    a = x()
    assert kept(lambda: a.sin() + a.cos() + a.t().sin().t()) == X
    assert kept(lambda: a[:1].sin() + 1) == X


def test_parameters_are_left_out():
    linear = nn.Linear(4, 5).double()
    a = x()
    assert kept(lambda: linear(a.sin()).sin(), linear.parameters()) == X + X + 3 * 5 * 8
    assert kept(lambda: linear(a.sin()).sin()) == X + X + 3 * 5 * 8 + linear.weight.nbytes


def test_nothing_counts_that_autograd_does_not_keep():
    with saving() as saved, torch.no_grad():
        x().exp()
    assert saved.nbytes() == 0


def test_what_has_been_used_or_dropped_is_gone():
    """At once, without the collector of garbage: a result that its operation keeps does not keep itself."""
    gc.disable()
    try:
        with saving() as saved:
            y = x().exp().sin()
            dropped = x().softmax(0).exp()
        assert saved.nbytes() == X + 2 * X  # what exp keeps and sin keeps is one
        del dropped
        assert saved.nbytes() == X
        y.sum().backward()
        assert (saved.nbytes(), saved.tensors()) == (0, [])
    finally:
        gc.enable()


def test_watching_changes_no_bit():
    torch.manual_seed(0)
    layer, a = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 9), nn.GELU(), nn.Linear(9, 4), nn.Softmax(-1)), x().float()
    [expected] = torch.autograd.grad(layer(a)[:, 0].sum(), a)
    with saving():
        y = layer(a)[:, 0].sum()
    assert torch.equal(torch.autograd.grad(y, a)[0], expected)


def test_the_allocator_has_the_same_and_the_output():
    layer = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 9), nn.GELU(), nn.Linear(9, 4))
    a = x().float()
    with saving() as saved:
        y = layer(a)
    nbytes = saved.nbytes(layer.parameters())
    _, allocated = built_bytes(lambda: layer(a), a.device)
    assert allocated == nbytes - a.nbytes + y.nbytes  # the input was there before


def test_backward_runs_again_through_what_was_kept():
    """Double backward: what comes back knows where it came from."""
    a = x()
    with saving():
        y = (a * a).exp()
    [da] = torch.autograd.grad(y.sum(), a, create_graph=True)
    [dda] = torch.autograd.grad(da.sum(), a)
    expected = (2 + 4 * a * a) * (a * a).exp()
    torch.testing.assert_close(dda, expected, rtol=1e-12, atol=0)
