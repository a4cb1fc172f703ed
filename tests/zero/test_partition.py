"""The partition of a row, without ranks: typed as the picture, and as properties of any sizes; and its boxes."""

import itertools
import random

import pytest
import torch
from torch import nn

from collectives.layout import Box, Held, flat_range
from tests.shards import joined
from zero.partition import Partition
from zero.sharded import dealt


def picture(cut):
    """The row: a letter for each parameter, a dot for padding, a bar between the ranges."""
    row = ["."] * cut.padded
    for letter, start, size in zip("abcdefgh", cut.starts, cut.sizes, strict=False):
        row[start : start + size] = letter * size
    return "|".join("".join(row[cut.range(part)]) for part in range(cut.parts))


@pytest.mark.parametrize(
    ("sizes", "parts", "align", "expected"),
    [
        ([3, 5, 1], 1, 1, "aaabbbbbc"),
        ([3, 5, 1], 2, 1, "aaabb|bbbc."),
        ([3, 5, 1], 3, 1, "aaa|bbb|bbc"),
        ([3, 5, 1], 4, 1, "aaa|bbb|bbc|..."),
        ([3, 5, 1], 2, 4, "aaa.bbb|bb...c."),
        ([3, 5, 1], 3, 4, "aaa.b|bbbb.|..c.."),
        ([4, 8], 3, 4, "aaaa|bbbb|bbbb"),
        ([1], 3, 1, "a|.|."),
        ([1], 3, 8, "a|.|."),
        ([1, 1], 3, 4, "a.|..|b."),
        ([0, 2, 0], 2, 1, "b|b"),
        ([0, 2, 0], 2, 4, "bb|.."),
        ([7], 4, 1, "aa|aa|aa|a."),
        ([2, 7, 1, 3], 4, 1, "aabb|bbbb|bcdd|d..."),
        ([0], 2, 4, "|"),
    ],
)
def test_pictures(sizes, parts, align, expected):
    cut = Partition(sizes, parts, align)
    assert picture(cut) == expected
    assert cut.padding == expected.count(".")


def test_what_each_owns_of_each_parameter():
    """aaa.b|bbbb.|..c.."""
    cut = Partition([3, 5, 1], 3, 4)
    owned = [cut.owned(part) for part in range(3)]
    assert owned[0] == [range(3), range(1), range(0)]
    assert owned[1] == [range(3, 3), range(1, 5), range(0)]
    assert [piece for piece in owned[2] if piece] == [range(1)] and len(owned[2][0]) == len(owned[2][1]) == 0
    places = [
        [where for piece, where in zip(cut.owned(part), cut.within(part), strict=True) if piece] for part in range(3)
    ]
    assert places == [[slice(0, 3), slice(4, 5)], [slice(0, 4)], [slice(2, 3)]]


def any_partitions(align):
    numbers = random.Random(0)
    sizes = [[numbers.choice((0, 1, 2, 3, 7, 16, 37)) for _ in range(numbers.randint(1, 6))] for _ in range(30)]
    return [Partition(some, parts, align) for some, parts in itertools.product(sizes, (1, 2, 3, 4, 8))]


@pytest.mark.parametrize("align", [1, 8])
def test_ranges_are_equal_and_every_element_is_owned_once_where_it_lies(align):
    for cut in any_partitions(align):
        row = torch.full((cut.padded,), -1)
        for number, (start, size) in enumerate(zip(cut.starts, cut.sizes, strict=True)):
            row[start : start + size] = 1000 * number + torch.arange(size)
        owned = [[] for _ in cut.sizes]
        for part in range(cut.parts):
            mine = row[cut.range(part)]
            assert len(mine) == cut.length
            for number, (piece, where) in enumerate(zip(cut.owned(part), cut.within(part), strict=True)):
                assert mine[where].tolist() == [1000 * number + i for i in piece]
                owned[number] += piece
        assert owned == [list(range(size)) for size in cut.sizes]


@pytest.mark.parametrize("align", [1, 8])
def test_padding_is_less_than_a_number_a_rank_and_a_line_a_parameter(align):
    for cut in any_partitions(align):
        assert all(start % align == 0 for start in cut.starts)
        assert cut.padding == cut.padded - sum(cut.sizes)
        assert 0 <= cut.padding < cut.parts + align * len(cut.sizes)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
def test_boxes_of_all_ranks_cover_every_tensor(parts):
    """Sizes 1, 3, 7, 37·16, a scalar, and shapes of which a rank holds ragged rows."""
    shapes = [(1,), (), (3,), (7,), (37, 16), (2, 3, 5), (4, 1, 3), (0, 3)]
    tensors = [torch.arange(torch.Size(shape).numel()).view(shape) for shape in shapes]
    cut = Partition([tensor.numel() for tensor in tensors], parts, 8)
    for tensor, owned in zip(tensors, zip(*map(cut.owned, range(parts)), strict=True), strict=True):
        boxes = [flat_range(tensor.shape, piece.start, piece.stop) for piece in owned]
        assert sum(box.numel for some in boxes for box in some) == tensor.numel()
        if tensor.numel():
            assert torch.equal(joined(boxes, [tensor.flatten()[piece.start : piece.stop] for piece in owned]), tensor)
    whole = [flat_range(shape, 0, torch.Size(shape).numel()) for shape in shapes[:-1]]
    assert whole == [[Box.whole(shape)] for shape in shapes[:-1]]


def test_parameters_with_other_holders_are_dealt_apart():
    """Copies of a norm lie on ranks with other parameters of other sizes: among those they would be cut elsewhere."""
    named = {name: nn.Parameter(torch.zeros(3)) for name in "abcde"}
    for name, holders in {"a": (0, 1), "b": (0,), "c": (0, 1), "d": (0,)}.items():
        named[name].held = Held(name, (Box.whole((3,)),), None, False, holders=holders)
    named["d"].requires_grad = False
    assert [[*bucket] for bucket in dealt(named, 1000)] == [["c", "a"], ["b"], ["e"], ["d"]]
