"""Boxes against pictures and torch's own slicing; declarations, cuts in place, and the check over ranks."""

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
    for a, b in zip(random_boxes(shape, 0, 40), random_boxes(shape, 1, 40), strict=True):
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


# ---- flat ranges


RANGED = [(), (5,), (3, 4), (2, 3, 2), (1, 4), (4, 1), (2, 1, 3), (1, 1), (2, 2, 2, 2), (0, 3)]


@pytest.mark.parametrize("shape", RANGED)
def test_a_flat_range_is_the_elements_in_order(shape):
    """Every range there is."""
    numel = math.prod(shape)
    for start in range(numel + 1):
        for stop in range(start, numel + 1):
            boxes = layout.flat_range(shape, start, stop)
            indices = [index for box in boxes for index in box.index().flatten().tolist()]
            assert indices == list(range(start, stop))
            assert len(boxes) <= max(1, 2 * len(shape) - 1)
            assert all(box.numel for box in boxes)


def test_a_flat_range_is_its_picture():
    #  . . . a a      elements 3 to 16 of a tensor of 4 rows and 5 columns:
    #  b b b b b      a ragged row, the full rows, a ragged row
    #  b b b b b
    #  c c . . .
    assert layout.flat_range((4, 5), 3, 17) == [
        Box((4, 5), (0, 3), (1, 2)),
        Box((4, 5), (1, 0), (2, 5)),
        Box((4, 5), (3, 0), (1, 2)),
    ]


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2), (0, 13), (13, 13)])
def test_a_flat_range_outside_is_refused(start, stop):
    with pytest.raises(ValueError, match=rf"elements {start}:{stop} are not in a tensor of shape \(3, 4\)"):
        layout.flat_range((3, 4), start, stop)


# ---- declarations


