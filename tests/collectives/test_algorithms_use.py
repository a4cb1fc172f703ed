"""Every algorithm, as it is called: on any group, with a barrier's promise, and refused in one line.

Ranks are those of tests/ordered.py where the pool is not named.
"""

import inspect
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist

from collectives import comm, p2p
from collectives.algorithms import direct, doubling, halving, pairwise, ring, star, tree
from tests import ordered
from tests.collectives.algorithms import ALGORITHMS, REDUCING, ROOTED, Case, arguments, assert_right, run, seat

# -- groups ------------------------------------------------------------------------------------------------------------

GROUPS = ([1, 3], [2, 3], [1, 2, 3])
ANY_GROUP = [key for key in ALGORITHMS if key[1] != "hierarchical"]


def in_group(rank, members, keys):
    """What each of the algorithms gives to a member, for each root."""
    group = rank.new_group(members)
    cases = [Case(7, root=root) for root in range(len(members))]
    return [[run(rank, key, case, group) for case in cases] for key in keys] if group else None


def check_group(by_rank, members, keys):
    assert [rank for rank, rows in enumerate(by_rank) if rows is not None] == members
    for i, key in enumerate(keys):
        for root in range(len(members)):
            assert_right([by_rank[rank][i][root] for rank in members], key, Case(7, root=root), len(members))


@pytest.mark.parametrize("members", GROUPS)
def test_roots_and_peers_are_ranks_in_the_group(members):
    check_group(ordered.run(4, in_group, members, ANY_GROUP).results, members, ANY_GROUP)


@pytest.mark.parametrize("members", GROUPS)
def test_roots_and_peers_are_ranks_in_the_group_on_real_ranks(pool, members):
    check_group(pool.run(4, in_group, members, ANY_GROUP), members, ANY_GROUP)


TWO_LEVELS = ("all_reduce", "hierarchical")


def in_two_nodes(rank):
    """Of six ranks 1, 2 and 4, 5 are two nodes."""
    made = [rank.new_group(members) for members in ([1, 2], [4, 5], [1, 4], [2, 5])]
    mine = tuple(group for group in made if group)
    return run(rank, TWO_LEVELS, Case(7), mine) if mine else None


def test_nodes_may_be_any_groups():
    by_rank = ordered.run(6, in_two_nodes).results
    assert_right([by_rank[rank] for rank in (1, 2, 4, 5)], TWO_LEVELS, Case(7), 4)


def with_ranks_of_the_world(sends, receives, *, group):
    """A fault: a peer is taken for a rank in the world."""
    sends, receives = (
        [(tensor, group.members.index(peer)) for tensor, peer in messages] for messages in (sends, receives)
    )
    return EXCHANGE(sends, receives, group=group)


EXCHANGE = ordered.exchange


@pytest.mark.parametrize("key", ANY_GROUP)
def test_ranks_in_the_world_are_found(monkeypatch, key):
    """They are not there, or this rank itself."""
    monkeypatch.setattr(ordered, "exchange", with_ranks_of_the_world)
    with pytest.raises(ValueError, match=r"not in tuple|has no peer"):
        ordered.run(4, in_group, [1, 3], [key])


# -- barrier -----------------------------------------------------------------------------------------------------------


def comings_and_goings(key, ranks, seed):
    """Of a barrier, in their order."""
    log = []

    def job(rank):
        log.append("comes")
        ALGORITHMS[key](group=rank.world)
        log.append("goes")

    ordered.run(ranks, job, seed=seed)
    return log


BARRIERS = [key for key in ALGORITHMS if key[0] == "barrier"]


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("key", BARRIERS)
def test_nobody_leaves_a_barrier_before_the_last_has_come(key, ranks):
    for seed in range(3):
        assert comings_and_goings(key, ranks, seed) == ["comes"] * ranks + ["goes"] * ranks


def nothing_moves(sends, receives, *, group):
    return p2p.Handle([])


@pytest.mark.parametrize("key", BARRIERS)
def test_a_barrier_without_messages_is_found(monkeypatch, key):
    monkeypatch.setattr(ordered, "exchange", nothing_moves)
    assert comings_and_goings(key, 4, seed=0) != ["comes"] * 4 + ["goes"] * 4


# -- refused -----------------------------------------------------------------------------------------------------------


def reduction(key, op, *, group):
    """One of integers."""
    group = (group, group) if key[1] == "hierarchical" else group
    given, _ = arguments(key[0], Case(13, torch.int64), *seat(group))
    ALGORITHMS[key](*(op if isinstance(entry, type(op)) else entry for entry in given), group=group)


