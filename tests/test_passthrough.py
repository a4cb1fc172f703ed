"""The stand-in for comm and p2p: nothing is missing, everything arrives, nothing of ours is left in the way."""

import ast
import inspect

import pytest
import torch

from collectives import comm, p2p
from collectives.algorithms import direct
from tests import passthrough
from tests.demos import ROOT

FUNCTIONS = [(module, name) for module in (comm, p2p) for name in passthrough.moving(module)]


def test_the_functions_that_move_something():
    assert [name for module, name in FUNCTIONS if module is p2p] == ["exchange", "irecv", "isend", "recv", "send"]
    assert len(FUNCTIONS) >= 15


@pytest.mark.parametrize(("module", "name"), FUNCTIONS, ids=[name for _, name in FUNCTIONS])
def test_each_has_a_counterpart_with_the_same_parameters(module, name):
    """A function that comm or p2p gains has to be added to passthrough.py."""
    true, stand_in = (inspect.signature(getattr(where, name)).parameters for where in (module, passthrough))
    assert [(p.name, p.kind, p.default) for p in true.values()] == [
        (p.name, p.kind, p.default) for p in stand_in.values()
    ]


def past_it(source):
    """The functions that this source takes out of comm or p2p by name, where no stand-in can be put in their place."""
    taken = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    names = {(node.module, alias.name) for node in taken for alias in node.names}
    return names & {(module.__name__, name) for module, name in FUNCTIONS}


def test_strategies_call_them_through_their_modules():
    assert past_it("from collectives.comm import SUM, all_reduce") == {("collectives.comm", "all_reduce")}
    files = [path for path in ROOT.glob("*/*.py") if path.parent.name not in ("collectives", "tests")]
    assert len(files) > 20
    assert {path.name: past_it(path.read_text()) for path in files if past_it(path.read_text())} == {}


def everything(run):
    """Every operation once: [what this rank holds after it], float64 of small integers, so that sums are exact."""
    size, rank, group = run.size, run.rank, run.world
    mine = torch.arange(2.0 * size, dtype=torch.float64) + 100 * rank  # [2P]
    turned = mine.view(2, size).t().contiguous().t()  # dense, not contiguous
    after, before = (rank + 1) % size, (rank - 1) % size
    held = []

    def hold(tensor, work=None):
        if work is not None:
            work.wait()
        held.append(tensor.clone())

    for op in (comm.SUM, comm.AVG, comm.MIN, comm.MAX, comm.PRODUCT):
        hold(x := turned.clone(), comm.all_reduce(x, op, group=group, async_op=True, ordered=True))
    for op in (comm.SUM, comm.AVG, comm.MAX):
        hold(x := mine.new_empty(2), comm.reduce_scatter_single(x, mine, op, group=group, async_op=True))
    hold(x := mine.new_empty(size, 2), comm.all_gather_single(x, mine[:2], group=group, async_op=True))
    hold(x := mine.new_empty(2 * size), comm.all_to_all_single(x, mine, group=group, async_op=True))
    give, take = [i + 1 for i in range(size)], [rank + 1] * size
    hold(x := mine.new_empty(sum(take)), comm.all_to_all_single(x, uneven(rank, give), take, give, group=group))
    hold(x := turned.clone(), comm.broadcast(x, size - 1, group=group))
    comm.reduce(x := mine.clone(), size - 1, group=group)
    hold(x if rank == size - 1 else mine)
    comm.gather(x := mine.new_empty(size, 2) if rank == 0 else None, mine[:2], 0, group=group)
    hold(x if rank == 0 else mine)
    comm.scatter(x := mine.new_empty(2), mine if rank == 0 else None, 0, group=group)
    hold(x)
    comm.barrier(group=group)
    held.append(comm.all_gather_object({"rank": rank}, group=group))
    if size > 1:
        nothing = (mine[:0], before), (mine[:0], after)
        work = p2p.exchange([(mine, after), nothing[1]], [(x := mine.clone(), before), nothing[0]], group=group)
        work.wait()
        hold(x, work)  # a second wait does nothing
        sending = p2p.isend(mine, after, group=group)
        hold(x := mine.clone(), p2p.irecv(x, before, group=group))
        sending.wait()
        if rank % 2 == 0 and rank + 1 < size:
            p2p.send(mine, rank + 1, group=group)
        elif rank % 2:
            p2p.recv(mine, rank - 1, group=group)
        hold(mine)
    p2p.exchange([], [], group=group).wait()
    return held


def uneven(rank, give):
    return torch.cat([torch.full((count,), 10.0 * rank + count, dtype=torch.float64) for count in give])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_everything_arrives_as_through_comm_and_p2p(pool, ranks):
    for true, bare in zip(pool.run(ranks, everything), pool.run(ranks, passthrough.run, everything), strict=True):
        assert len(true) == len(bare)
        for index, (a, b) in enumerate(zip(true, bare, strict=True)):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, index


def ordered_sums(run):
    """How many elements of an ordered sum of float32 are not the sum in rank order."""
    numbers = [torch.randn(10_000, generator=torch.Generator().manual_seed(rank)) for rank in range(run.size)]
    mine = numbers[run.rank].clone()
    comm.all_reduce(mine, group=run.world, ordered=True)
    return int((mine != sum(numbers)).sum())


def test_nothing_of_ours_is_in_the_way(pool):
    """gloo adds in another order than ours from three ranks on."""
    assert pool.run(3, ordered_sums) == [0] * 3
    assert all(changed > 100 for changed in pool.run(3, passthrough.run, ordered_sums))
    assert pool.run(3, ordered_sums) == [0] * 3  # and ours is back


def refused(run):
    """Every tensor with gaps, or turned where pieces are meant: the messages."""
    gaps, turned, out = torch.zeros(4, 4)[:, :2], torch.zeros(2, 4).t(), torch.zeros(8)
    attempts = [
        lambda: comm.all_reduce(gaps, group=run.world),
        lambda: comm.broadcast(gaps, 0, group=run.world),
        lambda: comm.all_gather_single(out, turned, group=run.world),
        lambda: comm.reduce_scatter_single(turned, out, group=run.world),
        lambda: comm.all_to_all_single(turned, out.view(4, 2), group=run.world),
        lambda: p2p.exchange([(turned, 0)], [], group=run.world),
    ]
    messages = []
    for attempt in attempts:
        with pytest.raises(AssertionError, match=r"has gaps|is not contiguous") as caught:
            attempt()
        messages.append(str(caught.value))
    return len(messages)


def test_strided_tensors_show_up(pool):
    assert pool.run(1, passthrough.run, refused) == [6]


def fail(run):
    raise KeyError("on purpose")


def test_a_job_that_fails_leaves_ours_in_place():
    true = comm.all_reduce
    with pytest.raises(KeyError):
        passthrough.run(None, fail)
    assert comm.all_reduce is true and p2p.exchange is not passthrough.exchange


def through_direct(run):
    """Our own algorithms stand on the true exchange, also under the stand-in."""
    x = torch.full((4,), float(run.rank))
    direct.all_reduce(x, comm.SUM, group=run.world)
    return x.tolist()


def test_our_algorithms_still_run(pool):
    assert pool.run(2, passthrough.run, through_direct) == [[1.0] * 4] * 2
