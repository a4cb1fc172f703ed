"""The ledger's columns: the wire column against the bytes of the sockets, the other against the formulas."""

import inspect

import pytest
import torch

from collectives import comm, demo, ledger, p2p
from collectives.call import CALLS
from collectives.ledger import Ledger
from collectives.watch import watching

HEADERS = 4096  # bytes a call


def odd(n, dtype=torch.float32):
    return torch.ones(n, dtype=dtype)


def _ring(run, n):
    if run.size > 1:
        after, before = (run.rank + 1) % run.size, (run.rank - 1) % run.size
        p2p.exchange([(odd(n), after)], [(odd(n), before)], group=run.world).wait()


def _from_first_to_last(run, n):
    if run.size > 1 and run.rank == 0:
        p2p.send(odd(n), run.size - 1, group=run.world)
    elif run.rank and run.rank == run.size - 1:
        p2p.recv(odd(n), 0, group=run.world)


def _uneven(run, n):
    """Rank r gives rank p (r + p) % 3 pieces; some ranks give some peers nothing."""
    gives = [n * ((run.rank + peer) % 3) for peer in range(run.size)]
    data = odd(sum(gives))
    comm.all_to_all_single(torch.empty_like(data), data, gives, gives, group=run.world)


def _uneven_pieces(run, n):
    """Piece r is r times as long as piece 1, so the first one is empty; and this rank's."""
    pieces = [odd(n * rank) for rank in range(run.size)]
    return pieces, pieces[run.rank].clone()


def _reduce_scatter(run, n):
    pieces, mine = _uneven_pieces(run, n)
    comm.reduce_scatter(mine, pieces, group=run.world)


def _all_gather(run, n):
    comm.all_gather(*_uneven_pieces(run, n), group=run.world)


def _wait(handle):
    handle.wait()


# Each does one call with a message, or a piece, of n numbers, on every rank that takes part.
OPERATIONS = {
    "all_reduce": lambda run, n: comm.all_reduce(odd(n), group=run.world),
    "all_reduce, async": lambda run, n: _wait(comm.all_reduce(odd(n), group=run.world, async_op=True)),
    "all_reduce, mean": lambda run, n: comm.all_reduce(odd(n), comm.AVG, group=run.world),
    "all_reduce, float64": lambda run, n: comm.all_reduce(odd(n, torch.float64), group=run.world),
    "all_reduce, ordered": lambda run, n: comm.all_reduce(odd(n), group=run.world, ordered=True),
    "all_reduce, ordered, async": lambda run, n: _wait(
        comm.all_reduce(odd(n), group=run.world, ordered=True, async_op=True)
    ),
    "all_reduce, low mean": lambda run, n: comm.all_reduce(odd(n, torch.bfloat16), comm.AVG, group=run.world),
    "reduce_scatter_single": lambda run, n: comm.reduce_scatter_single(odd(n), odd(n * run.size), group=run.world),
    "reduce_scatter_single, async": lambda run, n: _wait(
        comm.reduce_scatter_single(odd(n), odd(n * run.size), group=run.world, async_op=True)
    ),
    "all_gather_single": lambda run, n: comm.all_gather_single(odd(n * run.size), odd(n), group=run.world),
    "all_gather_single, async": lambda run, n: _wait(
        comm.all_gather_single(odd(n * run.size), odd(n), group=run.world, async_op=True)
    ),
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all_single": lambda run, n: comm.all_to_all_single(odd(n * run.size), odd(n * run.size), group=run.world),
    "all_to_all_single, uneven": _uneven,
    "broadcast, 0": lambda run, n: comm.broadcast(odd(n), 0, group=run.world),
    "broadcast, last": lambda run, n: comm.broadcast(odd(n), run.size - 1, group=run.world),
    "reduce, 0": lambda run, n: comm.reduce(odd(n), 0, group=run.world),
    "reduce, last": lambda run, n: comm.reduce(odd(n), run.size - 1, group=run.world),
    "reduce, low mean": lambda run, n: comm.reduce(odd(n, torch.bfloat16), 0, comm.AVG, group=run.world),
    "gather": lambda run, n: comm.gather(odd(n * run.size) if run.rank == 0 else None, odd(n), 0, group=run.world),
    "scatter": lambda run, n: comm.scatter(odd(n), odd(n * run.size) if run.rank == 0 else None, 0, group=run.world),
    "barrier": lambda run, n: comm.barrier(group=run.world),
    "all_gather_object": lambda run, n: comm.all_gather_object("x" * (4 * n // (run.rank + 1)), group=run.world),
    "exchange": _ring,
    "send": _from_first_to_last,
}


def columns(run, names, sizes):
    """For each operation and size: (its name, bytes of the sockets, the ledger's wire column, calls)."""
    found = []
    for name in names:
        for n in sizes:
            comm.barrier(group=run.world)
            with watching(book := Ledger()):
                before = demo.bytes_written()
                OPERATIONS[name](run, n)
                sent = demo.bytes_since(before)
            comm.barrier(group=run.world)
            rows = book.rows()
            found.append((name, n, sent, sum(row.wire for row in rows), sum(row.calls for row in rows)))
    return found


def assert_within(found):
    for name, n, sent, wire, calls in found:
        assert abs(sent - wire) <= 0.01 * wire + HEADERS * calls, f"{name} of {n}: {sent} bytes, the ledger says {wire}"
        assert calls <= 1, f"{name} was counted {calls} times"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, pytest.param(5, marks=pytest.mark.drill)])
