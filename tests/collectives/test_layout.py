"""Boxes against pictures and torch's own slicing; declarations, cuts in place, and the check over ranks."""

import itertools
import math
import random

import pytest
import torch
from torch import nn

from collectives import layout
from collectives.layout import Box, Constant, Held, Normal

SHAPES = [(), (1,), (7,), (0,), (4, 5), (3, 0, 2), (2, 3, 4), (1, 1, 6), (3, 1, 2, 5)]


def arange(shape):
    """A tensor whose values are its own row-major indices."""
    return torch.arange(math.prod(shape)).view(shape)


def random_box(shape, draw):
    """Any box of a tensor of this shape, empty ones too."""
    edges = [sorted((draw.randint(0, size), draw.randint(0, size))) for size in shape]
    return Box(shape, tuple(first for first, _ in edges), tuple(last - first for first, last in edges))


def random_boxes(shape, seed, count):
    draw = random.Random(seed)
    return [random_box(shape, draw) for _ in range(count)]


def elements(box):
    """The global indices of a box, in order, by torch's slicing of the whole."""
    return arange(box.shape)[box.slices(Box.whole(box.shape))]


# ---- boxes


def test_a_box_is_its_picture():
    #  . . . . .
    #  . 6 7 8 .      rows 1 and 2, columns 1 to 3 of a tensor of 4 rows and 5 columns
    #  . B C D .
    #  . . . . .
    box = Box((4, 5), (1, 1), (2, 3))
    assert box.numel == 6
    assert box.index().tolist() == [[6, 7, 8], [11, 12, 13]]
    assert box.cut(0, 1, 1) == Box((4, 5), (2, 1), (1, 3))
    assert box.cut(1, 1, 2) == box.cut(-1, 1, 2) == Box((4, 5), (1, 2), (2, 2))
    assert box.cut(1, 3, 0) == Box((4, 5), (1, 4), (2, 0))
    assert box.slices(Box.whole((4, 5))) == (slice(1, 3), slice(1, 4))
    assert box.cut(1, 1, 2).slices(within=box) == (slice(0, 2), slice(1, 3))
    below = Box((4, 5), (2, 0), (2, 3))
    assert box.intersect(below) == below.intersect(box) == Box((4, 5), (2, 1), (1, 2))
    assert box.intersect(Box((4, 5), (3, 0), (1, 5))) is None  # they touch
    assert box.intersect(Box((4, 5), (2, 2), (1, 0))) is None  # the other is empty


def test_a_scalar_is_one_element():
    scalar = Box.whole(())
    assert scalar == Box((), (), ())
    assert scalar.numel == 1
    assert scalar.index().shape == ()
    assert scalar.index() == 0
    assert scalar.intersect(scalar) == scalar
    assert scalar.slices(scalar) == ()


@pytest.mark.parametrize("shape", SHAPES)
def test_boxes_are_what_torch_slices(shape):
    for a, b in itertools.batched(random_boxes(shape, 0, 80), 2) if False else _pairs(random_boxes(shape, 0, 80)):
        assert torch.equal(a.index(), elements(a))
        common = set(elements(a).flatten().tolist()) & set(elements(b).flatten().tolist())
        both = a.intersect(b)
        assert (set(both.index().flatten().tolist()) if both else set()) == common
        if both:
            assert torch.equal(elements(a)[both.slices(within=a)], both.index())
            assert torch.equal(elements(b)[both.slices(within=b)], both.index())


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape])
def test_a_cut_is_what_torch_narrows(shape):
    draw = random.Random(1)
    for box in random_boxes(shape, 1, 20):
        dim = draw.randrange(len(shape))
        start, stop = sorted((draw.randint(0, box.local[dim]), draw.randint(0, box.local[dim])))
        assert torch.equal(box.cut(dim, start, stop - start).index(), elements(box).narrow(dim, start, stop - start))


@pytest.mark.parametrize(("start", "length"), [(-1, 1), (0, 4), (3, 1), (1, -1)])
def test_a_cut_beyond_the_piece_is_refused(start, length):
    with pytest.raises(ValueError, match=f"cannot cut {start}:{start + length} out of dim 1"):
        Box((4, 5), (1, 1), (2, 3)).cut(1, start, length)


def test_boxes_of_different_tensors_do_not_intersect():
    with pytest.raises(ValueError, match="different shape"):
        Box.whole((2, 3)).intersect(Box.whole((3, 2)))