class Tied(nn.Module):
    """The head's weight is the embedding's."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4, device="meta")
        self.head = nn.Linear(4, 6, device="meta")
        self.head.weight = self.embed.weight


def declared(shape, boxes, device="meta", **more):
    """A parameter named w that says it holds these boxes."""
    param = nn.Parameter(torch.empty(shape, device=device))
    param.held = Held("w", tuple(boxes), Normal(1.0), decay=True, **more)
    return param


def test_every_parameter_is_declared_by_the_rules():
    model = Tied()
    init = {"embed.weight": Normal(0.5), "head.bias": Constant(0.0)}
    layout.declare(model, init.__getitem__, decay=lambda name: "bias" not in name)
    assert model.head.weight.held == Held("embed.weight", (Box.whole((6, 4)),), Normal(0.5), decay=True)
    assert model.head.bias.held == Held("head.bias", (Box.whole((6,)),), Constant(0.0), decay=False)


def test_a_cut_keeps_the_object_and_its_sharing():
    model = Tied()
    layout.declare(model, lambda name: Normal(1.0), lambda name: True)
    weight = model.embed.weight
    weight.held.copies, weight.held.copy = 2, 1  # true before the cut only
    layout.cut(weight, 0, 2, 3)
    layout.cut(weight, 1, 1, 2)
    assert model.embed.weight is weight
    assert model.head.weight is weight
    assert isinstance(weight, nn.Parameter)
    assert weight.is_contiguous()
    assert weight.shape == (3, 2)
    assert weight.held == Held("embed.weight", (Box((6, 4), (2, 1), (3, 2)),), Normal(1.0), decay=True)


def test_several_boxes_are_cut_along_dim_0():
    #  storage: row 0, row 1 | row 4, row 5, row 6
    #  cut 1:4:        row 1 | row 4, row 5
    param = declared((5, 3), [Box((8, 3), (0, 0), (2, 3)), Box((8, 3), (4, 0), (3, 3))])
    layout.cut(param, 0, 1, 3)
    assert param.shape == (3, 3)
    assert param.held.boxes == (Box((8, 3), (1, 0), (1, 3)), Box((8, 3), (4, 0), (2, 3)))
    layout.cut(param, 0, 2, 1)
    assert param.held.boxes == (Box((8, 3), (5, 0), (1, 3)),)


def test_a_cut_across_several_boxes_is_refused():
    boxes = (Box((8, 3), (0, 0), (2, 3)), Box((8, 3), (4, 0), (3, 3)))
    param = declared((5, 3), boxes)
    with pytest.raises(ValueError, match="w is 2 boxes in a row"):
        layout.cut(param, 1, 0, 1)
    assert (param.shape, param.held.boxes) == ((5, 3), boxes)


def test_a_flat_range_of_several_boxes_is_not_cut_as_rows():
    """Its storage has one dimension, its boxes have two: what 3 elements are cannot be told by rows."""
    param = declared((9,), layout.flat_range((4, 5), 3, 12))
    with pytest.raises(ValueError, match=r"^w"):
        layout.cut(param, 0, 0, 3)


def numbered(shape):
    """A declared parameter whose values are its own row-major indices."""
    param = nn.Parameter(arange(shape).double())
    param.held = Held("w", (Box.whole(shape),), Normal(1.0), decay=True, copies=2, copy=1, holders=(0, 1))
    return param


def test_pieces_are_cut_one_after_the_other():
    #  rows 0 … 7 of queries, 8 and 9 of keys, 10 and 11 of values; rank 1 of 2 holds 4 5 6 7 | 9 | b
    param = numbered((12, 3))
    storage = param.data_ptr()
    layout.cut_pieces(param, 0, [range(4, 8), range(9, 10), range(11, 12)])
    assert param[:, 0].tolist() == [12, 15, 18, 21, 27, 33]
    assert param.held.boxes == (
        Box((12, 3), (4, 0), (4, 3)),
        Box((12, 3), (9, 0), (1, 3)),
        Box((12, 3), (11, 0), (1, 3)),
    )
    assert (param.held.copies, param.held.copy, param.held.holders) == (None, None, ())
    assert isinstance(param, nn.Parameter) and param.is_contiguous() and param.data_ptr() != storage
    assert param.untyped_storage().nbytes() == 6 * 3 * 8  # nothing of the rest lives on


def test_one_piece_is_a_cut_of_any_dim():
    for dim, expected in ((0, [[4, 5, 6, 7]]), (1, [[1], [5], [9]])):
        param = numbered((3, 4))
        layout.cut_pieces(param, dim, [range(1, 2)])
        assert param.tolist() == expected
        assert param.is_contiguous() and param.untyped_storage().nbytes() == 8 * param.numel()
        [box] = param.held.boxes
        assert box == Box.whole((3, 4)).cut(dim, 1, 1)


def test_a_vector_and_an_empty_piece():
    bias = numbered((6,))
    layout.cut_pieces(bias, 0, [range(1, 3), range(5, 6)])
    assert bias.tolist() == [1, 2, 5]
    empty = numbered((6, 2))
    layout.cut_pieces(empty, 0, [range(2, 2)])
    assert (empty.shape, empty.held.boxes) == ((0, 2), (Box((6, 2), (2, 0), (0, 2)),))


def test_the_whole_as_one_piece_stays():
    param = numbered((4, 2))
    data, held = param.data_ptr(), param.held
    layout.cut_pieces(param, 0, [range(4)])
    assert (param.data_ptr(), param.held) == (data, held)


def test_pieces_of_a_parameter_on_the_meta_device():
    param = declared((12, 3), [Box.whole((12, 3))])
    layout.cut_pieces(param, 0, [range(2), range(6, 8)])
    assert param.is_meta and param.shape == (4, 3)
    assert [box.offset for box in param.held.boxes] == [(0, 0), (6, 0)]


def test_a_shared_parameter_is_cut_once():
    """By the second module that has it, to the same; to anything else it cannot be."""
    model = Tied()
    layout.declare(model, lambda name: Normal(1.0), lambda name: True)
    layout.cut_pieces(model.embed.weight, 0, [range(2, 4)])
    layout.cut_pieces(model.head.weight, 0, [range(2, 4)])
    assert model.head.weight is model.embed.weight
    assert model.head.weight.shape == (2, 4)
    held = model.head.weight.held
    with pytest.raises(ValueError, match=r"embed\.weight is cut already, to .* and cannot be cut to"):
        layout.cut_pieces(model.head.weight, 0, [range(2)])
    with pytest.raises(ValueError, match=r"embed\.weight is cut already"):
        layout.cut_pieces(model.head.weight, 1, [range(2)])
    assert (model.head.weight.shape, model.head.weight.held) == ((2, 4), held)


def test_a_piece_can_be_cut_again():
    """As data parallelism does, along the rows of all pieces."""
    param = numbered((12, 3))
    layout.cut_pieces(param, 0, [range(4, 8), range(9, 10), range(11, 12)])
    layout.cut(param, 0, 3, 2)
    assert param[:, 0].tolist() == [21, 27]
    assert param.held.boxes == (Box((12, 3), (7, 0), (1, 3)), Box((12, 3), (9, 0), (1, 3)))


@pytest.mark.parametrize("pieces", [[range(3, 5)], [range(-1, 1)], [range(2), range(3, 5)]])
def test_a_piece_beyond_the_tensor_is_refused(pieces):
    param = numbered((4, 2))
    with pytest.raises(ValueError, match="cannot cut"):
        layout.cut_pieces(param, 0, pieces)
    assert (param.shape, param.held.boxes) == ((4, 2), (Box.whole((4, 2)),))


@pytest.mark.parametrize("trained", [True, False])
def test_materialize_keeps_all_but_the_device(trained):
    model = Tied().requires_grad_(trained)
    model.other = nn.Parameter(torch.arange(3.0))
    layout.declare(model, lambda name: Normal(1.0), lambda name: True)
    weight, held = model.embed.weight, model.embed.weight.held
    layout.materialize(weight, torch.device("cpu"))
    assert model.embed.weight is weight
    assert model.head.weight is weight
    assert weight.held is held
    assert isinstance(weight, nn.Parameter)
    assert weight.requires_grad == trained
    assert (weight.device.type, weight.shape) == ("cpu", (6, 4))
    assert model.head.bias.is_meta
    assert torch.equal(model.other, torch.arange(3.0))
    if trained:
        with torch.no_grad():
            weight.fill_(1.0)
        (model.embed.weight.sum() + model.head.weight.sum()).backward()
        assert torch.equal(weight.grad, torch.full((6, 4), 2.0))


# ---- the check over ranks

WHOLE = Box.whole((4, 6))
TOP, BOTTOM = WHOLE.cut(0, 0, 2), WHOLE.cut(0, 2, 2)
LEFT, RIGHT = WHOLE.cut(1, 0, 3), WHOLE.cut(1, 3, 3)
SOME_BOXES = tuple(layout.flat_range((4, 6), 0, 9))  # two of them
OTHER_BOXES = tuple(layout.flat_range((4, 6), 9, 24))


def declarations(runtime, table):
    """This rank's parameters; `table` is, for each rank, name → (boxes, family, {label: members of the sum group})."""
    members = sorted({ranks for row in table for _, _, sums in row.values() for ranks in sums.values()})
    groups = {ranks: runtime.new_group(ranks) for ranks in members}
    for name, (boxes, family, sums) in table[runtime.rank].items():
        param = nn.Parameter(torch.empty(sum(box.numel for box in boxes)))
        partial = {label: groups[ranks] for label, ranks in sums.items()}
        param.held = Held(name, boxes, Normal(1.0), True, partial, family)
        yield param


