"""Places: what a query sees, against three loops; the blocks that are computed, typed and counted."""

import itertools
from dataclasses import replace

import pytest
import torch

from context_parallel import NOWHERE, ORDERS, Places, slots
from context_parallel.places import Block
from tests.context_parallel import dense

DOCUMENTS = {"one": (), "1 and the rest": (1, 12), "short": (3, 5, 1, 2), "single tokens": (1,) * 13}
LENGTHS = (13, 8)  # that 2 and 3 ranks do not divide, and that 2 and 4 do
EVERY = list(itertools.product(ORDERS, (1, 2, 3, 4), LENGTHS, DOCUMENTS, (True, False)))


def places(order, parts, length, lengths=(), *, causal=True, rows=2, hole=None):
    documents = dense.documents(length, rows, lengths, [] if hole is None else [hole])
    return Places.of(documents, slots(order, length, parts), causal=causal), documents


def sees(documents, causal, query, key):
    """Whether the query at a slot of a row sees the key at another."""
    if query >= len(documents) or key >= len(documents):
        return False  # padding
    return documents[query] == documents[key] >= 0 and (not causal or query >= key)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_visible_is_what_three_loops_say(order, parts):
    for length, lengths, causal in itertools.product(LENGTHS, DOCUMENTS.values(), (True, False)):
        given, documents = places(order, parts, length, lengths, causal=causal, hole=4)
        everyones = given.slots.tolist()
        for mine, theirs in itertools.product(range(parts), repeat=2):
            right = [
                [[sees(row, causal, query, key) for key in everyones[theirs]] for query in everyones[mine]]
                for row in documents.tolist()
            ]
            assert given.visible(mine, theirs).tolist() == right
            some = given.visible(mine, theirs, slice(1, 3), slice(0, 2))
            assert some.tolist() == [[line[0:2] for line in row[1:3]] for row in right]


def computed(given, mine, theirs):
    """How often each pair is computed, [B, queries, keys], by the kinds and masks of the blocks."""
    B, n = given.first.shape[1:]
    count = torch.zeros(B, n, n, dtype=torch.int64)
    for block in given.blocks(mine, theirs):
        part = count[:, block.queries, block.keys]
        mask = given.mask(mine, theirs, block)
        assert (mask is not None) == (block.kind == "masked")
        inside = torch.ones_like(part) if mask is None else mask[:, 0].long()
        part += inside.tril() if block.kind == "causal" else inside
    return count


@pytest.mark.parametrize("least", [1, 2, 64])
def test_what_is_visible_is_computed_once_and_nothing_else(least, monkeypatch):
    """However small the blocks may be cut."""
    monkeypatch.setattr("context_parallel.places.LEAST", least)
    for order, parts, length, lengths, causal in EVERY[least % 3 :: 3]:
        given, _ = places(order, parts, length, DOCUMENTS[lengths], causal=causal, hole=4)
        for mine, theirs in itertools.product(range(parts), repeat=2):
            visible = given.visible(mine, theirs)
            assert torch.equal(computed(given, mine, theirs), visible.long())
            queries = [q for block in given.blocks(mine, theirs) for q in range(*block.queries.indices(1000))]
            assert len(queries) == len(set(queries)), "two blocks of the same queries are merged wrongly"
            assert all(visible[:, block.queries, block.keys].any() for block in given.blocks(mine, theirs))


def block(queries, keys, kind):
    return Block(slice(*queries), slice(*keys), kind)


