"""Dispatch and combine: the closed form, the elements that are sent, experts and ranks without a token."""

import pytest
import torch

from collectives import demo
from collectives.ledger import Ledger
from collectives.watch import watching
from expert_parallel.dispatch import Dispatch
from tests.expert_parallel.cases import Case, distributed, mine_of, outcome, part, sequences, worst
from tests.expert_parallel.reference import Layer

N, E = -1, 12
MESHES = [(1, 1), (2, 2), (3, 3), (4, 4), (4, 2), (2, 1)]
ROUTES = {  # the experts [k] of token i, counted over all ranks
    "mixed": lambda i: [i % E, (5 * i + 1) % E] if i % E != (5 * i + 1) % E else [i % E, (i + 6) % E],
    "one choice": lambda i: [(7 * i) % E],
    "three choices": lambda i: [i % E, (i + 1) % E, (i + 5) % E],
    "backwards": lambda i: [E - 1 - i % E, (E + 4 - i) % E],
    "some are nobody's": lambda i: [N, N] if i % 3 == 0 else [i % E, N] if i % 3 == 1 else [N, (i + 2) % E],
    "T88: all to the first expert": lambda i: [0],
    "T88: all to the last": lambda i: [E - 1],
    "T88: none to the first rank": lambda i: [E - 1 - i % 3, E - 4 - i % 3],
    "T88: none to one expert": lambda i: [i % 5, 6 + i % 6],
    "T88: nobody at all": lambda i: [N, N],
}
TOKENS = {  # of each rank
    **{1: (9,), 2: (7, 4), 3: (5, 0, 8), 4: (3, 6, 0, 5)},
}


def tokens_of(rank, ranks):
    """Their numbers, over all ranks."""
    first = sum(TOKENS[ranks][:rank])
    return list(range(first, first + TOKENS[ranks][rank]))


def weight(i, j):
    """Of the j-th choice of token i: exact in binary."""
    return (1 + i % 4) / 4 + j


