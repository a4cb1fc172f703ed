"""Context parallelism: attention over sequences that are cut across ranks.

places = Places.of(documents, slots("zigzag", T, group.size()))
out = ring_attention(q, k, v, places, group=group)
"""

from context_parallel.gather import all_gather_attention
from context_parallel.local import local_attention
from context_parallel.order import ORDERS, cut, join, slots
from context_parallel.places import NOWHERE, Places
from context_parallel.ring import ring_attention
from context_parallel.ring_ulysses import ring_ulysses_attention
from context_parallel.ulysses import ulysses_attention

__all__ = [
    "NOWHERE",
    "ORDERS",
    "Places",
    "all_gather_attention",
    "cut",
    "join",
    "local_attention",
    "ring_attention",
    "ring_ulysses_attention",
    "slots",
    "ulysses_attention",
]