KINDS = {  # of 16 tokens on two ranks: (this rank, of whose keys) → blocks
    "contiguous": {
        (0, 0): [block((0, 8), (0, 8), "causal")],
        (0, 1): [],
        (1, 0): [block((0, 8), (0, 8), "full")],
        (1, 1): [block((0, 8), (0, 8), "causal")],
    },
    "zigzag": {
        (0, 0): [block((0, 8), (0, 8), "causal")],
        (0, 1): [block((4, 8), (0, 8), "full")],
        (1, 0): [block((0, 8), (0, 4), "full")],
        (1, 1): [block((0, 8), (0, 8), "causal")],
    },
    "striped": {
        (0, 0): [block((0, 8), (0, 8), "causal")],
        (0, 1): [block((1, 8), (0, 7), "causal")],
        (1, 0): [block((0, 8), (0, 8), "causal")],
        (1, 1): [block((0, 8), (0, 8), "causal")],
    },
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_blocks_of_one_causal_document(order):
    """No order needs a mask."""
    given, _ = places(order, 2, 16)
    assert {pair: given.blocks(*pair) for pair in itertools.product(range(2), repeat=2)} == KINDS[order]


@pytest.mark.parametrize("order", ORDERS)
def test_without_causality_all_is_full(order):
    given, _ = places(order, 2, 16, causal=False)
    for pair in itertools.product(range(2), repeat=2):
        assert given.blocks(*pair) == [block((0, 8), (0, 8), "full")]


def test_the_blocks_of_packed_documents():
    """Of 5, 3 and 8 tokens: rank 1 needs nothing of rank 0; what rows do not have in common wants a mask."""
    given, _ = places("contiguous", 2, 16, (5, 3), rows=1)
    assert given.blocks(0, 0) == [block((0, 8), (0, 8), "masked")]
    assert (given.blocks(0, 1), given.blocks(1, 0)) == ([], [])
    assert given.blocks(1, 1) == [block((0, 8), (0, 8), "causal")]


def test_padding_is_not_computed():
    """13 tokens on two ranks: of the 7 on rank 1 the last is padding."""
    given, _ = places("contiguous", 2, 13)
    assert given.blocks(1, 0) == [block((0, 6), (0, 7), "full")]
    assert given.blocks(1, 1) == [block((0, 6), (0, 6), "causal")]
    given, _ = places("contiguous", 4, 2)
    assert given.blocks(3, 0) == given.blocks(3, 3) == []


# -- work --------------------------------------------------------------------------------------------------------------


def work(order, parts, length, lengths=()):
    given, _ = places(order, parts, length, lengths, rows=1)
    return [given.pairs(rank) for rank in range(parts)]


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
def test_causal_work_of_every_order(parts):
    """Exactly, n = T/P: contiguous grows by n² a rank, zigzag is even, striped grows by n; the sum is T(T+1)/2, so
    nothing is computed that is masked.
    """
    n = 12
    own = n * (n + 1) // 2
    assert work("contiguous", parts, parts * n) == [own + rank * n * n for rank in range(parts)]
    assert work("zigzag", parts, parts * n) == parts * [own + (parts - 1) * n * n // 2]
    below = n * (n - 1) // 2
    assert work("striped", parts, parts * n) == [(rank + 1) * own + (parts - 1 - rank) * below for rank in range(parts)]
    for order in ORDERS:
        assert sum(work(order, parts, parts * n)) == parts * n * (parts * n + 1) // 2


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_how_uneven_the_orders_are(parts):
    """Largest over mean of a long row: 2 - 1/P, 1, 1 and a little."""
    ratio = {}
    for order in ORDERS:
        pairs = work(order, parts, 240 * parts)
        ratio[order] = max(pairs) * parts / sum(pairs)
    assert ratio["contiguous"] == pytest.approx(2 - 1 / parts, rel=0.01)
    assert ratio["zigzag"] == 1
    assert 1 < ratio["striped"] < 1.01


@pytest.mark.parametrize(
    ("length", "pairs"),
    [
        (64, 8 * 64 * 65 // 2),  # as long as the smallest blocks: each a triangle
        (16, 8 * 64 * 64),  # four in each of the smallest blocks
        (256, 2 * 256 * 257 // 2),
        (512, 512 * 513 // 2),
    ],
)
def test_many_documents_are_cut_into_blocks(length, pairs):
    """512 tokens on one rank: of 512² pairs few are left."""
    assert work("contiguous", 1, 512, (length,) * (512 // length)) == [pairs]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("parts", [2, 4])
def test_many_documents_are_less_work_in_every_order(order, parts):
    """32 documents of 64 tokens, about a third of one document's pairs and less."""
    assert sum(work(order, parts, 2048, (64,) * 32)) < 0.35 * sum(work(order, parts, 2048))


# -- neighbours --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("parts", "size"), [(4, 2), (4, 4), (4, 1), (6, 2), (6, 3)])
@pytest.mark.parametrize("causal", [True, False])
def test_neighbours_together(order, parts, size, causal):
    """Their slots in ascending order, and what they see with them."""
    given, documents = places(order, parts, 23, (3, 5, 1), causal=causal)
    together = given.grouped(size)
    sorted_slots = given.slots.view(parts // size, -1).sort(1).values
    assert torch.equal(together.slots, sorted_slots)
    expected = Places.of(documents, sorted_slots, causal=causal)
    assert torch.equal(together.first, expected.first) and torch.equal(together.last, expected.last)
    assert given.grouped(size) is together, "found once, for all layers"


def test_blocks_are_found_once():
    given, _ = places("zigzag", 2, 16)
    assert given.blocks(1, 0) is given.blocks(1, 0)


def test_what_is_found_is_not_taken_along():
    """Of other documents other blocks."""
    given, _ = places("zigzag", 2, 16)
    assert given.blocks(0, 1)
    assert not replace(given, last=given.last.new_full(given.last.shape, -1)).blocks(0, 1)


def test_no_rows_no_blocks():
    given, _ = places("zigzag", 2, 16, rows=0)
    assert [given.blocks(0, theirs) for theirs in range(2)] == [[], []]


# -- documents are runs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [[0, 1, 0], [0, NOWHERE, 0], [2, 2, 1, 3, 1]])
def test_an_interrupted_document_is_refused(row):
    with pytest.raises(
        ValueError, match=r"^a document is interrupted by another one: lay the tokens of each end to end$"
    ):
        Places.of(torch.tensor([list(range(len(row))), row]), slots("zigzag", len(row), 2))


def test_rows_longer_than_their_slots_are_refused():
    text = r"^12 slots are too few for rows of 13 tokens: make slots\(order, 13, P\)$"
    with pytest.raises(ValueError, match=text):
        Places.of(torch.zeros(2, 13, dtype=torch.int64), slots("zigzag", 12, 2))


def test_what_a_query_sees_is_an_interval_of_keys():
    """Documents 0-2, 3-8, 9; rank 0 has 0 1 2 9 10 11 (10, 11 are padding), rank 1 has 3-8."""
    given = Places.of(torch.tensor([[5, 5, 5, 0, 0, 0, 0, 0, 0, 7]]), slots("zigzag", 10, 2))
    assert given.slots.tolist() == [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]
    seen = {
        pair: [list(zip(*(end[0].tolist() for end in given.seen(*pair)), strict=True))] for pair in ((0, 0), (1, 1))
    }
    assert seen[0, 0] == [[(0, 1), (0, 2), (0, 3), (3, 4), (0, 0), (0, 0)]]
    assert seen[1, 1] == [[(0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (0, 6)]]
    assert not given.blocks(0, 1) and not given.blocks(1, 0)


def test_the_order_of_neighbours_and_back():
    given, _ = places("zigzag", 4, 16)
    there, back = given.order(2, 1)
    mine = given.slots[2:].flatten()
    assert mine[there].tolist() == sorted(mine.tolist()) and torch.equal(mine[there][back], mine)
    assert given.order(2, 1)[0] is there, "found once, for all layers"