def calls_refused():
    """What is wrong, a call on three ranks, and what is said about it."""
    for key in REDUCING:
        yield f"a mean, {key}", partial(reduction, key, comm.AVG), "a mean of torch.int64 tensors is refused"
        unknown = partial(reduction, key, dist.ReduceOp.BAND)
        yield f"a reduction, {key}", unknown, "none of the reductions here: SUM, AVG, MIN, MAX, PRODUCT"
    three, five, nine = torch.zeros(3), torch.zeros(5), torch.zeros(9)
    misfit = "a piece of 5 elements, where 9 cut over 3 ranks make 3"
    for module in (ring, halving, pairwise, direct):
        yield f"a piece to reduce, {module.__name__}", partial(module.reduce_scatter, five, nine), misfit
    for module in (ring, doubling, direct):
        yield f"a piece to gather, {module.__name__}", partial(module.all_gather, nine, five), misfit
    for module in (ring, pairwise, direct):
        call = partial(module.reduce_scatter, three, [three] * 2)
        yield f"pieces to reduce, {module.__name__}", call, "2 pieces for 3 ranks: give one for each"
    for module in (ring, direct):
        call = partial(module.all_gather, [three] * 4, three)
        yield f"pieces to gather, {module.__name__}", call, "4 pieces for 3 ranks: give one for each"
    for module in (pairwise, direct):
        call = partial(module.all_to_all, nine, torch.zeros(9))
        sum_of_nine = "not one for each of 3 ranks with a sum of 9 rows"
        yield (
            f"too many rows, {module.__name__}",
            partial(call, [3, 3, 3], [3, 3, 4]),
            rf"\[3, 3, 4\] are {sum_of_nine}",
        )
        yield f"too few rows, {module.__name__}", partial(call, [3, 3, 2], [3, 3, 3]), rf"\[3, 3, 2\] are {sum_of_nine}"
        yield f"two sizes, {module.__name__}", partial(call, [4, 5], [3, 3, 3]), rf"\[4, 5\] are {sum_of_nine}"
        itself = "elements to itself and takes .: let them be as many"
        yield f"from itself to itself, {module.__name__}", partial(call, [2, 3, 4], [1, 2, 6]), itself
        yield f"a negative size, {module.__name__}", partial(call, [4, 8, -3], [4, 8, -3]), sum_of_nine
        no_rows = partial(module.all_to_all, torch.zeros(()), torch.zeros(()))
        yield f"no rows, {module.__name__}", no_rows, "a tensor without dims has no rows"
        yield f"in place, {module.__name__}", partial(module.all_to_all, nine, nine), "output and input are one"
        call = partial(module.all_to_all, five, torch.zeros(5))
        yield f"rows without sizes, {module.__name__}", call, "5 rows do not divide by 3 ranks: give split sizes"


def calls_refused_by_all():
    """What no algorithm takes."""
    for key in ANY_GROUP:
        name, call = " ".join(key), ALGORITHMS[key]
        given, _ = arguments(key[0], Case(9), 0, 3)
        strided = [torch.zeros(3, 3).T if isinstance(entry, torch.Tensor) else entry for entry in given]
        if key[0] != "barrier":
            yield f"gaps, {name}", partial(call, *strided), r"a tensor \(3, 3\) with strides \(1, 3\) has gaps"
        if sum(isinstance(entry, torch.Tensor) for entry in given) > 1:
            other = [entry.float() if entry is given[0] else entry for entry in given]
            yield f"dtypes, {name}", partial(call, *other), "tensors of torch.float32 and of torch.float64"
            named = dict(zip(inspect.signature(call).parameters, other, strict=False))
            yield f"dtypes by name, {name}", partial(call, **named), "tensors of torch.float32 and of torch.float64"
        if key[0] in ROOTED:
            roots = [3 if isinstance(entry, int) else entry for entry in given]
            yield f"a root, {name}", partial(call, *roots), "root 3 is not in a group of 3 ranks"


def refusal(rank, call):
    try:
        call(group=rank.world)
    except ValueError as error:
        return str(error)


REFUSED = {what: (call, words) for what, call, words in (*calls_refused(), *calls_refused_by_all())}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_on_every_rank_before_any_message(what):
    call, words = REFUSED[what]
    report = ordered.run(3, refusal, call)
    assert report.messages == 0
    for said in report.results:
        assert said and re.search(words, said) and "\n" not in said


def outside(rank, key):
    """What a rank that is no member is told, and what the members get."""
    group = rank.new_group([1, 2])
    if group:
        return run(rank, key, Case(4), group)
    given, _ = arguments(key[0], Case(4), 0, 2)
    with pytest.raises(ValueError, match="this rank is no member of the group; let only members call it"):
        ALGORITHMS[key](*given, group=None)


def test_a_rank_that_is_no_member_is_told_so():
    for key in ANY_GROUP:
        assert_right(ordered.run(3, outside, key).results[1:], key, Case(4), 2)


def gathers(rank, gather, whole):
    gather(whole if rank.rank == 1 else None, torch.zeros(3), 1, group=rank.world)


def scatters(rank, scatter, whole):
    scatter(torch.zeros(3), whole if rank.rank == 1 else None, 1, group=rank.world)


@pytest.mark.parametrize(
    ("job", "call"),
    [(gathers, star.gather), (gathers, tree.gather), (scatters, star.scatter), (scatters, tree.scatter)],
)
def test_a_root_without_the_right_whole_is_told_so(job, call):
    """The others cannot know of it."""
    with pytest.raises(ValueError, match=r"^the root has nothing, not 3 pieces of 3 elements"):
        ordered.run(3, job, call, None)
    with pytest.raises(ValueError, match=r"^the root has 8 elements, not 3 pieces of 3 elements"):
        ordered.run(3, job, call, torch.zeros(8))
