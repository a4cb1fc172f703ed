"""Rows, whole and cut: who chose what, in the order of slots, wherever the slots lie."""

import pytest
import torch

from context_parallel import slots
from expert_parallel import Sequences
from expert_parallel.capacity import within
from expert_parallel.sequences import NOBODY, chosen, whole_rows
from tests.expert_parallel.cases import mine_of
from tests.recorder import recording

N = NOBODY
CUTS = [(size, order) for size in (2, 3, 4) for order in ("contiguous", "zigzag", "striped")]


def test_chosen():
    assert chosen(torch.tensor([[[2, 0], [N, N], [1, 2]]]), 3).tolist() == [[[1, 0, 1], [0, 0, 0], [0, 1, 1]]]
    assert chosen(torch.zeros(0, 4, 2, dtype=torch.int64), 3).shape == (0, 4, 3)


def test_whole_rows_full_of_tokens():
    whole = Sequences.whole(torch.zeros(3, 5, 2))
    assert whole.routed.all() and whole.routed.shape == (3, 5) and whole.counted.tolist() == [True] * 3
    assert (whole.length, int(whole.rows), int(whole.tokens), whole.slots) == (5, 3, 15, None)


def test_whole_rows_of_nothing():
    """counted: a row of no tokens has none."""
    none = Sequences.whole(torch.zeros(2, 0, 2))
    assert none.counted.tolist() == [False, False] and int(none.tokens) == 0
    assert Sequences.whole(torch.zeros(0, 5, 2)).routed.shape == (0, 5)


# -- cut rows ----------------------------------------------------------------------------------------------------------


def gathered(run, cut, rows, order, group_ranks):
    """The whole rows, as each rank of the group sees them, and what it called."""
    group = mine_of(run, *group_ranks)
    everyones = slots(order, cut, group.size())
    padded = torch.cat([rows, torch.full((rows.shape[0], everyones.numel() - cut, rows.shape[2]), N)], 1)
    about = Sequences(None, None, cut, None, None, everyones)
    with recording() as recorder:
        whole = whole_rows(padded[:, everyones[group.rank()]], about, group)
    return whole, [(call.op, call.elements, call.dtype) for call in recorder.calls]


@pytest.mark.parametrize("length", [24, 17, 3])
@pytest.mark.parametrize(("size", "order"), CUTS)
def test_gathered_in_the_order_of_slots(pool, size, order, length):
    """k integers of four bytes a token."""
    rows = torch.randint(300, (3, length, 2), generator=torch.Generator().manual_seed(size))
    width = slots(order, length, size).numel()
    for whole, calls in pool.run(size, gathered, length, rows, order, [range(size)]):
        assert whole.dtype == torch.int64 and torch.equal(whole[:, :length], rows)
        assert (whole[:, length:] == N).all() and whole.shape[1] == width
        assert calls == [("all_gather_single", 3 * width * 2, torch.int32)]


def test_within_a_part_of_the_ranks(pool):
    """Each pair has rows of its own."""
    rows = torch.arange(2 * 8).view(2, 8, 1)
    for whole, _ in pool.run(4, gathered, 8, rows, "striped", [(0, 1), (2, 3)]):
        assert torch.equal(whole, rows)


def test_a_group_of_one_gathers_nothing(pool):
    rows = torch.arange(8).view(1, 8, 1)
    assert [calls for _, calls in pool.run(1, gathered, 8, rows, "zigzag", [(0,)])] == [[]]
    assert whole_rows(rows, Sequences.whole(rows), None) is rows


def kept(run, order, row, room):
    """The choices of one row that find room, at this rank's slots."""
    everyones = slots(order, len(row), run.size)
    padded = torch.tensor(row + [N] * (everyones.numel() - len(row))).view(1, -1, 1)
    mine = everyones[run.rank]
    whole = whole_rows(padded[:, mine], Sequences(None, None, len(row), None, None, everyones), run.world)
    return within(whole, chosen(whole, 3), room)[0, mine, 0].tolist()


Y, X = True, False
ROW = [0, 0, 1, 0, N, 0, 1, 1]  # two of each find room: slots 0, 1 and 2, 6
TYPED = {  # (order, ranks) → of each rank, in the order of its slots
    ("contiguous", 2): [[Y, Y, Y, X], [X, X, Y, X]],
    ("zigzag", 2): [[Y, Y, Y, X], [Y, X, X, X]],  # slots 0 1 6 7, 2 3 4 5
    ("striped", 2): [[Y, Y, X, Y], [Y, X, X, X]],  # 0 2 4 6, 1 3 5 7
    ("zigzag", 4): [[Y, X], [Y, Y], [Y, X], [X, X]],  # 0 7, 1 6, 2 5, 3 4
    ("striped", 4): [[Y, X], [Y, X], [Y, Y], [X, X]],  # 0 4, 1 5, 2 6, 3 7
    ("striped", 3): [[Y, X, Y], [Y, X, X], [Y, X, X]],  # 0 3 6, 1 4 7, 2 5 and padding
    ("zigzag", 3): [[Y, Y, X, X], [Y, X, X, X], [X, X, Y, X]],  # 0 1 and padding; 2 3 and padding; 4 5 6 7
}


@pytest.mark.parametrize(("order", "ranks"), TYPED)
def test_first_come_by_slot_wherever_it_lies(pool, order, ranks):
    assert pool.run(ranks, kept, order, ROW, 2) == TYPED[order, ranks]
