"""Every operation of comm.py and p2p.py against values computed on one rank."""

import functools
import gc
import itertools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from collectives import comm, p2p
from collectives.algorithms.reduction import Reduction
from tests.collectives.algorithms import drilled

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)
OPS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT")
SHAPES = ((0,), (1,), (2,), (13,), (0, 3), (5, 3))

LAYOUTS = {  # the same values in another memory
    "dense": torch.clone,
    "columns of a matrix": lambda x: nn.functional.pad(x, (1, 2), value=77)[..., 1:-2],
    "every third element": lambda x: torch.stack([x, x + 1, x + 2], dim=-1)[..., 0],
    "transposed": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "a parameter": lambda x: nn.Parameter(x.clone()),
}


@dataclass(frozen=True)
class Case:
    """One call: what a piece looks like, how it is reduced, where input and output lie in memory."""

    shape: tuple[int, ...] = (5, 3)
    dtype: torch.dtype = torch.float32
    op: str = "SUM"
    given: str = "dense"
    output: str = "dense"
    async_op: bool = False

    @property
    def reduction(self):
        return getattr(comm, self.op)

    def values(self, size, *who):
        """What belongs to `who`: whole numbers so small that every reduction of `size` of them is exact."""
        draw = torch.Generator().manual_seed(hash(who) % 2**32)
        if self.op == "PRODUCT":
            return torch.tensor([1, -1, 2])[torch.randint(3, self.shape, generator=draw)].to(self.dtype)
        return (size * torch.randint(-2, 3, self.shape, generator=draw)).to(self.dtype)

    def reduced(self, size, *who):
        """The reduction over ranks of what each has for `who`."""
        parts = torch.stack([self.values(size, rank, *who) for rank in range(size)])
        if self.op in ("SUM", "AVG"):
            return parts.sum(0, dtype=self.dtype) // (size if self.op == "AVG" else 1)
        return {"MIN": torch.amin, "MAX": torch.amax, "PRODUCT": torch.prod}[self.op](parts, 0)

    def input(self, tensor):
        return LAYOUTS[self.given](tensor)

    def empty(self):
        """An output for one piece."""
        return LAYOUTS[self.output](torch.full(self.shape, 99, dtype=self.dtype))

    def empties(self, size):
        """An output for a piece of each rank."""
        return LAYOUTS[self.output](along_rows([torch.full(self.shape, 99, dtype=self.dtype)] * size))


def along_rows(pieces):
    """One tensor of all pieces along dim 0."""
    return torch.stack(pieces) if pieces[0].dim() == 0 else torch.cat(pieces)


# Each operation starts one case and returns (its handle, the output, what must be in it).


def all_reduce(run, case, **more):
    data = case.input(case.values(run.size, run.rank))
    work = comm.all_reduce(data, case.reduction, group=run.world, async_op=case.async_op, **more)
    return work, data, case.reduced(run.size)


def reduce_scatter(run, case):
    given = case.input(along_rows([case.values(run.size, run.rank, piece) for piece in range(run.size)]))
    output = case.empty()
    work = comm.reduce_scatter_single(output, given, case.reduction, group=run.world, async_op=case.async_op)
    return work, output, case.reduced(run.size, run.rank)


def all_gather(run, case):
    given, output = case.input(case.values(run.size, run.rank)), case.empties(run.size)
    work = comm.all_gather_single(output, given, group=run.world, async_op=case.async_op)
    return work, output, along_rows([case.values(run.size, rank) for rank in range(run.size)])


def all_gather_in_place(run, case):
    output = case.empties(run.size)
    own = output.detach().chunk(run.size)[run.rank].copy_(case.values(run.size, run.rank))
    work = comm.all_gather_single(output, own, group=run.world, async_op=case.async_op)
    return work, output, along_rows([case.values(run.size, rank) for rank in range(run.size)])


def all_to_all(run, case):
    given = case.input(along_rows([case.values(run.size, run.rank, peer) for peer in range(run.size)]))
    output = case.empties(run.size)
    work = comm.all_to_all_single(output, given, group=run.world, async_op=case.async_op)
    return work, output, along_rows([case.values(run.size, peer, run.rank) for peer in range(run.size)])


