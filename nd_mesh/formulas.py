"""What a rank sends in a step, as the sum of the strategies' formulas: README.md, "What a step costs", row by row.

Every strategy is a function of a Part (part.py) that yields Terms; each has its formula in its docstring. P: the ranks
of the group; n, a, b: bytes, as there; k: microbatches. Data strategies are in data_formulas.py.

A term is exact, but for those that are marked `even`: how many rows leave a rank for experts elsewhere is the router's
choice, and what stands here is the formula for even routing.
"""

import json
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import NamedTuple

from nd_mesh.config import Config
from nd_mesh.data_formulas import data, pieces
from nd_mesh.part import Group, Part
from nd_mesh.terms import Term, all_gather, all_reduce, all_to_all, reduce_scatter, send


def expected(config: Config, rank: int) -> list[Term]:
    """All that rank `rank` sends in its first step, which tells each receiver of a pipeline what it is to receive."""
    part = Part(config, rank)
    return [term for strategy in STRATEGIES for term in strategy(part) if term.nbytes]


def numbers(part: Part) -> Iterator[Term]:
    """Of counts 24 bytes, of the loss and of the norm 8, all-reduced: 2n(P-1)/P; of the seconds 8(P-1), gathered."""
    data, mixtures = part.group("data"), [layer for layer in range(part.config.model.layers) if part.mixes(layer)]
    yield all_reduce(data, 24, "counts")
    yield all_reduce(data, 8, "loss")
    if part.plan is not None:
        yield all_reduce(part.group("pp"), 8, "loss")
    yield all_reduce(part.world, 8, "norm")
    yield all_gather(part.world, 8 * len(part.world), "seconds")
    observers = part.world if part.config.parallel.sequence else part.group("tokens")
    yield all_reduce(observers, 8 * (part.config.model.experts + 5) * len(mixtures), "what mixtures did")


def partial_sums(part: Part) -> Iterator[Term]:
    """2m(P-1)/P over each group of a partial sum, m the bytes of the gradients that the data strategy leaves to this
    rank and of one number a parameter: whether anybody has it.
    """
    left = pieces(part)
    for name in part.weights:
        for what, group in part.sums(name).items():
            yield all_reduce(group, part.g * (left[name] + 1), what)


# -- tensor parallelism ------------------------------------------------------------------------------------------------


class Region(NamedTuple):
    """How often a stream of `a` bytes is gathered, scattered and reduced."""

    gathers: int = 0
    scatters: int = 0
    reduces: int = 0

    def times(self, group: Group, a: int, what: str) -> Iterator[Term]:
        """a(P-1)/P a gather and a scatter, twice that a reduction."""
        yield all_gather(group, self.gathers * a, what)
        yield reduce_scatter(group, self.scatters * a, what)
        yield all_reduce(group, self.reduces * a, what)


def tensor(part: Part) -> Iterator[Term]:
    """A layer: 2 regions, each 2 all_reduces, 4a(P-1)/P; with sequences 3 gathers and 2 scatters, 5a(P-1)/P, 4a if the
    inputs are kept gathered. The embedding 2a(P-1)/P; the head as the half of a region; the loss 6(a/D)(P-1)/P.
    """
    group, parallel = part.group("tp"), part.config.parallel
    a, again = part.stream, part.gathers_again
    for layer in part.layers:
        yield from attention_region(part).times(group, a, "attention")
        if not part.mixes(layer) or part.config.model.shared_hidden:
            yield from network_region(part).times(group, a, "feed-forward")
    if not parallel.sequence:
        yield from experts_cut(part)
    if 0 in part.stages:
        embedding = Region(1, 1) if parallel.sequence else Region(reduces=1)
        yield from embedding.times(group, a, "embedding")
    if part.last_stage in part.stages:
        head = Region(1 + again, 1) if parallel.sequence else Region(reduces=1)
        yield from head.times(group, a, "head")
        yield all_reduce(group, 3 * part.g * sum(part.rows) * part.tokens, "loss of tokens")


def attention_region(part: Part) -> Region:
    """Enter and leave; and what of it runs again: a block all of forward, `o` the way out; q, k and v, each by itself,
    no longer share the input that is gathered.
    """
    again = part.again("block") + part.again("o")
    if not part.config.parallel.sequence:
        return Region(reduces=2 + again)
    alone = sum(part.again(name) for name in ("q", "k", "v"))
    return Region(2 + part.gathers_again + part.again("block") + alone, 2 + again)


def network_region(part: Part) -> Region:
    """Enter and leave, of a feed-forward network or of a shared expert; once more in forward if it runs again."""
    again = part.again("block", "ffn")
    if not part.config.parallel.sequence:
        return Region(reduces=2 + again)
    return Region(2 + part.gathers_again + again, 2 + again)


def experts_cut(part: Part) -> Iterator[Term]:
    """Of each expert every rank of tp has a part: two all_reduces, 4(P-1)/P of the rows that came to its experts, once
    more half of it where forward runs again.
    """
    if mixtures := [*filter(part.mixes, part.layers)]:
        n = part.e * part.config.model.width * sum(arriving(part, part.group("ep")))
        times = len(mixtures) * (2 + part.again("block", "ffn"))
        yield all_reduce(part.group("tp"), times * n, "experts", even=True)


# -- context parallelism -----------------------------------------------------------------------------------------------