def travelled(run, route, ep, width=3):
    """What expert e makes of a token: e+1 times it. (outputs, gradient of x, gradient of weights, order of arrival)"""
    group = mine_of(run, *(range(first, first + ep) for first in range(0, run.size, ep)))
    mine = tokens_of(run.rank, run.size)
    k = len(ROUTES[route](0))
    experts = torch.tensor([ROUTES[route](i) for i in mine], dtype=torch.int64).view(-1, k)
    x = torch.tensor([[float(i)] * width for i in mine]).view(-1, width).requires_grad_()
    weights = torch.tensor([[weight(i, j) for j in range(k)] for i in mine]).view(-1, k).requires_grad_()
    way = Dispatch(x, experts, E, group)
    rows = way.arrive()
    first = group.rank() * (E // ep) + 1
    factors = [float(first + e) for e, count in enumerate(way.counts) for _ in range(count)]
    y = way.combine(rows * torch.tensor(factors).view(-1, 1), weights)
    y.backward(torch.tensor([[2.0] + [0.0] * (width - 1)]).expand_as(y))
    return y.detach(), x.grad, weights.grad, rows[:, 0].tolist(), way.counts


@pytest.mark.parametrize(("ranks", "ep"), MESHES)
@pytest.mark.parametrize("route", ROUTES)
def test_t96_the_closed_form(pool, route, ranks, ep):
    """To the bit: small numbers. Token i comes back as i·Σ weight·(e+1)."""
    results = pool.run(ranks, travelled, route, ep)
    for rank, (y, dx, dweights, arrived, counts) in enumerate(results):
        mine = tokens_of(rank, ranks)
        choices = [[(j, e) for j, e in enumerate(ROUTES[route](i)) if e != N] for i in mine]
        factors = [sum(weight(i, j) * (e + 1) for j, e in some) for i, some in zip(mine, choices, strict=True)]
        assert y.tolist() == [[i * f] * 3 for i, f in zip(mine, factors, strict=True)]
        assert dx.tolist() == [[2 * f, 0, 0] for f in factors]
        for i, some, grads in zip(mine, choices, dweights.tolist(), strict=True):
            taken = dict(some)
            assert grads == [2.0 * i * (taken[j] + 1) if j in taken else 0.0 for j in range(len(grads))]
        assert arrived == arrivals(route, rank, ranks, ep)
        assert len(counts) == E // ep and sum(counts) == len(arrived)


def arrivals(route, rank, ranks, ep):
    """The tokens that a rank's experts get: expert by expert, from rank after rank, in the order of tokens."""
    first, here = rank // ep * ep, rank % ep
    return [
        float(i)
        for e in range(here * (E // ep), (here + 1) * (E // ep))
        for peer in range(first, first + ep)
        for i in tokens_of(peer, ranks)
        if e in ROUTES[route](i)
    ]


# -- what is sent ------------------------------------------------------------------------------------------------------


def counted(run, case):
    """Elements of rows that this rank sends in a step, bytes on the sockets, and the choices that it kept."""
    moe, [rows] = distributed(run, case), case.rows(run.rank)
    mine = case.mine(run.rank)
    x, dout = (part(tensor, rows, mine, 0.0) for tensor in case.tensors())
    where = sequences(case, run.rank, rows)
    written = demo.bytes_written()
    with watching(book := Ledger()):
        moe(x.requires_grad_(), where).backward(dout)
    sent = demo.bytes_since(written)
    by_op = {(row.op, len(row.ranks)): (row.calls, row.algorithm, row.wire) for row in book.rows()}
    return by_op, sent, moe.record.calls[0][1]


@pytest.mark.parametrize("mesh", [(2, 2, 1), (3, 3, 1), (4, 4, 1), (4, 2, 1), (4, 2, 2), (4, 4, 2)])
@pytest.mark.parametrize("layer", [Layer(width=32), Layer(capacity=0.5), Layer(choices=1), Layer(choices=3)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_elements_are_the_formula(pool, layer, mesh, dtype):
    """There and back, forward and backward: tokens · k · D, those that leave. Exactly, of each rank; and four times the
    share that leaves, of all. What is gathered stands in rows of its own.
    """
    ranks, ep, _ = mesh
    case = Case(layer, *mesh, dtype=dtype)
    results, D, e = pool.run(ranks, counted, case), layer.width, dtype.itemsize
    owners = [torch.div(kept, E // ep, rounding_mode="floor")[kept >= 0] for *_, kept in results]
    total = 0
    for rank, (by_op, sent, _) in enumerate(results):
        here, peers = rank % ep, range(rank // ep * ep, rank // ep * ep + ep)
        leave = int((owners[rank] != here).sum())
        come = sum(int((owners[peer] == here).sum()) for peer in peers if peer != rank)
        calls, algorithm, wire = by_op.pop(("all_to_all_single", ep))
        assert (calls, algorithm) == (4, 2 * (leave + come) * D * e) and wire == algorithm
        total += algorithm // e
        assert {op for op, _ in by_op} == {"all_gather_single"}
        others = sum(wire for _, _, wire in by_op.values())
        all_calls = 4 + sum(calls for calls, *_ in by_op.values())
        assert sent is None or abs(sent - algorithm - others) <= 0.01 * algorithm + 4096 * all_calls
    kept = sum(len(of_rank) for of_rank in owners)
    left = sum(int((of_rank != rank % ep).sum()) for rank, of_rank in enumerate(owners))
    assert 0 < left < kept and total == 4 * kept * D * left / kept


@pytest.mark.parametrize(("ep", "cp"), [(2, 1), (4, 1), (2, 2), (4, 2)])
def test_what_is_gathered(pool, ep, cp):
    """E numbers of each rank; and k small integers a token, where rows are cut. No number of it is a float."""
    case = Case(Layer(), 4, ep, cp, T=8)
    for rank, (by_op, *_) in enumerate(pool.run(4, counted, case)):
        tokens = case.shares[rank // cp] * case.T // cp
        expected = {ep: (ep - 1) * E * 8}
        if cp > 1:
            expected[cp] = expected.get(cp, 0) + (cp - 1) * tokens * 2 * 4
        got = {size: algorithm for (op, size), (_, algorithm, _) in by_op.items() if op == "all_gather_single"}
        assert got == expected


def test_on_one_rank_nothing_is_sent(pool):
    [(by_op, sent, _)] = pool.run(1, counted, Case(Layer()))
    assert by_op == {} and sent in (0, None)


# -- T88: nobody comes -------------------------------------------------------------------------------------------------


def towards(*experts):
    """A bias by which all tokens choose these."""
    return tuple(50.0 if e in experts else 0.0 for e in range(E))


NOTHING = tuple((b, t) for b in range(5) for t in range(7))
ONE_SIDED = {  # layer, slots of no document
    "all to the first": (Layer(choices=1, score="sigmoid", bias=towards(0)), ()),
    "all to the last": (Layer(choices=1, score="sigmoid", bias=towards(E - 1)), ()),
    "all to two": (Layer(choices=2, score="sigmoid", bias=towards(0, E - 1)), ()),
    "all to the first, with capacity": (Layer(choices=1, score="sigmoid", bias=towards(0), capacity=1.0), ()),
    "none to one expert": (Layer(choices=3, score="sigmoid", bias=tuple(-50.0 * (e == 4) for e in range(E))), ()),
    "none to a rank": (Layer(choices=3, bias=tuple(-50.0 * (e < 6) for e in range(E))), ()),
    "one token": (Layer(), NOTHING[1:]),
    "no token at all": (Layer(shared=3), NOTHING),
}


@pytest.mark.parametrize("name", ONE_SIDED)
@pytest.mark.parametrize(("ranks", "ep", "cp"), [(1, 1, 1), (2, 2, 1), (3, 3, 1), (4, 4, 1), (4, 2, 2)])
def test_t88_no_token_for_an_expert_or_a_rank(pool, name, ranks, ep, cp):
    """Nobody waits for ever, everything is right, and who has no token has a gradient of zeros, on all ranks."""
    layer, holes = ONE_SIDED[name]
    case = Case(layer, ranks, ep, cp, holes=holes)
    results = pool.run(ranks, outcome, case)
    if name == "no token at all":
        assert not any(router_and_experts(ours).any() for ours in results)
        return
    assert worst(case, results) <= 1
    chosen = set().union(*(ours.chosen for ours in results))
    idle = set(range(E)) - {e for *_, e in chosen}
    assert idle or name == "one token"
    for ours in results:
        [box], grad = ours.grads["experts.down"]
        first = box.offset[0]
        assert all(not grad[e - first].any() for e in idle if first <= e < first + box.local[0])


def router_and_experts(ours):
    return torch.cat([grad.flatten() for name, (_, grad) in ours.grads.items() if not name.startswith("shared")])


def turns(run):
    """All to expert 0, then all to the last, then as the router likes: after each the same layer goes on."""
    case = Case(Layer(choices=1, score="sigmoid", bias=towards()), run.size, run.size)
    moe, [rows] = distributed(run, case), case.rows(run.rank)
    x, where = part(case.tensors()[0], rows, case.mine(run.rank), 0.0), sequences(case, run.rank, rows)
    loads = []
    for favourite in (0, E - 1, None):
        moe.router.bias.copy_(torch.tensor(towards(favourite)))
        moe(x.clone().requires_grad_(), where).sum().backward()
        loads.append(moe.record.take(run.device)[:E])
    return torch.stack(loads)


@pytest.mark.parametrize("ranks", [2, 4])
def test_t88_the_next_step_is_fine(pool, ranks):
    loads = sum(pool.run(ranks, turns))
    tokens = 35 - len(Case().holes)
    assert loads.sum(1).tolist() == [tokens] * 3
    assert loads[0, 0] == loads[1, E - 1] == tokens and (loads[2] > 0).sum() > 4