def checked(runtime, table, ranks):
    """On members of `ranks`: {name: (copies, copy)}, or what the check complains of."""
    params, group = list(declarations(runtime, table)), runtime.new_group(ranks)
    try:
        if group is not None:
            layout.check(params, group)
    except ValueError as fault:
        return str(fault)
    return {param.held.name: (param.held.copies, param.held.copy) for param in params}


def holds(*boxes, family="dense", **sums):
    """A row of the table: this rank holds these boxes of the one tensor w."""
    return {"w": (boxes, family, sums)}


def test_copies_are_counted_by_equal_boxes(pool):
    replicated = [holds(WHOLE, dp=(0, 1, 2))] * 3
    assert pool.run(3, checked, replicated, (0, 1, 2)) == [{"w": (3, rank)} for rank in range(3)]
    sharded_twice = [holds(LEFT, dp=(0, 2)), holds(RIGHT, dp=(1, 3)), holds(LEFT, dp=(0, 2)), holds(RIGHT, dp=(1, 3))]
    expected = [{"w": (2, 0)}, {"w": (2, 0)}, {"w": (2, 1)}, {"w": (2, 1)}]
    assert pool.run(4, checked, sharded_twice, (0, 1, 2, 3)) == expected


def test_a_rank_may_hold_nothing_or_pieces_of_any_kind(pool):
    empty = Box((0, 3), (0, 0), (0, 3))
    scalar = Box.whole(())
    table = [
        holds(*SOME_BOXES) | {"empty": ((empty,), "dense", {}), "scalar": ((scalar,), "expert", {})},
        {},
        holds(*OTHER_BOXES) | {"empty": ((empty,), "dense", {})},
    ]
    expected = [{"w": (1, 0), "empty": (2, 0), "scalar": (1, 0)}, {}, {"w": (1, 0), "empty": (2, 1)}]
    assert pool.run(3, checked, table, (0, 1, 2)) == expected


