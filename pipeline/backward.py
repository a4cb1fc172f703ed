"""Backward in two halves, for any module: I, the gradients of a stage's inputs; W, those of its weights.

Autograd's graph runs from a stage's outputs to its inputs and to its weights. Nodes on the way to an input make up I. A
node on that way which also leads to weights, such as a matrix product, is a border: in I it is asked for one of its
results, in W, from the same gradient, for the other. So I notes what comes into each border, and W begins there.

          loss ── norm ── matmul ── gelu ── matmul ── x         I goes along here
                   │        │                 │
                 weight   weight            weight              W goes down, from each border

Memory: from I to W the gradient that entered each border, and whatever forward saved. A weight that several borders
lead to gets the sum of what each gives, once: from one border the way to another one's is closed. A node made by a
Python autograd.Function runs whole in both halves, whatever is asked of it: so a collective and a weight do not belong
in one function.

Qi et al. 2023, "Zero Bubble Pipeline Parallelism", 2.1. PyTorch's counterpart: _backward.py of
torch/distributed/pipelining. Left out: freeing after I what W does not need; a hook on a tensor that changes its
gradient, which fires in both halves if the tensor comes out of a border.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

Gradients = Sequence[Tensor | None]


class Root(NamedTuple):
    """An output's place in the graph, and the gradient that has come for it."""

    edge: GradientEdge
    grad: Tensor


class Border(NamedTuple):
    """A node that leads to weights, and to inputs as well unless it is an output's own."""

    node: Node
    grads: list[Tensor | None]  # of its outputs
    weights: dict[Tensor, None]  # that are reached without passing by an input's way
    closed: list[Node]  # the ways that lead on to inputs


class Weights:
    """What W needs, between I and W."""

    def __init__(self, borders: list[Border]):
        self.borders = borders

    def run(self) -> None:
        """W. After: each weight's `grad` has what this backward gives it, added. No hook of a weight fires."""
        shared = {weight for weight, count in self._leading_to().items() if count > 1}
        while self.borders:
            node, grads, weights, closed = self.borders.pop()
            edges = [GradientEdge(node, i) for i, grad in enumerate(grads) if grad is not None]
            together = not shared.isdisjoint(weights)
            closing = [way.register_prehook(_nothing) for way in closed] if together else []
            given = [grad for grad in grads if grad is not None]
            found = torch.autograd.grad(edges, list(weights), given, retain_graph=together, allow_unused=True)
            for handle in closing:
                handle.remove()
            for weight, grad in zip(weights, found, strict=True):
                if grad is not None:
                    add(weight, grad)

    def _leading_to(self) -> Counter[Tensor]:
        return Counter(weight for border in self.borders for weight in border.weights)


def backward_input(roots: Sequence[Root], inputs: Sequence[GradientEdge]) -> tuple[Gradients, Weights]:
    """I. Returns the gradient of each input, None where no output depends on it, and what is left for W."""
    on_the_way = _leading_to({edge.node for edge in inputs}, [root.edge.node for root in roots])
    borders = {node: border for node in on_the_way if (border := _border(node, on_the_way)).weights}
    # IDEA: what comes into a border in I is all that W needs to begin there.
    watching = [node.register_prehook(border.grads.extend) for node, border in borders.items()]
    ways = [root for root in roots if root.edge.node in on_the_way]
    found: Gradients = [None] * len(inputs)
    if ways:
        edges, grads = [root.edge for root in ways], [root.grad for root in ways]
        found = torch.autograd.grad(edges, list(inputs), grads, retain_graph=True, allow_unused=True)
    for handle in watching:
        handle.remove()
    ran = [node for node, border in borders.items() if border.grads]
    for edge, grad in zip(inputs, found, strict=True):
        if edge.node in borders and edge.node not in ran:  # I ends in front of it
            grads = borders[edge.node].grads
            grads += [None] * (edge.output_nr + 1 - len(grads))
            grads[edge.output_nr] = grad
    reached = [border for border in borders.values() if any(grad is not None for grad in border.grads)]
    return found, Weights(reached + [_root_border(root) for root in roots if root.edge.node not in on_the_way])


def add(weight: Tensor, grad: Tensor) -> None:
    """Add to a weight's `grad`, in place where there is one."""
    with torch.no_grad():
        if weight.grad is None:  # `grad` may be another weight's too, or on its way to the stage before
            weight.grad = torch.empty_like(weight).copy_(grad)
        else:
            weight.grad.add_(grad)


def _leading_to(ends: set[Node], starts: Sequence[Node]) -> dict[Node, None]:
    """The nodes from which an end is reached, each after all those that it leads to."""
    leads: dict[Node, bool] = {}
    seen, stack = set(), [(node, False) for node in starts]
    while stack:
        node, through = stack.pop()
        below = [child for child, _ in node.next_functions if child is not None]
        if through:
            leads[node] = node in ends or any(leads[child] for child in below)
        elif node not in seen:
            seen.add(node)
            stack += [(node, True), *((child, False) for child in below if child not in seen)]
    return {node: None for node, does in leads.items() if does}


def _border(node: Node, on_the_way: dict[Node, None]) -> Border:
    below = [child for child, _ in node.next_functions if child is not None]
    down = [child for child in below if child not in on_the_way]
    return Border(node, [], dict.fromkeys(_leaves(down)), [child for child in below if child in on_the_way])


def _root_border(root: Root) -> Border:
    """Of an output that depends on weights alone."""
    grads = [None] * root.edge.output_nr + [root.grad]
    return Border(root.edge.node, grads, dict.fromkeys(_leaves([root.edge.node])), [])


def _leaves(nodes: Sequence[Node]) -> Iterator[Tensor]:
    """The weights below nodes."""
    seen, stack = set(), list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                yield node.variable
            stack += [child for child, _ in node.next_functions if child is not None]


def _nothing(grads: Any) -> tuple[None, ...]:
    return (None,) * len(grads)
