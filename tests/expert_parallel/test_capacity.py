"""Capacity: how many, and who comes first. The expected values are typed."""

import pytest
import torch

from expert_parallel.capacity import capacity, within
from expert_parallel.sequences import chosen

N = -1  # nobody


@pytest.mark.parametrize(
    ("factor", "choices", "length", "experts", "room"),
    [
        (1.0, 1, 8, 4, 2),
        (1.0, 1, 9, 4, 3),  # rounded up
        (1.0, 2, 8, 4, 4),
        (1.25, 2, 8, 4, 5),
        (0.5, 2, 8, 4, 2),
        (0.5, 1, 3, 12, 1),  # at least one
        (2.0, 3, 7, 6, 7),
        (100.0, 2, 8, 4, 400),  # more than there are tokens
        (1.0, 1, 0, 4, 0),
    ],
)
def test_of_an_expert_and_sequence(factor, choices, length, experts, room):
    assert capacity(factor, choices, length, experts) == room


def fits(rows, room, experts=3):
    """Which choices find room, as words: a digit for an expert's number, a dot for one that does not."""
    taken = torch.tensor(rows)
    kept = within(taken, chosen(taken, experts), room)
    return [
        " ".join(
            "".join(str(e) if fine else "." for e, fine in zip(*pair, strict=True)) for pair in zip(*row, strict=True)
        )
        for row in zip(rows, kept.tolist(), strict=True)
    ]


def test_first_come():
    assert fits([[[0], [0], [1], [0], [1], [0]]], 2) == ["0 0 1 . 1 ."]
    assert fits([[[0], [0], [1], [0], [1], [0]]], 1) == ["0 . 1 . . ."]
    assert fits([[[0], [0], [1], [0], [1], [0]]], 4) == ["0 0 1 0 1 0"]


def test_a_later_slot_s_first_choice_comes_after_an_earlier_one_s_second():
    """By slot, and not all first choices before all second ones."""
    assert fits([[[0, 1], [1, 0], [1, 2], [2, 1]]], 2) == ["01 10 .2 2."]
    assert fits([[[0, 1], [1, 2], [1, 0]]], 1) == ["01 .2 .."]


def test_each_row_has_queues_of_its_own():
    assert fits([[[0], [0], [0]], [[0], [1], [0]], [[2], [2], [2]]], 1) == ["0 . .", "0 1 .", "2 . ."]


def test_nobody_takes_no_room():
    """Slots without a document, padding: neither they nor those behind them."""
    assert fits([[[N], [0], [N], [0], [0]]], 2) == [". 0 . 0 ."]
    assert fits([[[N, N], [0, 1], [N, N], [1, 0]]], 1) == [".. 01 .. .."]
    assert fits([[[N, N], [N, N]]], 5) == [".. .."]


def test_no_rows_and_no_room():
    nothing = torch.zeros(0, 4, 2, dtype=torch.int64)
    assert within(nothing, chosen(nothing, 3), 2).shape == (0, 4, 2)
    assert fits([[[0], [1]]], 0) == [". ."]


@pytest.mark.parametrize("choices", [1, 2, 3])
def test_as_a_loop_says(choices):
    numbers = torch.Generator().manual_seed(choices)
    for room in (1, 2, 5, 40):
        rows = torch.stack([torch.randperm(6, generator=numbers)[:choices] for _ in range(60)]).view(3, 20, choices)
        rows[1, 5:9] = N
        queues, loop = {}, torch.zeros_like(rows, dtype=torch.bool)
        for b, t, j in [(b, t, j) for b in range(3) for t in range(20) for j in range(choices)]:
            if (expert := int(rows[b, t, j])) != N:
                queues[b, expert] = queues.get((b, expert), 0) + 1
                loop[b, t, j] = queues[b, expert] <= room
        assert torch.equal(within(rows, chosen(rows, 6), room), loop)