def test_a_group_that_is_not_the_world_is_checked_by_itself(pool):
    table = [{}, holds(WHOLE, dp=(1, 3)), {}, holds(WHOLE, dp=(1, 3))]
    assert pool.run(4, checked, table, (1, 3)) == [{}, {"w": (2, 0)}, {}, {"w": (2, 1)}]


FAULTS = {
    "overlap": ([holds(TOP), holds(WHOLE.cut(0, 1, 3)), {}], "overlapping"),
    "overlap on one rank": ([holds(TOP, TOP), holds(BOTTOM), {}], "overlapping"),
    "another order": ([holds(TOP, BOTTOM), holds(BOTTOM, TOP), {}], "overlapping"),
    "partly equal": ([holds(TOP, BOTTOM), holds(TOP), holds(BOTTOM)], "overlapping"),
    "gap": ([holds(TOP), {}, holds(LEFT.cut(0, 2, 2))], "hold 18 of its 24 elements"),
    "shape": ([holds(TOP), holds(Box((4, 7), (2, 0), (2, 6))), {}], r"different shapes \[\(4, 6\), \(4, 7\)\]"),
    "family": ([holds(TOP), {}, holds(BOTTOM, family="expert")], r"families \['dense', 'expert'\]"),
    "sum of others": ([holds(TOP, tp=(0, 1)), holds(BOTTOM, tp=(0, 1)), {}], r"rank 0 sums over tp with ranks \[1\]"),
    "sum with none": ([holds(WHOLE, tp=(0, 2)), {}, {}], r"rank 0 sums over tp with ranks \[2\]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_rank_names_the_fault(pool, fault):
    table, told = FAULTS[fault]
    complaints = pool.run(3, checked, table, (0, 1, 2))
    assert len(set(map(str, complaints))) == 1
    with pytest.raises(ValueError, match=f"^w: .*{told}"):
        raise ValueError(complaints[0])


# ---- equal boxes, equal bits


def copies_differ(runtime, changed, dtype, shape):
    """What the check of gradients complains of, after the lowest bit of one element has changed on one rank."""
    mine = {0: TOP, 1: BOTTOM, 2: BOTTOM}[runtime.rank]
    gradients = {"w": (mine, torch.full(shape, 1.5, dtype=dtype)), "b": (Box.whole((2,)), torch.zeros(2))}
    if runtime.rank == changed:
        gradients["w"][1].view(-1).view(torch.uint8)[0] ^= 1
    pairs = [(Held(name, (box,), Normal(1.0), True), tensor) for name, (box, tensor) in gradients.items()]
    try:
        layout.check_copies(pairs, runtime.world)
    except RuntimeError as fault:
        return str(fault)
    return None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (2, 6)])
def test_one_flipped_bit_is_found(pool, dtype, shape):
    assert pool.run(3, copies_differ, None, dtype, shape) == [None] * 3
    assert pool.run(3, copies_differ, 0, dtype, shape) == [None] * 3  # no other rank holds these boxes
    assert pool.run(3, copies_differ, 2, dtype, shape) == ["w: ranks [2] differ in bits from rank 1, same boxes"] * 3
