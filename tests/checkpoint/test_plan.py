"""Who writes what, without ranks: every element once, each by a rank that holds it, level."""

import random
import time

import pytest
import torch

from checkpoint.plan import Holding, contains, coverage, deal
from collectives.layout import Box
from tests.checkpoint import cuts

MB = 1 << 20


def held(shape, *boxes, dtype=torch.float32):
    return Holding(dtype, tuple(shape), boxes)


def copies(shapes, ranks):
    whole = {name: held(shape, Box.whole(shape)) for name, shape in shapes.items()}
    return [whole] * ranks


def elements(boxes):
    """The index of every element, box by box."""
    return torch.cat([torch.empty(0, dtype=torch.int64), *(box.index().flatten() for box in boxes)])


def check(descriptions, shares):
    """Every element of every tensor exactly once, each in a box that its rank holds."""
    shapes = {name: tensor.shape for description in descriptions for name, tensor in description.items()}
    for name, shape in shapes.items():
        written = elements([box for share in shares for box in share.get(name, [])])
        assert torch.equal(written.sort().values, torch.arange(Box.whole(shape).numel)), name
        assert any(name in share for share in shares), f"{name} is written by nobody"
    for description, share in zip(descriptions, shares, strict=True):
        for name, parts in share.items():
            assert all(any(contains(box, part) for box in description[name].boxes) for part in parts), name


def loads(descriptions, shares):
    """Bytes that each rank writes."""
    return [
        sum(part.numel * description[name].dtype.itemsize for name, parts in share.items() for part in parts)
        for description, share in zip(descriptions, shares, strict=True)
    ]


def level(bytes_of_ranks, within=0.05):
    mean = sum(bytes_of_ranks) / len(bytes_of_ranks)
    assert max(bytes_of_ranks) <= (1 + within) * mean, bytes_of_ranks


# -- exactly once ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", cuts.SIZES)
@pytest.mark.parametrize("cut", cuts.CUTS)
def test_every_cut(size, cut):
    descriptions = [
        {
            name: Holding(dtype, shape, tuple(boxes))
            for name, (shape, dtype) in cuts.TENSORS.items()
            if (boxes := b(shape))
        }
        for b in (lambda shape, rank=rank: cuts.boxes(shape, cut, rank, size) for rank in range(size))
    ]
    check(descriptions, deal(descriptions))


def pieces(draw, box, most):
    """A random partition of a box into at most so many."""
    if most < 2 or box.numel < 2 or draw.random() < 0.2:
        return [box]
    dim = draw.choice([dim for dim, length in enumerate(box.local) if length > 1])
    at = draw.randrange(1, box.local[dim])
    left = draw.randrange(1, most)
    halves = box.cut(dim, 0, at), box.cut(dim, at, box.local[dim] - at)
    return pieces(draw, halves[0], left) + pieces(draw, halves[1], most - left)


@pytest.mark.parametrize("seed", range(60))
def test_random_cuts_and_copies(seed):
    """Any partition of any tensor, each part held by any ranks; each tensor large enough to be dealt row by row."""
    draw = random.Random(seed)
    ranks = draw.randrange(1, 9)
    descriptions = [{} for _ in range(ranks)]
    for number in range(draw.randrange(1, 8)):
        shape = [draw.choice([1, 2, 3, 7, 40, 131]) for _ in range(draw.randrange(4))]
        dtype = draw.choice([torch.float64, torch.bfloat16, torch.uint8])
        holders = [[] for _ in range(ranks)]
        for box in pieces(draw, Box.whole(shape), 12):
            for rank in draw.sample(range(ranks), draw.randrange(1, ranks + 1)):
                holders[rank].append(box)
        for rank, boxes in enumerate(holders):
            if boxes:
                descriptions[rank][f"t{number}"] = held(shape, *boxes, dtype=dtype)
    shares = deal(descriptions)
    check(descriptions, shares)
    assert shares == deal(descriptions)


def test_nothing_and_less_than_a_row():
    """An empty tensor is written, in whatever boxes it lies; a number by one rank; no rank needs a share."""
    shapes = {"none": (0, 3), "number": (), "row": (1, 1)}
    shares = deal(copies(shapes, 3))
    check(copies(shapes, 3), shares)
    cut = [{"none": held((0, 3), Box((0, 3), (0, rank), (0, 1)))} for rank in range(3)]
    assert any(share.get("none") for share in deal(cut))
    assert deal([{}, {}]) == [{}, {}]


# -- level -------------------------------------------------------------------------------------------------------------

MANY_SMALL = {f"small {i}": (16 + i % 37, 16) for i in range(300)}
ONE_LARGE = {"large": (4096, 1024)}


@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("shapes", [ONE_LARGE, ONE_LARGE | MANY_SMALL, {"long": (3 * MB,)}], ids=["one", "many", "1d"])
def test_copies_end_level(ranks, shapes):
    descriptions = copies(shapes, ranks)
    level(loads(descriptions, deal(descriptions)))


def test_small_tensors_alone_end_level():
    descriptions = copies(MANY_SMALL, 4)
    level(loads(descriptions, deal(descriptions)))


def test_hybrid_copies_end_level():
    """Two replicas of four shards, and norms that all eight have."""
    shards = [Box.whole((4096, 512)).cut(0, 1024 * shard, 1024) for shard in range(4)]
    norms = {f"norm {i}": held((512,), Box.whole((512,))) for i in range(50)}
    descriptions = [{"w": held((4096, 512), shards[rank % 4]), **norms} for rank in range(8)]
    shares = deal(descriptions)
    check(descriptions, shares)
    level(loads(descriptions, shares))


