"""The demo: its claims hold, and each kind of them fails where the code does not keep it."""

from unittest import mock

import pytest

from collectives import timeline
from collectives.demo import Demo
from collectives.timeline import Span
from context_parallel import __main__ as command
from context_parallel import overlap, places, ring
from context_parallel.order import cut, slots

true_forward = ring.Forward


def forgets_sums(tensor, *rest, **more):
    """Gradients of weights stay partial."""


def repeats_heads(q, k, v, places, *, group):
    """Every query head has keys of its own, which all travel."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return ring.ring_attention(q, k, v, places, group=group)


def keeps_more(q, k, v, places, *, group):
    """Attention, and something for backward that nobody needs."""
    return ring.ring_attention(q + 0 * (q + 1).cos(), k, v, places, group=group)


def wrong_scores(q, places, rank):
    """Queries that are a little too long."""
    return true_forward(q * (1 + 1e-9), places, rank)


def as_they_come(order, *rest, **more):
    """Neighbours, whatever order was asked for."""
    return slots("contiguous", *rest, **more)


def padding_sees_the_row(row, mine, *, dim=1, fill=0):
    """What does not exist sees from the first slot to its own."""
    piece = cut(row, mine, dim=dim, fill=fill)
    return piece.where(mine < row.size(1), mine) if fill == -1 else piece


FAULTS = {
    "": (),
    "sums": (command.comm, "all_reduce", forgets_sums),
    "heads": (command, "ring_attention", repeats_heads),
    "memory": (command, "ring_attention", keeps_more),
    "scores": (ring, "Forward", wrong_scores),
    "order": (command, "slots", as_they_come),
    "padding": (places, "cut", padding_sees_the_row),
}


def broken(run, fault):
    """The names of the claims that do not hold on this rank, by part."""
    show = Demo(run)
    small = mock.patch.multiple(command, SIZES=(64, 128), PRIME=61)
    with small, mock.patch.object(*FAULTS[fault]) if fault else mock.MagicMock():
        command.compare(run, show)
        command.balance(run, show)
    failed = [(claim.part, claim.name) for claim in show.claims if not claim.holds()]
    return {part: {name for other, name in failed if other == part} for part, _ in failed}


def both(*names):
    """These claims of the ring, on every length."""
    return {f"T = {length}, ring": set(names) for length in ("64", "128", "61, padded")}


def every_method(ranks):
    """Their names."""
    more = ["ulysses"] * (ranks != 3) + ["ring x ulysses, 2 x 2"] * (ranks == 4)
    return ["ring", "all_gather", "all_gather, saved", *more]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_claims_hold(pool, ranks):
    assert pool.run(ranks, broken, "") == ranks * [{}]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_which_methods_there_are(pool, ranks):
    assert pool.run(ranks, named) == ranks * [every_method(ranks)]


def named(run):
    return [method.name for method in command.methods(run)]


def test_sums_that_are_forgotten(pool):
    parts = [f"T = {length}, {name}" for length in (64, 128) for name in every_method(2)]
    expected = {part: {"gradients of weights"} for part in [*parts, "T = 61, padded, ring"]}
    assert pool.run(2, broken, "sums") == 2 * [expected]


def test_keys_that_are_sent_once_a_query_head(pool):
    """The numbers are right, and too many of them travel."""
    seen = both("elements, forward", "elements, backward", "bytes on sockets", "bytes kept")
    assert pool.run(2, broken, "heads") == 2 * [seen]


def test_something_kept_that_is_not_in_the_formula(pool):
    assert pool.run(2, broken, "memory") == 2 * [both("bytes kept")]


def test_scores_a_little_off(pool):
    seen = both("output", "gradient of the input", "gradients of weights")
    assert pool.run(2, broken, "scores") == 2 * [seen]


def test_an_order_that_is_not_the_one_asked_for(pool):
    """Numbers, bytes and memory hold in any order; the work is shared badly."""
    work = {f"pairs, max/mean, {order}" for order in ("zigzag", "striped")}
    seen = {"T = 61, padded, ring": {"tokens of padding"}, "T = 128, one document": work}
    assert pool.run(2, broken, "order") == 2 * [seen]


def test_padding_that_sees_the_row(pool):
    """Of the ranks in zigzag the first has the end of the row."""
    assert pool.run(2, broken, "padding") == [{"T = 61, padded, ring": {"output"}}, {}]


# -- overlap -----------------------------------------------------------------------------------------------------------


def stepped(run):
    """Of each way the name, and of this rank what is computed and what is sent, in order."""
    with mock.patch.multiple(overlap, T=256, BLOCK=0.0, RUNS=1):
        steps = overlap.overlap(run)
        if run.rank == 0:
            overlap.tell(steps, None)
    mine = {each.name: each.ranks[run.rank] for each in steps}
    return {name: [span.name for span in lanes if span.lane != "waits"] for name, lanes in mine.items()}


def test_one_rank_has_nothing_to_hide(pool):
    assert pool.run(1, stepped) == [{}]


def test_steps_of_a_ring(pool):
    """A span for each block forward and backward, its own first; keys come from the rank before, gradients go home."""
    for rank, ways in enumerate(pool.run(3, stepped)):
        before, last = (rank - 1) % 3, (rank - 2) % 3
        for name in ("ring, zigzag", "ring, contiguous"):
            computed = [each for each in ways[name] if each.split()[0] in ("forward", "backward")]
            order = [rank, before, last]
            assert computed == [f"{half} {owner}" for half in ("forward", "backward") for owner in order]
            sent = [each for each in ways[name] if each not in computed]
            keys = [f"kv {before}", f"kv {last}"]
            assert sorted(sent) == sorted([*keys, *keys, *(f"dkv {owner}" for owner in order)])
        assert len(ways["all_gather, zigzag"]) == 3  # forward; backward, and the sums


def test_only_what_is_waited_for_counts():
    """Forward ends at 9. In it the link carries for 5, of which 1 is waited for; in backward for 5, of which 3."""
    forward = [Span("compute", "f", 0, 4), Span("exchange", "kv", 0, 5), Span("waits", "kv", 4, 5)]
    backward = [Span("compute", "b", 9, 12), Span("exchange", "kv", 9, 11), Span("waits", "dkv", 12, 15)]
    backward.append(Span("exchange", "dkv", 12, 15))
    steps = overlap.Steps("", [[*forward, Span("compute", "f", 5, 9), *backward]], [9])
    assert [steps.longest(lane, half) for half in (0, 1) for lane in ("link", "waits")] == [5, 1, 5, 3]
    assert steps.seconds == 15


def test_a_timeline_that_does_not_watch_has_no_spans(pool):
    assert pool.run(2, unwatched) == [[], []]


def unwatched(run):
    lanes = timeline.Timeline()
    q, k, v = (command.random(0, 1, heads, 4, 8).requires_grad_() for heads in (4, 2, 2))
    visible = command.places_of("zigzag", [8], 2)
    ring.ring_attention(q, k, v, visible, group=run.world, timeline=lanes).sum().backward()
    return lanes.spans
