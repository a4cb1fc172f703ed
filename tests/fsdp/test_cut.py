"""The cut of a parameter: ranges, shapes and places, typed as they should be; no ranks."""

import itertools

import pytest
import torch

from fsdp.cut import Cut
from fsdp.pack import row

# shape, dim, ranks: the ranges, the local shapes, the longest piece, the padding
TABLE = {
    ((4, 3), 0, 2): ("0-2 2-4", [(2, 3), (2, 3)], 6, 0),
    ((5, 3), 0, 3): ("0-2 2-4 4-5", [(2, 3), (2, 3), (1, 3)], 6, 3),
    ((7,), 0, 4): ("0-2 2-4 4-6 6-7", [(2,), (2,), (2,), (1,)], 2, 1),
    ((2,), 0, 4): ("0-1 1-2 2-2 2-2", [(1,), (1,), (0,), (0,)], 1, 2),
    ((0, 3), 0, 2): ("0-0 0-0", [(0, 3), (0, 3)], 0, 0),
    ((3, 0), 0, 2): ("0-2 2-3", [(2, 0), (1, 0)], 0, 0),
    ((), 0, 3): ("0-1 1-1 1-1", [(1,), (0,), (0,)], 1, 2),
    ((2, 5), 1, 2): ("0-3 3-5", [(2, 3), (2, 2)], 6, 2),
    ((2, 3, 4), 2, 3): ("0-2 2-3 3-4", [(2, 3, 2), (2, 3, 1), (2, 3, 1)], 12, 12),
    ((6, 2), 0, 1): ("0-6", [(6, 2)], 12, 0),
}


@pytest.mark.parametrize("case", TABLE)
def test_ranges_and_shapes(case):
    shape, dim, ranks = case
    ranges, shapes, longest, padding = TABLE[case]
    cut = Cut(torch.Size(shape), dim, ranks)
    found = [cut.range(rank) for rank in range(ranks)]
    assert " ".join(f"{own.start}-{own.stop}" for own in found) == ranges
    assert [tuple(cut.local(rank)) for rank in range(ranks)] == shapes
    assert (cut.longest, cut.padding) == (longest, padding)


def test_parts_and_places_are_the_picture():
    """[5, 3] on 3 ranks: two longer pieces in one copy, the shorter one in another; slots begin at the same place."""
    cut, whole = Cut(torch.Size([5, 3]), 0, 3), torch.arange(15).view(5, 3)
    slots = torch.full((3, 6), -1)
    for part, place in zip(cut.parts(whole), cut.places(slots), strict=True):
        place.copy_(part)
    assert slots.tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11], [12, 13, 14, -1, -1, -1]]
    assert [tuple(part.shape) for part in cut.parts(whole)] == [(2, 2, 3), (1, 1, 3)]


def test_a_cut_along_the_second_dimension_is_the_picture():
    cut, whole = Cut(torch.Size([2, 3]), 1, 2), torch.arange(6).view(2, 3)
    slots = torch.full((2, 4), -1)
    for part, place in zip(cut.parts(whole), cut.places(slots), strict=True):
        place.copy_(part)
    assert slots.tolist() == [[0, 1, 3, 4], [2, 5, -1, -1]]


SHAPES = [(), (1,), (2,), (3,), (7,), (5, 3), (37, 2), (0, 3), (3, 0), (2, 3, 4), (1, 1, 1)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_slots_hold_each_rank_s_piece_and_go_back(shape, ranks):
    """Along every dimension: a slot begins with narrow() of the whole tensor, and a copy back is that tensor."""
    for dim in range(max(1, len(shape))):
        cut, whole = Cut(torch.Size(shape), dim, ranks), torch.randn(shape)
        slots, again = torch.full((ranks, cut.longest), torch.nan), torch.full(shape, torch.nan)
        for part, place in zip(cut.parts(whole), cut.places(slots), strict=True):
            assert part.numel() and part.shape == place.shape
            place.copy_(part)
        for part, place in zip(cut.parts(again), cut.places(slots), strict=True):
            part.copy_(place)
        assert torch.equal(again, whole) and slots.isnan().sum() == cut.padding
        assert len(cut.parts(whole)) <= 2
        flat = whole if shape else whole.view(1)
        for rank, own in enumerate(cut.range(rank) for rank in range(ranks)):
            piece = flat.narrow(dim, own.start, len(own)).reshape(-1)
            assert torch.equal(slots[rank, : len(piece)], piece)
            assert cut.local(rank).numel() == len(piece)


def test_pieces_are_as_even_as_can_be():
    for n, ranks in itertools.product(range(12), range(1, 9)):
        lengths = [len(Cut(torch.Size([n]), 0, ranks).range(rank)) for rank in range(ranks)]
        assert sum(lengths) == n and max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)


def test_a_row():
    assert row([3, 5, 0, 2], 1) == ([0, 3, 8, 8], 10)
    assert row([3, 5, 0, 2], 4) == ([0, 4, 12, 12], 14)
    assert row([], 4) == ([], 0)