def test_the_wire_column_is_what_the_sockets_got(pool, ranks):
    for found in pool.run(ranks, columns, list(OPERATIONS), [0, 7, 20_003, 260_003]):
        assert_within(found)


def test_every_operation_of_comm_and_exchange_is_watched_and_held_here():
    public = [value for name, value in vars(comm).items() if inspect.isfunction(value) and not name.startswith("_")]
    operations = [value for value in public if value.__module__ == "collectives.comm"]
    assert all(hasattr(operation, "__wrapped__") for operation in [*operations, p2p.exchange])
    assert {operation.__name__ for operation in operations} | {"exchange"} == set(CALLS)
    assert {name.split(",")[0] for name in OPERATIONS} - {"send"} == set(CALLS)


def _twice(call):
    return 2 * ledger.algorithm_bytes(call)


def with_wrong_formula(run, formula):
    mine, ledger.wire_bytes = ledger.wire_bytes, formula
    try:
        return columns(run, ["broadcast, 0", "reduce, 0", "all_reduce"], [500_009])
    finally:
        ledger.wire_bytes = mine


@pytest.mark.parametrize("formula", [ledger.algorithm_bytes, _twice])
def test_a_wrong_formula_is_found(pool, formula):
    with pytest.raises(AssertionError, match="the ledger says"):
        for found in pool.run(3, with_wrong_formula, formula):
            assert_within(found)


def book_of_a_step(run):
    half = run.new_group([0, 1])
    with watching(book := Ledger()):
        for _ in range(3):
            comm.all_reduce(odd(1200), group=run.world, ordered=True)
        if half:
            comm.broadcast(odd(10), 0, group=half)
            comm.all_reduce(odd(10), group=half)
        pending = comm.all_reduce(odd(8), group=run.world, async_op=True)
        before = book.rows()[0].calls
    pending.wait()
    return [(row.op, row.ranks, row.calls, row.algorithm, row.wire) for row in book.rows()], before, book.table()


def test_one_row_for_each_operation_and_group(pool):
    for rank, (rows, before, table) in enumerate(pool.run(3, book_of_a_step)):
        reduced = ("all_reduce", (0, 1, 2), 4, 3 * 2 * 4800 * 2 / 3 + 2 * 32 * 2 / 3)
        assert rows[0][:3] == reduced[:3]
        assert rows[0][3] == pytest.approx(reduced[3])
        assert before == 3, "the asynchronous one ends at its wait"
        half = [("broadcast", (0, 1), 1, 20.0, 40 * (rank == 0)), ("all_reduce", (0, 1), 1, 40.0, 40.0)]
        assert rows[1:] == ([] if rank == 2 else half)
        assert table.splitlines()[1].split() == ["all_reduce", "0…2", "4", "19,243", "19,243"]


def raises_inside(run):
    with watching(book := Ledger()):
        try:
            comm.all_reduce(torch.ones(3, dtype=torch.int64), comm.AVG, group=run.world)
        except ValueError:
            comm.all_reduce(odd(3), group=run.world, ordered=True)
    return [(row.op, row.calls) for row in book.rows()]


def test_a_refused_call_is_not_counted_and_leaves_nothing_behind(pool):
    assert pool.run(3, raises_inside) == 3 * [[("all_reduce", 1)]]