def test_copies_level_out_what_is_fixed():
    """Rank 0 alone has 4 MB, rank 1 alone 2 MB; what all four have goes to those who have less."""
    fixed = [{"x": held((MB,), Box.whole((MB,)))}, {"y": held((MB // 2,), Box.whole((MB // 2,)))}, {}, {}]
    shared = {"copy": held((4096, 1280), Box.whole((4096, 1280)))}  # 20 MB
    descriptions = [{**mine, **shared} for mine in fixed]
    shares = deal(descriptions)
    check(descriptions, shares)
    level(loads(descriptions, shares), 0.001)
    tall = [{"x": held((8 * MB,), Box.whole((8 * MB,)))}, {}, {}]  # more than a third of all: the others share the rest
    descriptions = [{**mine, **shared} for mine in tall]
    assert loads(descriptions, deal(descriptions)) == [32 * MB, 10 * MB, 10 * MB]


def test_each_piece_of_a_copy_is_one_run_of_bytes():
    """Whole rows, so that a piece is a stretch of the original, and few of them."""
    shares = deal(copies({"w": (1000, 1000)}, 8))
    assert [len(share["w"]) for share in shares] == [1] * 8
    assert all(part.local[1] == 1000 for share in shares for part in share["w"])


# -- refused -----------------------------------------------------------------------------------------------------------

TOP, BOTTOM = Box((4, 3), (0, 0), (2, 3)), Box((4, 3), (2, 0), (2, 3))
REFUSED = {
    "gap": ([{"w": held((4, 3), TOP)}, {"w": held((4, 3), TOP)}], "w: 6 of its 12 elements are there"),
    "overlap": (
        [{"w": held((4, 3), TOP)}, {"w": held((4, 3), Box((4, 3), (1, 0), (3, 3)))}],
        "w: [2, 3] at [0, 0] and [3, 3] at [1, 0] overlap",
    ),
    "columns overlap": (
        [{"w": held((4, 3), Box((4, 3), (0, 0), (4, 2)), Box((4, 3), (0, 1), (4, 2)))}],
        "w: [4, 2] at [0, 0] and [4, 2] at [0, 1] overlap",
    ),
    "overlap and gap of equal size": (
        [{"w": held((4,), Box((4,), (0,), (2,)), Box((4,), (1,), (2,)))}],
        "w: [2] at [0] and [2] at [1] overlap",
    ),
    "sticks out": ([{"w": held((4, 3), TOP, Box((4, 3), (2, 0), (3, 3)))}], "w: [3, 3] at [2, 0] is no part of [4, 3]"),
    "before the start": ([{"w": held((2,), Box((2,), (-1,), (2,)))}], "w: [2] at [-1] is no part of [2]"),
    "box of another shape": ([{"w": held((4, 3), TOP, Box((5, 3), (2, 0), (2, 3)))}], "is no part of [4, 3]"),
    "dtype": (
        [{"w": held((4, 3), TOP)}, {"w": held((4, 3), BOTTOM, dtype=torch.float64)}],
        "rank 1 has torch.float64 [4, 3]",
    ),
    "shape": (
        [{"w": held((4, 3), TOP)}, {"w": held((3, 4), Box.whole((3, 4)))}],
        "rank 1 has torch.float32 [3, 4]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_a_whole_tensor(case):
    descriptions, words = REFUSED[case]
    with pytest.raises(ValueError, match="do not hold whole tensors") as error:
        deal(descriptions)
    assert str(error.value).count("w: ") == 1 and words in str(error.value)


def test_each_wrong_tensor_is_named():
    descriptions = [{"a": held((4, 3), TOP), "fine": held((2,), Box.whole((2,))), "b": held((4, 3), BOTTOM)}]
    with pytest.raises(ValueError, match=r"a: 6 of its 12 elements are there; b: 6 of its 12 elements are there$"):
        deal(descriptions)


@pytest.mark.parametrize("seed", range(40))
def test_a_partition_that_lacks_a_part_or_has_one_twice(seed):
    """Every single part of a random partition, left out or moved by one."""
    draw = random.Random(seed)
    shape = [draw.choice([2, 3, 6]) for _ in range(draw.randrange(1, 4))]
    parts = pieces(draw, Box.whole(shape), 10)
    draw.shuffle(parts)
    assert coverage("w", tuple(shape), parts) == []
    for i, part in enumerate(parts):
        rest = parts[:i] + parts[i + 1 :]
        assert coverage("w", tuple(shape), rest)
        for dim in range(len(shape)):
            moved = Box(part.shape, tuple(a + (d == dim) for d, a in enumerate(part.offset)), part.local)
            assert coverage("w", tuple(shape), [*rest, moved])


# -- at scale ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", ["rows", pytest.param("columns", marks=pytest.mark.drill), "flat"])
def test_many_ranks_and_tensors(cut, capsys):
    """64 ranks × 300 tensors. Judged loosely: other work runs beside."""
    shapes = {f"t{i}": (256, 128 + 64 * (i % 2)) for i in range(300)}
    descriptions = [
        {name: held(shape, *cuts.boxes(shape, cut, rank, 64)) for name, shape in shapes.items()} for rank in range(64)
    ]
    began = time.process_time()
    shares = deal(descriptions)
    seconds = time.process_time() - began
    with capsys.disabled():
        print(f"\n64 ranks, 300 tensors, {cut}: dealt in {seconds:.2f} s")
    assert sum(len(parts) for share in shares for parts in share.values()) >= 64 * 300
    assert seconds < 20
