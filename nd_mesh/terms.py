"""A term of a formula: the bytes that a rank sends in one kind of operation, on one group, for one reason.

n is what collectives/ledger.py takes for the message, and (P-1)/P of it is what leaves a rank. Fractions, because a
ring's share of n bytes is a mean over the ranks where P does not divide them.
"""

from fractions import Fraction
from typing import NamedTuple

from nd_mesh.part import Group


class Term(NamedTuple):
    """Bytes sent by this rank. even: if the router chose all experts equally often."""

    group: Group
    op: str  # as the ledger calls it
    what: str
    nbytes: Fraction
    even: bool = False


def all_reduce(group: Group, n: int | Fraction, what: str, *, even: bool = False) -> Term:
    """2n(P-1)/P."""
    return Term(group, "all_reduce", what, 2 * _leaves(group, n), even)


def all_gather(group: Group, n: int, what: str) -> Term:
    """n(P-1)/P of the whole."""
    return Term(group, "all_gather_single", what, _leaves(group, n))


def reduce_scatter(group: Group, n: int, what: str) -> Term:
    """n(P-1)/P of the whole."""
    return Term(group, "reduce_scatter_single", what, _leaves(group, n))


def broadcast(group: Group, n: int, what: str) -> Term:
    """n(P-1)/P, the mean of a tree."""
    return Term(group, "broadcast", what, _leaves(group, n))


def all_to_all(group: Group, n: int, what: str) -> Term:
    """n(P-1)/P of a rank's input, all pieces of which are equal."""
    return Term(group, "all_to_all_single", what, _leaves(group, n))


def send(pair: Group, n: int, what: str) -> Term:
    """n."""
    return Term(pair, "send", what, Fraction(n))


def _leaves(group: Group, n: int | Fraction) -> Fraction:
    return Fraction(n) * (len(group) - 1) / len(group)
