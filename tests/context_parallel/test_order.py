"""Orders: which slots a rank holds, typed; one cut for all that belongs to a token, and its inverse."""

import math

import pytest
import torch

from context_parallel import NOWHERE, ORDERS, cut, join, slots
from tests.context_parallel import dense

PICTURES = {
    ("contiguous", 16, 2): "0 1 2 3 4 5 6 7 | 8 9 10 11 12 13 14 15",
    ("zigzag", 16, 2): "0 1 2 3 12 13 14 15 | 4 5 6 7 8 9 10 11",
    ("striped", 16, 2): "0 2 4 6 8 10 12 14 | 1 3 5 7 9 11 13 15",
    ("contiguous", 12, 3): "0 1 2 3 | 4 5 6 7 | 8 9 10 11",
    ("zigzag", 12, 3): "0 1 10 11 | 2 3 8 9 | 4 5 6 7",
    ("striped", 12, 3): "0 3 6 9 | 1 4 7 10 | 2 5 8 11",
    ("contiguous", 16, 4): "0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15",
    ("zigzag", 16, 4): "0 1 14 15 | 2 3 12 13 | 4 5 10 11 | 6 7 8 9",
    ("striped", 16, 4): "0 4 8 12 | 1 5 9 13 | 2 6 10 14 | 3 7 11 15",
    # what does not divide: slots from the length on are padding
    ("contiguous", 15, 2): "0 1 2 3 4 5 6 7 | 8 9 10 11 12 13 14 15",
    ("zigzag", 15, 2): "0 1 2 3 12 13 14 15 | 4 5 6 7 8 9 10 11",
    ("striped", 15, 2): "0 2 4 6 8 10 12 14 | 1 3 5 7 9 11 13 15",
    ("contiguous", 14, 2): "0 1 2 3 4 5 6 | 7 8 9 10 11 12 13",
    ("zigzag", 14, 2): "0 1 2 3 12 13 14 15 | 4 5 6 7 8 9 10 11",
    ("striped", 14, 2): "0 2 4 6 8 10 12 | 1 3 5 7 9 11 13",
    ("contiguous", 20, 4): "0 1 2 3 4 | 5 6 7 8 9 | 10 11 12 13 14 | 15 16 17 18 19",
    ("zigzag", 20, 4): "0 1 2 21 22 23 | 3 4 5 18 19 20 | 6 7 8 15 16 17 | 9 10 11 12 13 14",
    ("striped", 20, 4): "0 4 8 12 16 | 1 5 9 13 17 | 2 6 10 14 18 | 3 7 11 15 19",
    ("zigzag", 1, 2): "0 3 | 1 2",
    **{(order, 5, 1): "0 1 2 3 4" for order in ORDERS},
}
EACH_ORDER = pytest.mark.parametrize("order", ORDERS)
SIZES = pytest.mark.parametrize(("length", "parts"), [(16, 2), (15, 2), (14, 2), (20, 4), (7, 3), (1, 4), (5, 1)])


@pytest.mark.parametrize("case", PICTURES, ids=str)
def test_the_slots_of_every_rank(case):
    rows = [" ".join(map(str, row)) for row in slots(*case).tolist()]
    assert " | ".join(rows) == PICTURES[case]


@pytest.mark.parametrize(
    ("order", "picture"),
    [
        ("contiguous", "0 1 2 3 4 5 6 7 8 9 10 11 | 12 13 14 15 16 17 18 19 20 21 22 23"),
        ("zigzag", "0 1 2 3 4 5 18 19 20 21 22 23 | 6 7 8 9 10 11 12 13 14 15 16 17"),
        ("striped", "0 2 4 6 8 10 12 14 16 18 20 22 | 1 3 5 7 9 11 13 15 17 19 21 23"),
    ],
)
def test_parts_that_are_a_multiple(order, picture):
    """Of 3: 20 tokens in 2 parts are padded to 24, so that 3 ranks of another axis can cut every part again."""
    assert " | ".join(" ".join(map(str, row)) for row in slots(order, 20, 2, multiple=3).tolist()) == picture


@EACH_ORDER
@SIZES
@pytest.mark.parametrize("multiple", [1, 2, 3])
def test_slots_are_a_partition(order, length, parts, multiple):
    """Each slot once, ascending on every rank; no more padding than equal chunks and parts of a multiple need."""
    rows = slots(order, length, parts, multiple=multiple)
    chunks = 2 * parts if order == "zigzag" and parts > 1 else parts
    assert rows.dtype == torch.int64 and rows.is_contiguous()
    assert sorted(rows.flatten().tolist()) == list(range(rows.numel()))
    assert torch.equal(rows, rows.sort(1).values)
    unit = math.lcm(chunks, parts * multiple)
    assert rows.numel() % unit == 0 and 0 <= rows.numel() - length < unit


@EACH_ORDER
@SIZES
def test_t77_one_cut_for_all_that_belongs_to_a_token(order, length, parts):
    """Ids, labels, positions, documents and heads: rank r holds what stands at its slots; `join` is the inverse."""
    everyones = slots(order, length, parts)
    ids = torch.arange(2 * length).view(2, length)
    rows = {  # tensor, dim, fill
        "ids": (ids, 1, 0),
        "labels": (ids + 1, 1, -100),
        "positions": (ids % 5, 1, 0),
        "documents": (ids // 3, 1, NOWHERE),
        "mask": (ids % 2 == 0, 1, 0),
        "heads": (dense.random(0, 2, 3, length, 4), 2, 0),
        "heads, from the end": (dense.random(1, 2, 3, length, 4), -2, 0),
        "slots of a row": (torch.arange(length), 0, -1),
    }
    for name, (row, dim, fill) in rows.items():
        pieces = [cut(row, mine, dim=dim, fill=fill) for mine in everyones]
        for piece, mine in zip(pieces, everyones.tolist(), strict=True):
            for place, slot in enumerate(mine):
                here = piece.select(dim, place)
                right = row.select(dim, slot) if slot < length else torch.full_like(here, fill)
                assert torch.equal(here, right), name
        assert torch.equal(join(pieces, everyones, length, dim=dim), row), name


@EACH_ORDER
def test_one_rank_holds_the_row_as_it_is(order):
    row = torch.arange(7)[None]
    [mine] = slots(order, 7, 1)
    assert torch.equal(cut(row, mine), row) and torch.equal(join([row], mine[None], 7), row)


def test_a_piece_is_a_copy():
    """To fill padding must not write into the row."""
    row = torch.arange(3)[None]
    cut(row, torch.tensor([1, 3]), fill=9)
    assert row.tolist() == [[0, 1, 2]]


def test_gradients_pass_through_a_cut():
    row = torch.ones(1, 3, requires_grad=True)
    cut(row, torch.tensor([2, 0, 3]), fill=9).mul(torch.tensor([5.0, 7.0, 11.0])).sum().backward()
    assert row.grad.tolist() == [[7.0, 0.0, 5.0]]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("spiral", 16, 2), "order='spiral' is unknown; use one of contiguous, zigzag, striped"),
        (("zigzag", 0, 2), "a row of 0 tokens in 2 parts: both must be at least 1"),
        (("zigzag", 16, 0), "a row of 16 tokens in 0 parts: both must be at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, text):
    with pytest.raises(ValueError) as error:
        slots(*arguments)
    assert str(error.value) == text