def broadcast(run, case):
    data, last = case.input(case.values(run.size, run.rank)), run.size - 1
    work = comm.broadcast(data, last, group=run.world, async_op=case.async_op)
    return work, data, case.values(run.size, last)


def reduce(run, case):
    data, last = case.input(case.values(run.size, run.rank)), run.size - 1
    work = comm.reduce(data, last, case.reduction, group=run.world, async_op=case.async_op)
    return (work, data, case.reduced(run.size)) if run.rank == last else (work, None, None)


def gather(run, case):
    given, last = case.input(case.values(run.size, run.rank)), run.size - 1
    output = case.empties(run.size) if run.rank == last else None
    comm.gather(output, given, last, group=run.world)
    everyone = along_rows([case.values(run.size, rank) for rank in range(run.size)])
    return None, output, everyone if run.rank == last else None


def scatter(run, case):
    output, last = case.empty(), run.size - 1
    pieces = case.input(along_rows([case.values(run.size, rank) for rank in range(run.size)]))
    comm.scatter(output, pieces if run.rank == last else None, last, group=run.world)
    return None, output, case.values(run.size, run.rank)


def exchange(run, case):
    """Everyone with everyone else, all in one batch; the output is all that arrived."""
    peers = [peer for peer in range(run.size) if peer != run.rank]
    sends = [(case.input(case.values(run.size, run.rank, peer)), peer) for peer in peers]
    receives = [(case.empty(), peer) for peer in peers]
    work = p2p.exchange(sends, receives, group=run.world)
    arrived = [buffer for buffer, _ in receives]
    return work, arrived, [case.values(run.size, peer, run.rank) for peer in peers]


def send_and_recv(run, case):
    """From each even rank to the next one."""
    peer = run.rank ^ 1
    output, expected = case.empty(), case.values(run.size, peer)
    if peer >= run.size:
        return None, None, None
    if run.rank < peer:
        p2p.send(case.input(case.values(run.size, run.rank)), peer, group=run.world)
        return None, None, None
    p2p.recv(output, peer, group=run.world)
    return None, output, expected


REDUCING = {
    "all_reduce": all_reduce,
    "ordered all_reduce": functools.partial(all_reduce, ordered=True),
    "reduce_scatter": reduce_scatter,
    "reduce": reduce,
}
MOVING = {
    "all_gather": all_gather,
    "all_gather in place": all_gather_in_place,
    "all_to_all": all_to_all,
    "broadcast": broadcast,
    "gather": gather,
    "scatter": scatter,
    "exchange": exchange,
    "send and recv": send_and_recv,
}
OPERATIONS = REDUCING | MOVING


def assert_holds(output: Any, expected: Any, message: Any) -> None:
    if isinstance(output, list):
        for one, other in zip(output, expected, strict=True):
            assert_holds(one, other, message)
    elif expected is not None:
        assert torch.equal(output, expected), f"{message}: {output} is not {expected}"


def calls_hold(run, operation, cases):
    for case in cases:
        work, output, expected = OPERATIONS[operation](run, case)
        if work is not None:
            work.wait()
        assert_holds(output, expected, case)


def cases_of(operation, shapes=SHAPES, dtypes=DTYPES):
    ops = OPS if operation in REDUCING else ("SUM",)
    table = [Case(*entry) for entry in itertools.product(shapes, dtypes, ops)]
    return [case for case in table if not (case.op == "AVG" and case.dtype == torch.int64)]


@pytest.mark.parametrize("ranks", [1, 2, 3, drilled(4)])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_values(pool, operation, ranks):
    pool.run(ranks, calls_hold, operation, cases_of(operation))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_values_on_eight_ranks(pool, operation):
    pool.run(8, calls_hold, operation, cases_of(operation, [(2,), (13,)], [torch.float32, torch.bfloat16]))


@pytest.mark.parametrize("ranks", [1, drilled(2), 3])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_values_in_any_memory(pool, operation, ranks):
    layouts = itertools.product(LAYOUTS, LAYOUTS, [False, True])
    pool.run(ranks, calls_hold, operation, [Case(given=a, output=b, async_op=c) for a, b, c in layouts])