def context(part: Part) -> Iterator[Term]:
    """The attention of each layer, by the method of the configuration; forward once more where it runs again."""
    if part.config.mesh.cp > 1:
        method = METHODS[part.config.parallel.attention]
        for _ in part.layers:
            yield from method(part, part.again("block", "attend"))


def ring(part: Part, again: int) -> Iterator[Term]:
    """(6P-4)b: forward k and v, 2(P-1)b; backward these, and dk and dv, which need a hop more to come home, 2P·b, in
    float32 where b is of 16 bits.
    """
    yield exchanged(part, part.group("cp"), part.keys(), again)


def exchanged(part: Part, group: Group, b: int, again: int) -> Term:
    """Those (6P-4)b, and 2(P-1)b where forward runs again."""
    p = len(group)
    nbytes = 2 * (p - 1) * (2 + again) * b + 2 * p * (b // part.e * part.g) if p > 1 else 0
    return Term(group, "exchange", "keys and values", Fraction(nbytes))


def gathered(part: Part, again: int) -> Iterator[Term]:
    """2(P-1)b to gather k and v, again in backward if they are not kept, and as much to scatter dk and dv; these in
    float32 where b is of 16 bits.
    """
    group, kept = part.group("cp"), part.config.parallel.save_gathered
    whole = 2 * len(group) * part.keys()
    yield all_gather(group, whole * (2 - kept + again), "keys and values")
    yield reduce_scatter(group, whole // part.e * part.g, "keys and values")


def ulysses(part: Part, again: int) -> Iterator[Term]:
    """4(a/tp + b)(P-1)/P: q, k, v one way, the output the other; backward the same."""
    yield heads(part, part.group("cp"), again)


def heads(part: Part, group: Group, again: int) -> Term:
    """Those, of b with the copies of keys that are sent where the ranks are more than heads of keys."""
    one_way = 2 * (part.queries() + part.keys(len(group)))
    return all_to_all(group, one_way * (2 + again), "heads")


def ring_ulysses(part: Part, again: int) -> Iterator[Term]:
    """4(a/tp + b)(U-1)/U among U neighbours, and (6R-4)b in a ring of R."""
    cp, u = part.group("cp"), part.config.parallel.ulysses
    place = cp.index(part.rank)
    yield heads(part, cp[place - place % u :][:u], again)
    yield exchanged(part, cp[place % u :: u], part.keys(u), again)


METHODS: dict[str, Callable[[Part, int], Iterator[Term]]] = {
    **{"ring": ring, "all_gather": gathered, "ulysses": ulysses, "ring_ulysses": ring_ulysses}
}


# -- pipelines ---------------------------------------------------------------------------------------------------------


def pipeline(part: Part) -> Iterator[Term]:
    """a across each boundary between ranks, forward by the one and backward by the other; before each activation of the
    first step what it is, as a length and a text; and 16(P-1) in which all agree on what they were given.
    """
    plan, group = part.plan, part.group("pp")
    if plan is None:
        return
    yield all_gather(group, 16 * len(group), "agreement")
    tokens, width = part.stream_tokens, part.config.model.width
    for stage in part.stages:
        rows = [part.rows[m] for m in plan.through(stage)]
        for there, kind in ((plan.after(stage), "activations"), (plan.before(stage), "gradients")):
            if there is None or plan.rank_of[there] == part.place["pp"]:
                continue
            pair = tuple(sorted((part.rank, group[plan.rank_of[there]])))
            yield send(pair, part.e * sum(rows) * tokens * width, kind)
            if kind == "activations":
                shapes = [[[[each, tokens, width], part.config.train.dtype, True]] for each in rows]
                yield send(pair, sum(8 + len(json.dumps(shape)) for shape in shapes), "descriptions")


# -- mixtures of experts -----------------------------------------------------------------------------------------------


def experts(part: Part) -> Iterator[Term]:
    """A layer: 4·s·D·k rows' bytes, s the share of choices that leave the rank, (P-1)/P if routing is even: what goes
    to the experts of others, and back to those whose rows came here, in forward and in backward. Before that how many,
    each time 8E(P-1); and, where a row is cut into P parts, which: 4·(choices of the part)(P-1).
    """
    model, sequence, again = part.config.model, part.config.parallel.sequence, part.again("block", "ffn")
    group, parts = part.group("ep_tp" if sequence else "ep"), part.group("row" if sequence else "cp")
    mine, others = arriving(part, group)
    leaving = part.choices - mine + others
    for _ in filter(part.mixes, part.layers):
        times = len(part.rows) * (1 + again)
        yield all_gather(group, times * 8 * model.experts * len(group), "how many rows")
        yield all_gather(parts, (1 + again) * 4 * part.choices * len(parts), "choices of whole rows")
        n = (2 + again) * part.e * model.width * leaving
        yield Term(group, "all_to_all_single", "rows for experts", n, even=True)


def arriving(part: Part, group: Group) -> tuple[Fraction, Fraction]:
    """Rows that come to this rank's experts from itself and from others, of equally many choices of every expert."""
    everyones = sum(Part(part.config, rank).choices for rank in group)
    return Fraction(part.choices, len(group)), Fraction(everyones - part.choices, len(group))


STRATEGIES = (numbers, data, partial_sums, tensor, context, pipeline, experts)
