"""The model of cost: rounds against the formulas of the literature, what they let the ranks know, and the one rule."""

import math
import re

import numpy as np
import pytest

from collectives import cost, cost_table
from collectives.cost import ALGORITHMS, LINKS, Link, Round, Topology

FAST, SLOW = Link(1e-6, 1e9), Link(10e-6, 1e8)
NODES_OF_4 = Topology(FAST, SLOW, per_node=4)
DGX = Topology(LINKS["NVLink 4 (H100)"], LINKS["InfiniBand NDR"], per_node=8)
SIZES = range(2, 17)
LCM = 720_720  # every P up to 16 divides it
EVERY = pytest.mark.parametrize("collective, algorithm", ALGORITHMS)


def one_node(ranks):
    return Topology(FAST, FAST, per_node=ranks)


def nodes(ranks):
    """The largest node of up to 4 ranks that divides them."""
    return Topology(FAST, SLOW, per_node=max(g for g in (1, 2, 3, 4) if ranks % g == 0))


# -- steps and bytes ---------------------------------------------------------------------------------------------------


def value(formula, ranks, per_node, chunks=8):
    """A formula as the reader sees it, evaluated."""
    log = math.log2(ranks)
    text = formula.replace("⌈log₂P⌉", f"({math.ceil(log)})").replace("log₂P", f"({log})").replace("·", "*")
    text = re.sub(r"(?<=[\dnP)])(?=[(nP])", "*", text)
    return eval(text, {}, {"P": ranks, "n": LCM, "C": chunks, "L": per_node, "N": ranks // per_node})


FOLDED = ("doubling", "halving")


def holds_for(collective, algorithm, formula, ranks):
    """Whether the formula is meant for this P: a bare log₂P and the tree's n/2 are for powers of two."""
    power = ranks & (ranks - 1) == 0
    return power or not ("log₂P" in formula.replace("⌈log₂P⌉", "") or formula == "n/2" or folded(collective, algorithm))


def folded(collective, algorithm):
    return algorithm in FOLDED and collective != "barrier"


@EVERY
def test_the_rounds_have_the_formulas_steps_and_bytes(collective, algorithm):
    formula, held = ALGORITHMS[collective, algorithm], 0
    for ranks in SIZES:
        topology = nodes(ranks)
        found = cost.of(collective, algorithm, LCM, ranks, topology)
        for text, number in ((formula.steps, found.steps), (formula.sent, found.sent)):
            if holds_for(collective, algorithm, text, ranks):
                assert number == pytest.approx(value(text, ranks, topology.per_node), rel=1e-12), (ranks, text)
                held += 1
    assert held >= 2 * 4, "P = 2, 4, 8, 16 at least"


@pytest.mark.parametrize("ranks", [3, 5, 6, 7, 9, 11, 12, 13, 15])
def test_a_fold_takes_two_steps_more_and_its_bytes(ranks):
    """A seat's pieces: one for each of its ranks. Rank 0 is the host of a seat of two."""
    k, doubled = int(math.log2(ranks)), ranks - 2 ** int(math.log2(ranks))
    piece = LCM / ranks
    known = sum((2**i + min(2**i, doubled)) * piece for i in range(k))  # sent in the doubling by the host of seat 0
    expected = {
        ("all_reduce", "doubling"): (k + 2, k * LCM + LCM),
        ("all_gather", "doubling"): (k + 2, known + LCM - piece),
        ("reduce_scatter", "halving"): (k + 2, LCM),  # a guest's; hosts send what is not theirs, and a piece to a guest
        ("all_reduce", "halving"): (2 * k + 2, LCM - 2 * piece + known + LCM),
    }
    for case, (steps, sent) in expected.items():
        found = cost.of(*case, LCM, ranks, one_node(ranks))
        assert (found.steps, found.sent) == (steps, pytest.approx(sent)), case


@pytest.mark.parametrize("ranks", SIZES)
def test_a_reduce_scatter_by_halving_sends_what_an_all_gather_by_doubling_receives(ranks):
    """And the other way round, but for a guest, which gives its own piece as well."""
    forth = list(cost.rounds("all_gather", "doubling", LCM, ranks))
    back = list(cost.rounds("reduce_scatter", "halving", LCM, ranks))[::-1]
    folded = ranks & (ranks - 1) > 0
    for i, (a, b) in enumerate(zip(forth, back, strict=True)):
        more = LCM / ranks if folded and i == len(forth) - 1 else 0
        assert (a.src.tolist(), a.dst.tolist()) == (b.dst.tolist(), b.src.tolist())
        assert b.each.tolist() == pytest.approx((a.each + more).tolist())


def test_five_ranks_by_hand():
    """Ranks 0 1 | 2 | 3 | 4 on four seats; pieces of 1 byte."""
    played = list(cost.rounds("all_gather", "doubling", 5, 5))
    assert [
        dict(zip(zip(r.src.tolist(), r.dst.tolist(), strict=True), r.each.tolist(), strict=True)) for r in played
    ] == [
        {(1, 0): 1},
        {(0, 2): 2, (2, 0): 1, (3, 4): 1, (4, 3): 1},
        {(0, 3): 3, (2, 4): 3, (3, 0): 2, (4, 2): 2},
        {(0, 1): 4},
    ]
    tree = list(cost.rounds("scatter", "tree", 5, 5))
    assert [(r.src.tolist(), r.dst.tolist(), r.each.tolist()) for r in tree] == [
        ([0], [4], [1]),
        ([0], [2], [2]),
        ([0, 2], [1, 3], [1, 1]),
    ]


def test_one_rank_sends_nothing():
    for case in ALGORITHMS:
        found = cost.of(*case, 8, 1, NODES_OF_4)
        assert (found.steps, found.sent_by, found.seconds) == (0, (0.0,), 0.0)


# -- what the ranks know in the end ------------------------------------------------------------------------------------


def ignorant(collective, algorithm, ranks, played):
    """Whether some rank cannot have heard from all of whom it must, whatever the messages carry."""
    itself = np.eye(ranks, dtype=bool)
    heard = itself.copy()  # row r: of whom rank r has heard
    for r in played:
        for _ in range(r.times):
            tells = itself if algorithm in ("naive", "direct", "pairwise") else heard.copy()  # the others hand on
            np.logical_or.at(heard, r.dst, tells[r.src])
    match collective:
        case "broadcast" | "scatter":
            return not heard[:, 0].all()
        case "reduce" | "gather":
            return not heard[0].all()
    return not heard.all()


def played(collective, algorithm, ranks):
    choice = {"per_node": nodes(ranks).per_node} if algorithm == "hierarchical" else {}
    if algorithm == "ring" and collective in ("broadcast", "reduce"):
        choice = {"chunks": 1}
    return list(cost.rounds(collective, algorithm, LCM, ranks, **choice))


@EVERY
def test_every_rank_hears_from_all_of_whom_it_must(collective, algorithm):
    for ranks in SIZES:
        assert not ignorant(collective, algorithm, ranks, played(collective, algorithm, ranks)), ranks


@EVERY
def test_a_round_that_is_left_out_is_missed(collective, algorithm):
    """But for those all_reduces whose first half tells every rank of all others."""
    for ranks in SIZES:
        whole = played(collective, algorithm, ranks)
        if (collective, algorithm) in [("all_reduce", a) for a in ("ring", "direct", "halving", "hierarchical")]:
            whole = whole[: len(whole) // 2]
        for i, left_out in enumerate(whole):
            fewer = Round(left_out.src, left_out.dst, left_out.nbytes, left_out.times - 1)
            assert ignorant(collective, algorithm, ranks, [*whole[:i], fewer, *whole[i + 1 :]]), (ranks, i)


# -- the rule ----------------------------------------------------------------------------------------------------------


def seconds(collective, algorithm, n, ranks, topology, **choice):
    return cost.of(collective, algorithm, n, ranks, topology, **choice).seconds


@pytest.mark.parametrize(
    "collective, algorithm, ranks, expected",
    [
        # 8 ranks on two nodes of 4, 8000 bytes: a piece of 1000 takes 1 µs + 1 µs inside, 10 µs + 10 µs between
        ("all_gather", "ring", 8, 7 * 20e-6),  # each round crosses twice, and waits for it
        ("all_gather", "ring", 4, 3 * 3e-6),  # pieces of 2000
        ("all_gather", "direct", 8, 10e-6 + 4 * 10e-6),  # 4 pieces by the port between, 3 by the other meanwhile
        ("all_gather", "doubling", 8, 2e-6 + 3e-6 + 10e-6 + 4 * 10e-6),  # distances 1 and 2 inside, 4 between
        ("broadcast", "tree", 8, 10e-6 + 80e-6 + 2 * 9e-6),  # the far child first
        ("broadcast", "star", 8, 10e-6 + 4 * 80e-6),
        ("reduce", "star", 8, 10e-6 + 4 * 80e-6),  # no rank sends more than one message; the root receives them all
        ("gather", "star", 4, 1e-6 + 3 * 2e-6),
        ("barrier", "doubling", 8, 3 * 90e-6),  # whatever the distance, some rank looks into the other node
        ("all_to_all", "pairwise", 8, 7 * 20e-6),
        ("all_reduce", "hierarchical", 8, 3 * 3e-6 + 2 * 20e-6 + 3 * 3e-6),
    ],
)
def test_seconds_by_hand(collective, algorithm, ranks, expected):
    assert seconds(collective, algorithm, 8000, ranks, NODES_OF_4) == pytest.approx(expected, rel=1e-12)


def test_a_broadcast_down_the_line_in_chunks():
    """P-2+C rounds, each as slow as its slowest link: only those in which a chunk is on its way to rank 4 cross."""
    for chunks in (1, 2, 5, 40):
        found = cost.of("broadcast", "ring", 8000, 8, NODES_OF_4, chunks=chunks)
        part = 8000 / chunks
        crossing = chunks * (10e-6 + part / 1e8)
        assert found.steps == 8 - 2 + chunks
        assert found.seconds == pytest.approx(crossing + 6 * (1e-6 + part / 1e9))
        assert found.sent_by == pytest.approx((*[8000] * 7, 0))


def test_hierarchical_is_the_sum_of_its_parts():
    per_node, many = 8, 4
    inside, between = (Topology(link, link, 1) for link in (DGX.inside, DGX.between))
    parts = (
        seconds("reduce_scatter", "ring", 1e9, per_node, inside),
        seconds("all_reduce", "ring", 1e9 / per_node, many, between),
        seconds("all_gather", "ring", 1e9, per_node, inside),
    )
    assert seconds("all_reduce", "hierarchical", 1e9, per_node * many, DGX) == pytest.approx(sum(parts))


@pytest.mark.parametrize(
    "ranks, ring, hierarchical", [(8, 3.9, 3.9), (16, 37.9, 6.5), (32, 39.6, 7.8), (128, 43.2, 9.0)]
)
def test_flat_and_hierarchical_on_nodes_of_eight(ranks, ring, hierarchical):
    """Milliseconds for 1 GB, as the docstring tells them."""
    found = [round(1e3 * seconds("all_reduce", name, 1e9, ranks, DGX), 1) for name in ("ring", "hierarchical")]
    assert found == [ring, hierarchical]
    if ranks in (16, 128):
        assert all(f"{figure / 1e3:.4f}" in cost.of.__doc__ for figure in (ring, hierarchical))


@EVERY
def test_a_thousand_ranks(collective, algorithm):
    found = cost.of(collective, algorithm, 1e9, 1024, DGX)
    assert len(found.sent_by) == 1024 and 0 < found.seconds < math.inf


# -- bandwidth, table, errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize(
    "collective, algorithm",
    [
        *(("all_reduce", algorithm) for algorithm in ("ring", "direct")),
        *(("reduce_scatter", algorithm) for algorithm in ("ring", "direct", "pairwise")),
        *(("all_gather", algorithm) for algorithm in ("ring", "direct")),
        *(("all_to_all", algorithm) for algorithm in ("pairwise", "direct")),
        *(("gather", "star"), ("scatter", "star")),
    ],
)
def test_without_latency_the_bus_has_the_links_bandwidth(collective, algorithm, ranks):
    link = Link(0.0, 3e9)
    took = seconds(collective, algorithm, 6e6, ranks, Topology(link, link, ranks))
    assert cost.bus_bandwidth(collective, 6e6, ranks, took) == pytest.approx(3e9)


def test_a_broadcast_in_ever_smaller_chunks_comes_near_it():
    link = Link(0.0, 3e9)
    for collective in ("broadcast", "reduce"):
        took = seconds(collective, "ring", 6e6, 8, Topology(link, link, 8), chunks=10_000)
        assert cost.bus_bandwidth(collective, 6e6, 8, took) == pytest.approx(3e9, rel=1e-3)


def test_the_table_has_a_line_for_each_and_ends_in_what_it_costs():
    head, *lines = cost_table.table(LCM, 8, NODES_OF_4).splitlines()
    assert len(lines) == len(ALGORITHMS) and max(map(len, [head, *lines])) <= 120
    ring = next(line for line in lines if " ring " in line)
    assert ring.split() == ["ring", "2(P-1)", "14", "2n(P-1)/P", "1,261,260", "12.753"]


@pytest.mark.parametrize("ranks", SIZES)
def test_where_a_formula_does_not_give_its_number_the_table_says_so(ranks):
    other = [
        case
        for case, formula in ALGORITHMS.items()
        for found in [cost.of(*case, LCM, ranks, nodes(ranks))]
        if abs(value(formula.steps, ranks, nodes(ranks).per_node) - found.steps) > 1e-9
        or abs(value(formula.sent, ranks, nodes(ranks).per_node) - found.sent) > 1e-6
    ]
    assert bool(cost_table.remarks(ranks)) == bool(other)
    assert {who for _, who in other} <= {"doubling", "halving", "tree"}
    assert cost_table.table(LCM, ranks, nodes(ranks)).splitlines()[1 + len(ALGORITHMS) :] == cost_table.remarks(ranks)


def test_one_rank_has_no_bus():
    assert all(cost.bus_bandwidth(name, 8, 1, 1e-6) == 0 for name in cost._PORT_SHARE)
    assert cost_table.table(8, 1, NODES_OF_4).splitlines()[-1] == cost_table.remarks(1)[0]


def test_links_are_of_one_direction_and_name_their_source():
    assert LINKS["NVLink 4 (H100)"].bandwidth == 450e9 and LINKS["InfiniBand NDR"].bandwidth == 50e9
    assert LINKS["PCIe 5 x16"].bandwidth == pytest.approx(16 * 32e9 * 128 / 130 / 8, rel=1e-3)
    assert all(link.source and 1e-6 < link.latency < 1e-4 for link in LINKS.values())


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: seconds("all_reduce", "pairwise", 8, 4, NODES_OF_4), "all_reduce by pairwise: there is naive, star"),
        (
            lambda: seconds("allreduce", "ring", 8, 4, NODES_OF_4),
            "no allreduce by ring: the collectives are all_reduce",
        ),
        (lambda: seconds("all_reduce", "ring", 8, 0, NODES_OF_4), "at least 1 rank and 0 bytes, not 0"),
        (lambda: seconds("all_reduce", "hierarchical", 8, 6, NODES_OF_4), "4 ranks a node do not divide 6 ranks"),
        (lambda: seconds("reduce", "ring", 8, 4, NODES_OF_4, chunks=0), "at least 1 chunk, not 0"),
        (lambda: seconds("all_reduce", "ring", -8, 4, NODES_OF_4), "0 bytes, not 4 and -8"),
        (lambda: seconds("all_reduce", "ring", math.nan, 4, NODES_OF_4), "0 bytes, not 4 and nan"),
        (lambda: Link(math.nan, 1.0), "not nan and 1.0"),
        (lambda: Link(0.0, math.nan), "not 0.0 and nan"),
        (lambda: cost.bus_bandwidth("barrier", 8, 4, 1.0), "barrier has no bus bandwidth; all_reduce"),
        (lambda: Link(-1.0, 1.0), "not -1.0 and 1.0"),
        (lambda: Link(0.0, 0.0), "not 0.0 and 0.0"),
        (lambda: Topology(FAST, FAST, 0), "at least 1 rank, not 0"),
    ],
)
def test_errors_name_the_values_and_the_remedy(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_the_command(capsys):
    assert cost_table.main(["--ranks", "12"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(ALGORITHMS) - 1 + 2  # nodes of 8 are not full; remarks
    for wrong, words in (
        (["--ranks", "0"], "at least 1 rank"),
        (["--per-node", "0"], "at least 1 rank"),
        (["--bytes", "-1"], "0 bytes"),
    ):
        with pytest.raises(SystemExit, match="2"):
            cost_table.main(wrong)
        assert words in capsys.readouterr().err.splitlines()[-1]


def test_chunks_are_for_the_line():
    with pytest.raises(ValueError, match="only the ring's broadcast and reduce go in chunks"):
        cost.of("all_reduce", "ring", 8, 4, NODES_OF_4, chunks=2)
    with pytest.raises(ValueError, match="only the ring's broadcast and reduce go in chunks"):
        cost.of("all_reduce", "hierarchical", 8, 4, NODES_OF_4, chunks=2)