@pytest.mark.parametrize("ranks", [drilled(2), 3])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_values_of_megabytes(pool, operation, ranks):
    large = [Case((100_003, 3)), Case((100_003, 3), given="transposed", output="columns of a matrix", async_op=True)]
    pool.run(ranks, calls_hold, operation, large)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_values_without_a_dimension(pool, operation, ranks):
    pool.run(ranks, calls_hold, operation, [Case(shape=())])


# ---- reductions


def mean_of(run, dtype, operation, value):
    """The largest element of the mean of tensors full of `value`, None on a rank that gets no result."""
    data, piece = torch.full((run.size * 3,), value, dtype=dtype), torch.empty(3, dtype=dtype)
    if operation == "reduce_scatter":
        comm.reduce_scatter_single(piece, data, comm.AVG, group=run.world)
        return piece.max().item()
    if operation == "reduce":
        comm.reduce(data, 0, comm.AVG, group=run.world)
        return data.max().item() if run.rank == 0 else None
    comm.all_reduce(data, comm.AVG, group=run.world, ordered=operation == "ordered all_reduce")
    return data.max().item()


@pytest.mark.parametrize(("ranks", "value"), [(1, 60000.0), (2, 40000.0), (3, 40000.0), (8, 10000.0)])
@pytest.mark.parametrize("operation", REDUCING)
def test_a_mean_is_finite_where_the_sum_is_not(pool, operation, ranks, value):
    assert set(pool.run(ranks, mean_of, torch.float16, operation, value)) <= {value, None}


def mean_refused(run, operation):
    try:
        mean_of(run, torch.int64, operation, 1)
    except ValueError as refusal:
        comm.barrier(group=run.world)  # nobody waits in it
        return str(refusal)


@pytest.mark.parametrize("operation", REDUCING)
def test_a_mean_of_integers_is_refused_on_every_rank(pool, operation):
    for refusal in pool.run(3, mean_refused, operation):
        assert "a mean of torch.int64 tensors is refused" in refusal


OFFSETS = (0, 1, 1000)


def random_part(rank, elements, dtype):
    """Of sizes so different that each order of addition rounds to other bits."""
    draw = torch.Generator().manual_seed(rank)
    exponents = torch.randint(-4, 5, (elements,), generator=draw)
    return torch.ldexp(torch.randn(elements, generator=draw, dtype=torch.float64), exponents).to(dtype)


def ordered_reductions(run, elements, dtype, op):
    """The reduction of the same numbers by all_reduce at several places of a longer buffer, and by reduce_scatter."""
    reduction, part = getattr(comm, op), random_part(run.rank, elements, dtype)
    results = []
    for offset in OFFSETS:
        buffer = torch.ones(offset + elements + 17, dtype=dtype)
        buffer[offset : offset + elements] = part
        comm.all_reduce(buffer, reduction, group=run.world, ordered=True)
        results.append(buffer[offset : offset + elements].clone())
    whole, piece = part.repeat(run.size), torch.empty_like(part)
    comm.reduce_scatter_single(piece, whole, reduction, group=run.world, ordered=True)
    return [*results, piece]


def left_to_right(parts, op):
    total = parts[0].float() if parts[0].dtype == torch.bfloat16 else parts[0]
    for part in parts[1:]:
        total = total * part if op == "PRODUCT" else total + part
    return (total / len(parts) if op == "AVG" else total).to(parts[0].dtype)


def assert_left_to_right(everyone, elements, dtype, op):
    """`everyone` is what `ordered_reductions` returned on each rank."""
    expected = left_to_right([random_part(rank, elements, dtype) for rank in range(len(everyone))], op)
    for results in everyone:
        for result in results:
            assert torch.equal(result, expected)


