"""The random numbers are those of the independent reference, the same over every cut, and random."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from collectives import layout, rng
from collectives.layout import Box, Constant, Held, Normal
from tests.collectives.test_layout import random_boxes
from tests.reference import rng as reference

KEYS = [rng.key(0), rng.key(0, "w"), rng.key(-5, "dropout", 2, 71), 0, -1, 2**63 - 1, -(2**63)]
INDICES = torch.tensor([[0, 1, 2, 3], [255, 256, 2**31, 2**32 + 1], [2**40, 2**62, 2**63 - 1, 12345]])
SIGMAS = 5.0  # keys are fixed, so a test that holds holds always


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Beside other processes, a second thread makes these many small operations four times as slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---- the reference


@pytest.mark.parametrize("names", [(), ("embed.weight",), ("dropout", 3, 17), ("a", "b"), (-1,)])
@pytest.mark.parametrize("seed", [0, 1, -1, 2**40])
def test_keys_are_the_references(seed, names):
    assert rng.key(seed, *names) % 2**64 == reference.key(seed, *names)


@pytest.mark.parametrize("key", KEYS)
def test_bits_and_uniform_are_the_references(key):
    unsigned = key % 2**64
    assert np.array_equal(rng.bits(key, INDICES).numpy().view(np.uint64), reference.bits(unsigned, INDICES.numpy()))
    assert np.array_equal(rng.uniform(key, INDICES).numpy(), reference.uniform(unsigned, INDICES.numpy()))


@pytest.mark.parametrize("key", KEYS)
def test_normal_is_the_inverse_distribution_of_the_references_uniform(key):
    index = torch.arange(300) * 12345
    u = torch.from_numpy(reference.uniform(key % 2**64, index.numpy()))
    drawn = rng.normal(key, index)
    assert torch.equal(drawn, torch.erfinv(2 * u - 1) * math.sqrt(2))
    exact = torch.from_numpy(reference.normal(key % 2**64, index.numpy()))
    torch.testing.assert_close(drawn, exact, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1 / 65536, 0.9999])
@pytest.mark.parametrize("width", [1, 3, 4, 5, 64])
def test_keep_is_the_references(width, p):
    rows = torch.tensor([[0, 1, 2], [7, 2**33, 5]])
    expected = reference.keep(KEYS[2] % 2**64, rows.numpy(), width, p)
    assert np.array_equal(rng.keep(KEYS[2], rows, width, p).numpy(), expected)


@pytest.mark.parametrize("n", [1, 2, 3, 10, 97, 1000, 2**20 + 7])
def test_permutation_is_the_references(n):
    index = torch.arange(min(n, 60)).flip(0)
    expected = [reference.permutation(KEYS[1] % 2**64, x, n) for x in index.tolist()]
    assert rng.permutation(KEYS[1], index, n).tolist() == expected


# ---- the same numbers over every cut


def held(boxes, init, dtype, shape=None):
    """A parameter named w that holds these boxes, one after the other."""
    param = nn.Parameter(torch.full(shape or (sum(box.numel for box in boxes),), math.nan, dtype=dtype))
    param.held = Held("w", tuple(boxes), init, decay=True)
    return param


def filled(boxes, init, dtype, shape=None):
    param = held(boxes, init, dtype, shape)
    rng.fill(param, seed=3)
    return param.detach()


def assert_cuts_draw_the_same(shape, cuts, dtype=torch.float32):
    """Each of `cuts` is the list of boxes that one rank holds."""
    whole = Box.whole(shape)
    numbers = filled([whole], Normal(0.02), dtype, shape)
    assert numbers.isfinite().all()
    for boxes in cuts:
        expected = torch.cat([torch.empty(0, dtype=dtype), *(numbers[box.slices(whole)].flatten() for box in boxes)])
        assert torch.equal(filled(boxes, Normal(0.02), dtype), expected), boxes


def columns(shape, *edges):
    whole = Box.whole(shape)
    return [[whole.cut(-1, first, last - first)] for first, last in itertools.pairwise(edges)]


def rows(shape, *edges):
    whole = Box.whole(shape)
    return [[whole.cut(0, first, last - first)] for first, last in itertools.pairwise(edges)]


SMALL, LARGE, WIDE, DEEP = (6, 10), (300, 201), (3, 40000), (5, 7, 1100)  # three are drawn in several chunks
CUTS = {
    "columns": (SMALL, columns(SMALL, 0, 5, 10)),
    "rows, uneven and none": (SMALL, rows(SMALL, 0, 1, 1, 6)),
    "single elements": (SMALL, [[Box(SMALL, (i, j), (1, 1))] for i in range(6) for j in range(10)]),
    "q, k and v": (SMALL, [[Box(SMALL, (row, 3), (1, 4)) for row in (0, 2, 4)]]),
    "flat ranges": (SMALL, [layout.flat_range(SMALL, first, first + 13) for first in (0, 7, 24, 47)]),
    "a scalar": ((), [[Box.whole(())], []]),
    "no elements": ((0, 3), [[Box.whole((0, 3))]]),
    "large, columns": (LARGE, columns(LARGE, 0, 100, 101, 201)),
    "large, rows": (LARGE, rows(LARGE, 0, 99, 100, 300)),
    "large, flat ranges": (LARGE, [layout.flat_range(LARGE, first, first + 20100) for first in (0, 20100, 40200)]),
    "wide, columns": (WIDE, columns(WIDE, 0, 20001, 40000)),
    "wide, flat ranges": (WIDE, [layout.flat_range(WIDE, 30000, 90001)]),
    "deep, columns": (DEEP, columns(DEEP, 0, 3, 700, 1100)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cut", CUTS)
def test_a_cut_draws_what_the_whole_draws(cut, dtype):
    assert_cuts_draw_the_same(*CUTS[cut], dtype)


@pytest.mark.parametrize("shape", [(13,), SMALL, (3, 4, 5), DEEP])
def test_random_boxes_draw_what_the_whole_draws(shape):
    lists = [random_boxes(shape, seed, count) for seed, count in enumerate([1, 1, 1, 2, 2, 5])]
    assert_cuts_draw_the_same(shape, lists)


def test_numbers_by_local_index_are_found(monkeypatch):
    monkeypatch.setattr(Box, "index", lambda box: torch.arange(box.numel).view(box.local))
    with pytest.raises(AssertionError):
        assert_cuts_draw_the_same(*CUTS["columns"])


def test_a_parameter_cut_in_place_draws_its_part():
    whole = filled([Box.whole((8, 6))], Normal(0.02), torch.float32, (8, 6))
    param = nn.Parameter(torch.empty(8, 6, device="meta"))
    param.held = Held("w", (Box.whole((8, 6)),), Normal(0.02), decay=True)
    layout.cut(param, 1, 2, 3)
    layout.cut(param, 0, 4, 4)
    layout.materialize(param, torch.device("cpu"))
    rng.fill(param, seed=3)
    assert torch.equal(param, whole[4:, 2:5])


def test_initial_values_follow_the_rule_the_name_and_the_seed():
    box = Box.whole((50, 40))
    assert torch.equal(filled([box], Constant(1.5), torch.bfloat16), torch.full((2000,), 1.5, dtype=torch.bfloat16))
    unit = filled([box], Normal(1.0), torch.float64)
    assert torch.equal(unit, rng.normal(rng.key(3, "w"), torch.arange(2000)))
    assert torch.equal(filled([box], Normal(0.02), torch.float64), unit * 0.02)
    assert torch.equal(filled([box], Normal(0.02), torch.bfloat16), (unit * 0.02).bfloat16())


def test_fill_writes_in_place_and_records_no_graph():
    param = held([Box.whole((4,))], Normal(1.0), torch.float32)
    memory = param.data_ptr()
    rng.fill(param, seed=3)
    assert param.data_ptr() == memory
    assert param.requires_grad
    assert param.grad_fn is None


def test_numbers_do_not_depend_on_the_layout_of_the_index():
    index = torch.arange(1000).view(25, 40)
    numbers = rng.normal(1, index)
    assert torch.equal(rng.normal(1, index.t()), numbers.t())
    assert torch.equal(rng.normal(1, index[3::2, 1::3]), numbers[3::2, 1::3])
    assert torch.equal(rng.normal(1, index[:, 7]), numbers[:, 7])
    assert all(rng.normal(1, index[i, j]) == numbers[i, j] for i in range(25) for j in range(40))


@pytest.mark.parametrize("width", [1, 4, 7])
def test_a_row_keeps_the_same_whoever_asks(width):
    rows = torch.arange(60)
    whole = rng.keep(1, rows, width, 0.3)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))[:31]
    assert torch.equal(rng.keep(1, rows[order], width, 0.3), whole[order])
    assert torch.equal(rng.keep(1, rows.view(3, 4, 5), width, 0.3), whole.view(3, 4, 5, width))
    assert torch.equal(rng.keep(1, rows.view(6, 10).t(), width, 0.3), whole.view(6, 10, width).transpose(0, 1))
    assert torch.equal(rng.keep(1, rows[5].expand(2, 3), width, 0.3), whole[5].expand(2, 3, width))
    assert torch.equal(rng.keep(1, rows[5], width, 0.3), whole[5])


@pytest.mark.parametrize("width", [1, 4, 7])
def test_some_channels_get_their_part_of_the_mask(width):
    rows = torch.arange(7, 19)
    whole = rng.keep(1, rows, width, 0.3)
    for start in range(width + 1):
        for stop in range(start, width + 1):
            assert torch.equal(rng.keep(1, rows, width, 0.3, range(start, stop)), whole[:, start:stop])
    x = torch.randn(12, width)
    part = rng.dropout(x[:, 1:width], 1, rows, 0.3, width=width, channels=range(1, width))
    assert torch.equal(part, rng.dropout(x, 1, rows, 0.3)[:, 1:width])


@pytest.mark.parametrize("channels", [range(3, 6), range(-1, 2), range(0, 4, 2)])
def test_channels_that_are_none_are_refused(channels):
    with pytest.raises(ValueError, match="consecutive channels of a width of 5"):
        rng.keep(1, torch.arange(3), 5, 0.3, channels)


@pytest.mark.parametrize("width", [1, 4, 7])
@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
def test_a_rank_without_a_token_drops_nothing(shape, width):
    rows = torch.empty(shape, dtype=torch.int64)
    assert rng.keep(1, rows, width, 0.3).shape == (*shape, width)
    assert rng.dropout(torch.empty(*shape, width), 1, rows, 0.3).shape == (*shape, width)


def test_a_draw_leaves_its_index_alone():
    index = torch.arange(10)
    for draw in (rng.bits, rng.uniform, rng.normal):
        draw(1, index)
    rng.permutation(1, index, 10)
    rng.keep(1, index, 4, 0.5)
    assert torch.equal(index, torch.arange(10))


# ---- randomness

N = 1 << 20
STREAMS = {
    "neighbours": torch.arange(N),
    "far away": torch.arange(N) + 2**45,
    "a column": torch.arange(N) * 4096,
}


def unevenness(cells, count):
    """Chi-square of how often each of `count` cells is hit, in standard deviations from what chance gives."""
    hits = torch.bincount(cells.flatten(), minlength=count).double()
    assert hits.numel() == count
    expected = cells.numel() / count
    assert expected >= 5, "too few numbers a cell"
    statistic = ((hits - expected) ** 2 / expected).sum().item()
    return (statistic - (count - 1)) / math.sqrt(2 * (count - 1))


def correlation(a, b):
    """Of uniform numbers, in standard deviations from none."""
    return (12 * ((a - 0.5) * (b - 0.5)).mean() * math.sqrt(a.numel())).item()


@pytest.fixture(scope="module", params=STREAMS)
def drawn(request):
    """A million draws: (bits, uniform numbers)."""
    index = STREAMS[request.param]
    return rng.bits(KEYS[1], index), rng.uniform(KEYS[1], index)


def test_every_bit_is_a_coin(drawn):
    bits = drawn[0][: N // 8]
    for place in range(64):
        ones = ((bits >> place) & 1).sum().item()
        assert abs(ones - len(bits) / 2) < SIGMAS * math.sqrt(len(bits)) / 2, place


@pytest.mark.parametrize("shift", [0, 8, 24, 48, 56])
def test_every_byte_is_even(drawn, shift):
    assert abs(unevenness((drawn[0] >> shift) & 255, 256)) < SIGMAS


def test_uniform_numbers_are_even(drawn):
    cells = (drawn[1] * 256).long()
    assert abs(unevenness(cells, 256)) < SIGMAS


@pytest.mark.parametrize("lag", [1, 2, 16, 4096])
def test_pairs_are_even(drawn, lag):
    _, u = drawn
    cells = (u * 32).long()
    assert abs(unevenness(cells[:-lag] * 32 + cells[lag:], 1024)) < SIGMAS
    assert abs(correlation(u[:-lag], u[lag:])) < SIGMAS


OTHERS = {
    "seed": (rng.key(0, "w"), rng.key(1, "w")),
    "name": (rng.key(0, "blocks.0.w"), rng.key(0, "blocks.1.w")),
    "step": (rng.key(0, "dropout", 3, 7), rng.key(0, "dropout", 3, 8)),
    "next number": (5, 6),
    "sign": (5, -5),
    "golden": (0, rng._signed(rng._GOLDEN)),  # the same sequence a place later, if the key only moved the start
}


@pytest.mark.parametrize("pair", OTHERS)
def test_two_keys_share_nothing(pair):
    one, other = (rng.bits(key, torch.arange(N // 8)) for key in OTHERS[pair])
    assert np.intersect1d(one.numpy(), other.numpy()).size == 0  # not the same sequence from another start
    a, b = (rng._shift(z, 12).double() * 2.0**-52 for z in (one, other))
    assert abs(correlation(a, b)) < SIGMAS
    assert abs(correlation(a[1:], b[:-1])) < SIGMAS
    assert abs(unevenness((a * 32).long() * 32 + (b * 32).long(), 1024)) < SIGMAS
    assert abs(unevenness((one ^ other) & 255, 256)) < SIGMAS


def test_normal_numbers_have_the_normal_moments_and_tail():
    z = rng.normal(KEYS[1], torch.arange(4 * N))
    for power, (expected, variance) in enumerate([(0, 1), (1, 2), (0, 15), (3, 96)], start=1):
        assert abs((z**power).mean() - expected) < SIGMAS * math.sqrt(variance / z.numel()), power
    for tail in ((z > 4).sum(), (z < -4).sum()):
        expected = z.numel() * math.erfc(4 / math.sqrt(2)) / 2  # 133
        assert abs(tail - expected) < SIGMAS * math.sqrt(expected)


def test_the_ends_of_the_uniform_numbers_are_open_and_symmetric(monkeypatch):
    monkeypatch.setattr(rng, "bits", lambda key, index: torch.tensor([0, -1]))
    low, high = rng.uniform(0, torch.arange(2)).tolist()
    assert 0 < low < high < 1
    assert low == 1 - high
    below, above = rng.normal(0, torch.arange(2)).tolist()
    assert below == -above
    assert 8 < above < 9


# ---- dropout


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1 / 65536])
def test_keep_keeps_one_minus_p(p):
    kept = rng.keep(KEYS[2], torch.arange(20000), 50, p)
    spread = math.sqrt(p * (1 - p) / kept.numel())
    assert abs(kept.double().mean() - (1 - p)) <= SIGMAS * spread + 2**-17  # p is rounded to 1/65536
    for lane in range(4):
        assert abs(kept[:, lane::4].double().mean() - (1 - p)) <= SIGMAS * 2 * spread + 2**-17


def test_the_four_lanes_of_a_draw_are_independent():
    kept = rng.keep(KEYS[2], torch.arange(N // 4), 4, 0.5).long()
    assert abs(unevenness(kept @ torch.tensor([8, 4, 2, 1]), 16)) < SIGMAS


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.25, 0.9])
def test_dropout_keeps_the_mean_and_its_gradient_is_mask_times_scale(p, dtype):
    rows, generator = torch.arange(4000).view(40, 100), torch.Generator().manual_seed(0)
    x = torch.ones(40, 100, 31, dtype=dtype, requires_grad=True)
    y = rng.dropout(x, KEYS[2], rows, p)
    assert y.dtype == dtype
    spread = math.sqrt(p / (1 - p) / x.numel())
    assert abs(y.double().mean() - 1) < SIGMAS * spread + 2.0**-8 * (dtype == torch.bfloat16)
    cotangent = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(dtype)
    y.backward(cotangent)
    scale = reference.scale(p)
    mask = torch.from_numpy(reference.keep(KEYS[2] % 2**64, rows.numpy(), 31, p))
    assert torch.equal(y, mask.to(dtype) * scale)
    assert torch.equal(x.grad, cotangent * scale * mask)


@pytest.mark.parametrize("p", [0.0, 1e-6])  # the second is rounded to 0
def test_no_dropout_is_the_identity(p):
    x = torch.randn(3, 5)
    assert rng.dropout(x, KEYS[2], torch.arange(3), p) is x


@pytest.mark.parametrize("p", [1.0, 1.5, -0.1, math.nan, 1 - 1e-6])  # the last is rounded to 1
@pytest.mark.parametrize("draw", ["keep", "dropout"])
def test_other_probabilities_are_refused(p, draw):
    with pytest.raises(ValueError, match="dropout of"):
        if draw == "keep":
            rng.keep(KEYS[2], torch.arange(3), 5, p)
        else:
            rng.dropout(torch.ones(3, 5), KEYS[2], torch.arange(3), p)


# ---- permutations


@pytest.mark.parametrize("n", [*range(51), 20_011])
def test_a_permutation_is_one(n):
    image = rng.permutation(rng.key(0, "order", n), torch.arange(n), n)
    assert torch.equal(image.sort().values, torch.arange(n))


def test_an_image_does_not_depend_on_who_else_is_asked():
    whole = rng.permutation(1, torch.arange(97), 97)
    backwards = torch.arange(97).flip(0)[::5]
    assert torch.equal(rng.permutation(1, backwards, 97), whole[backwards])
    assert torch.equal(rng.permutation(1, torch.arange(96).view(8, 12), 97), whole[:96].view(8, 12))
    assert rng.permutation(1, torch.tensor(40), 97) == whole[40]


@pytest.mark.parametrize("n", [3, 5])
def test_every_place_and_every_pair_of_places_is_as_frequent(n):
    images = torch.stack([rng.permutation(rng.key(seed, "order"), torch.arange(n), n) for seed in range(500)])
    for place in range(n):
        assert abs(unevenness(images[:, place], n)) < SIGMAS, place
    first, second = images[:, 0], images[:, 1]
    pairs = first * (n - 1) + second - (second > first).long()
    assert abs(unevenness(pairs, n * (n - 1))) < SIGMAS


def test_the_order_changes_with_the_key():
    orders = {tuple(rng.permutation(rng.key(0, "order", epoch), torch.arange(50), 50).tolist()) for epoch in range(50)}
    assert len(orders) == 50
    fixed = [sum(place == image for place, image in enumerate(order)) for order in orders]
    assert abs(sum(fixed) - 50) < SIGMAS * math.sqrt(50)  # a random permutation has one fixed point on average