@pytest.mark.parametrize("ranks", [1, 2, 3, drilled(4), 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", ["SUM", "AVG", "PRODUCT"])
def test_ordered_is_from_left_to_right_wherever_it_lies(pool, op, dtype, ranks):
    for elements in (1, 5, 1009):
        everyone = pool.run(ranks, ordered_reductions, elements, dtype, op)
        assert_left_to_right(everyone, elements, dtype, op)


IN_ORDER = Reduction.in_order


def from_right_to_left(reduction, parts, output, scratch):
    IN_ORDER(reduction, parts[::-1], output, torch.empty_like(scratch))


def without_the_last(reduction, parts, output, scratch):
    IN_ORDER(reduction, parts[:-1], output, torch.empty_like(scratch))


def with_order(run, order, job, *args):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reduction, "in_order", order)
        return job(run, *args)


@pytest.mark.parametrize("wrong", [from_right_to_left, without_the_last])
def test_another_order_is_found(pool, wrong):
    everyone = pool.run(3, with_order, wrong, ordered_reductions, 1009, torch.float32, "SUM")
    with pytest.raises(AssertionError):
        assert_left_to_right(everyone, 1009, torch.float32, "SUM")


def small_and_large(run, large):
    data = torch.full((5,), 256.0 if run.rank == large else 1.0, dtype=torch.bfloat16)
    comm.all_reduce(data, group=run.world, ordered=True)
    return set(data.tolist())


@pytest.mark.parametrize("large", range(3))
def test_low_precision_is_rounded_once(pool, large):
    """256 + 1 + 1; in bfloat16, 256 + 1 is 256."""
    assert pool.run(3, small_and_large, large) == [{258.0}] * 3


def sum_of_random(run, elements, ordered):
    data = random_part(run.rank, elements, torch.float32)
    comm.all_reduce(data, group=run.world, ordered=ordered)
    return data


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_all_ranks_have_the_same_bits(pool, ranks, ordered):
    for elements in (3, 1009, 100_003):
        first, *others = pool.run(ranks, sum_of_random, elements, ordered)
        assert all(torch.equal(first, other) for other in others)


# ---- groups


def in_group(run, members):
    """From and to the group's first member, and on to the next one; None on a rank that is no member."""
    group = run.new_group(members)
    if group is None:
        return None
    index, size = members.index(run.rank), len(members)
    mine = torch.tensor([run.rank])
    sent, piece, total, arrived = mine.clone(), torch.zeros(1, dtype=torch.int64), mine.clone(), mine.clone()
    gathered = torch.zeros(size, dtype=torch.int64) if index == 0 else None
    comm.broadcast(sent, 0, group=group)
    comm.scatter(piece, 10 * run.rank + torch.arange(size) if index == 0 else None, 0, group=group)
    comm.gather(gathered, mine, 0, group=group)
    comm.reduce(total, 0, group=group)
    p2p.exchange([(mine, (index + 1) % size)], [(arrived, (index - 1) % size)], group=group).wait()
    everyone = comm.all_gather_object(run.rank, group=group)
    first = (gathered.tolist(), total.item()) if index == 0 else None
    return sent.item(), piece.item(), arrived.item(), everyone, first


def test_peers_are_ranks_in_the_group(pool):
    assert pool.run(4, in_group, [2, 3]) == [
        None,
        None,
        (2, 20, 3, [2, 3], ([2, 3], 5)),
        (2, 21, 2, [2, 3], None),
    ]
    assert pool.run(4, in_group, [1, 3]) == [
        None,
        (1, 10, 3, [1, 3], ([1, 3], 4)),
        None,
        (1, 11, 1, [1, 3], None),
    ]


# ---- handles


FLYING = (
    ("all_reduce", Case((1000, 3), async_op=True)),
    ("ordered all_reduce", Case((1000, 3), given="every third element", async_op=True)),
    ("reduce_scatter", Case((500, 7), given="transposed", output="columns of a matrix", async_op=True)),
    ("all_gather", Case((70, 3), given="columns of a matrix", async_op=True)),
    ("all_gather", Case((100_003, 3), output="transposed", async_op=True)),
    ("all_to_all", Case((50, 3), given="every third element", output="transposed", async_op=True)),
    ("broadcast", Case((13,), given="every third element", async_op=True)),
    ("exchange", Case((300, 7), given="transposed", output="every third element")),
)


REUSED = (13, 150, 210, 1500, 2100, 3000, 3500, 300_009)  # elements of memory that the operations let go


def eight_in_flight(run):
    """Rank 0 comes late, so that all is in flight while the others drop their inputs and use the memory again."""
    if run.rank == 0:
        time.sleep(0.2)
    flying = [OPERATIONS[name](run, case) for name, case in FLYING]
    gc.collect()
    garbage = [torch.full((elements,), 55.0) for elements in REUSED for _ in range(9)]
    for work, output, expected in reversed(flying):
        work.wait()
        work.wait()
        assert_holds(output, expected, "in flight")
    assert all((tensor == 55).all() for tensor in garbage)
    for (_, output, expected), (name, _) in zip(flying, FLYING, strict=True):
        assert_holds(output, expected, f"{name} after all")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_eight_in_flight_waited_for_in_reverse(pool, ranks):
    pool.run(ranks, eight_in_flight)


def in_another_order(run, ordered):
    """Three sums in flight, of which every rank waits for another one first; for the last one first, all alike, when
    they are ordered.
    """
    flying = [torch.full((4,), 10.0**place + run.rank) for place in range(3)]
    works = [comm.all_reduce(data, group=run.world, async_op=True, ordered=ordered) for data in flying]
    for place in range(3):
        works[2 - place if ordered else (place + run.rank) % 3].wait()
    return [set(data.tolist()) for data in flying]


@pytest.mark.parametrize("ordered", [False, True])
def test_ranks_wait_in_another_order_than_they_started(pool, ordered):
    assert pool.run(3, in_another_order, ordered) == [[{6.0}, {33.0}, {303.0}]] * 3


def seconds_in_barrier(run):
    if run.rank == 1:
        time.sleep(0.3)
    begin = time.perf_counter()
    comm.barrier(group=run.world)
    return time.perf_counter() - begin


def test_nobody_leaves_a_barrier_before_the_last_has_come(pool):
    pool.run(3, seconds_in_barrier)
    seconds = pool.run(3, seconds_in_barrier)
    assert min(seconds[0], seconds[2]) > 0.2


def sizes_refused(run, operation):
    """What each rank is told about an output that does not fit; afterwards nobody waits."""
    few, many = torch.zeros(100_001), torch.zeros(300_000)
    call, output, given = {
        "reduce_scatter": (comm.reduce_scatter_single, few, many),
        "all_gather": (comm.all_gather_single, many, few),
    }[operation]
    try:
        call(output, given, group=run.world)
    except ValueError as refusal:
        comm.barrier(group=run.world)
        return str(refusal)


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather"])
def test_sizes_that_do_not_fit_are_refused_on_every_rank(pool, operation):
    for refusal in pool.run(3, sizes_refused, operation):
        assert "300000 elements, not 3 times the" in refusal


def all_to_all_in_place(run):
    data = torch.ones(run.size)
    with pytest.raises(ValueError, match=r"^output and input are one"):
        comm.all_to_all_single(data, data, group=run.world)
    comm.all_to_all_single(data[:0], data[:0], group=run.world)


def test_an_all_to_all_in_place_is_refused(pool):
    pool.run(2, all_to_all_in_place)


# ---- patterns


def ring_shift(run, elements):
    """Whether each rank has its own again after as many shifts as there are ranks, and its neighbour's after one."""
    after, before = (run.rank + 1) % run.size, (run.rank - 1) % run.size
    mine = torch.full((elements,), run.rank, dtype=torch.uint8)
    block = mine
    for shift in range(1, run.size + 1):
        arrived = torch.empty_like(block)
        p2p.exchange([(block, after)], [(arrived, before)], group=run.world).wait()
        assert (arrived == (run.rank - shift) % run.size).all()
        block = arrived
    assert torch.equal(block, mine)


@pytest.mark.parametrize("ranks", [2, 3, drilled(4), drilled(5)])
def test_a_ring_of_exchanges_comes_home(pool, ranks):
    for elements in (1, 4_000_000):
        for _ in range(2):
            pool.run(ranks, ring_shift, elements)


def both_ways(run):
    """What came from the rank before and from the one after; of two ranks these are one, and the order decides."""
    after, before = (run.rank + 1) % run.size, (run.rank - 1) % run.size
    up, down = torch.tensor([10 * run.rank + 1]), torch.tensor([10 * run.rank + 2])
    from_before, from_after = torch.zeros_like(up), torch.zeros_like(up)
    p2p.exchange([(up, after), (down, before)], [(from_before, before), (from_after, after)], group=run.world).wait()
    return from_before.item(), from_after.item()


@pytest.mark.parametrize("ranks", [2, 3, drilled(5)])
def test_neighbours_exchange_both_ways_at_once(pool, ranks):
    expected = [(10 * ((rank - 1) % ranks) + 1, 10 * ((rank + 1) % ranks) + 2) for rank in range(ranks)]
    assert pool.run(ranks, both_ways) == expected


def uneven_all_to_all(run, counts, given, output):
    """`counts[a][b]` rows go from rank a to rank b; row i of them is a, b, i."""

    def rows(source, target):
        return torch.tensor([(source, target, i) for i in range(counts[source][target])], dtype=torch.int64).view(-1, 3)

    size, rank = run.size, run.rank
    data = LAYOUTS[given](torch.cat([rows(rank, peer) for peer in range(size)]))
    expected = torch.cat([rows(peer, rank) for peer in range(size)])
    received = LAYOUTS[output](torch.full_like(expected, 99))
    receive = [counts[peer][rank] for peer in range(size)]
    comm.all_to_all_single(received, data, receive, counts[rank], group=run.world)
    assert_holds(received, expected, counts)


COUNTS = {
    1: [[3]],
    2: [[2, 0], [5, 1]],
    3: [[0, 0, 0], [1, 0, 7], [2, 4, 0]],  # rank 0 has nothing to send
    4: [[1, 0, 2, 3], [0, 0, 0, 0], [5, 0, 0, 1], [1, 0, 1, 1]],  # rank 1 sends and receives nothing
}


@pytest.mark.parametrize("ranks", COUNTS)
@pytest.mark.parametrize("layouts", [("dense", "dense"), ("transposed", "every third element")])
def test_uneven_pieces_arrive(pool, ranks, layouts):
    pool.run(ranks, uneven_all_to_all, COUNTS[ranks], *layouts)


# ---- bytes


def bytes_written():
    """By this process so far, to sockets and files alike."""
    return int(Path("/proc/self/io").read_text().split("wchar: ")[1].split()[0])


def bytes_sent(run, operation, case):
    comm.barrier(group=run.world)
    before = bytes_written()
    calls_hold(run, operation, [case])
    return bytes_written() - before


FOUR_MB = 1_048_320  # float32 elements, which 1, 2, 3, 4 and 5 divide
SHARES = {"reduce_scatter": 1, "all_gather": 1, "ordered all_reduce": 2}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("operation", SHARES)
def test_a_rank_sends_what_the_formula_says(pool, operation, ranks):
    pieces = 1 if operation == "ordered all_reduce" else ranks
    formula = SHARES[operation] * 4 * FOUR_MB * (ranks - 1) / ranks
    for sent in pool.run(ranks, bytes_sent, operation, Case((FOUR_MB // pieces,))):
        assert abs(sent - formula) <= 0.01 * formula + 4096


@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_rank_sends_nothing(pool, operation):
    assert pool.run(1, bytes_sent, operation, Case((1000,))) == [0]


def outside(run):
    """What the ranks that are no members of a group are told, and what the members get."""
    group = run.new_group([1, 2])
    x = torch.ones(2)
    if group is None:
        with pytest.raises(ValueError, match="all_reduce: this rank is no member of the group"):
            comm.all_reduce(x, group=group)
        with pytest.raises(ValueError, match="exchange: this rank is no member of the group"):
            p2p.send(x, 1, group=group)
    else:
        comm.all_reduce(x, group=group)
    return x.tolist()


def test_a_rank_that_is_no_member_is_told_so(pool):
    """torch takes None for the world."""
    assert pool.run(3, outside) == [[1, 1], [2, 2], [2, 2]]
