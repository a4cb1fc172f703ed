"""Backward in two halves, for any module: I, the gradients of a stage's inputs; W, those of its weights.

Nodes of autograd's graph on the way from an output to an input make up I. One that leads to weights as well, such as a
matrix product, is a border: I asks it for one of its results, W, from the same gradient, for the other.

          loss ── norm ── matmul ── gelu ── matmul ── x         I goes along here
                   │        │                 │
                 weight   weight            weight              W goes down, from each border

Memory from I to W: what forward saved, and the gradient that entered each border. Qi et al. 2023, "Zero Bubble Pipeline
Parallelism", 2. PyTorch's counterpart: torch/distributed/pipelining/_backward.py. Left out: freeing what W does not
need; a hook that changes a gradient, which fires in both halves on a tensor that comes out of a border.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

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
    """What W needs, between I and W. layers: borders of which none leads to another, those of the last one first."""

    def __init__(self, layers: list[list[Border]]):
        self.layers = layers

    def run(self) -> None:
        """W. After: each weight's `grad` has what this backward gives it, added, and its hooks for an accumulated
        gradient have fired, once. Its other hooks see the gradient of a layer of borders.

        A weight to which several borders lead gets the sum of what each gives, once: the way from one to the other is
        closed meanwhile.
        """
        uses = Counter(weight for layer in self.layers for weight in _weights(layer))
        arrived: dict[Tensor, None] = {}
        while self.layers:
            layer = self.layers.pop()
            weights = list(_weights(layer))
            shared = any(uses[weight] > 1 for weight in weights)  # with another layer, which is closed meanwhile
            closing = [way.register_prehook(_nothing) for border in layer for way in border.closed if shared]
            edges = [
                GradientEdge(border.node, i)
                for border in layer
                for i, grad in enumerate(border.grads)
                if grad is not None
            ]
            given = [grad for border in layer for grad in border.grads if grad is not None]
            found = torch.autograd.grad(edges, weights, given, retain_graph=shared, allow_unused=True)
            for handle in closing:
                handle.remove()
            for weight, grad in zip(weights, found, strict=True):
                if grad is not None:
                    add(weight, grad)
                    arrived[weight] = None
        for weight in arrived:
            for hook in (weight._post_accumulate_grad_hooks or {}).values():  # by which data strategies collect it
                hook(weight)


def backward_input(roots: Sequence[Root], inputs: Sequence[Tensor]) -> tuple[Gradients, Weights]:
    """I. Returns the gradient of each input, a leaf; None where no output depends on it; and what is left for W."""
    graph = _graph([root.edge.node for root in roots])
    depth, borders = _on_the_way(graph, {get_gradient_edge(x).node for x in inputs})
    # IDEA: what comes into a border in I is all that W needs to begin there.
    watching = [node.register_prehook(border.grads.extend) for node, border in borders.items()]
    ways = [root for root in roots if root.edge.node in depth]
    found: Gradients = [None] * len(inputs)
    if ways:
        edges, grads = [root.edge for root in ways], [root.grad for root in ways]
        found = torch.autograd.grad(edges, list(inputs), grads, retain_graph=True, allow_unused=True)
    for handle in watching:
        handle.remove()
    layers = defaultdict(list)
    for node, border in borders.items():
        if any(grad is not None for grad in border.grads):
            layers[depth[node]].append(border)
    alone = [[_root_border(root, graph)] for root in roots if root.edge.node not in depth]
    return found, Weights([layers[i] for i in sorted(layers)] + alone)


def add(weight: Tensor, grad: Tensor) -> None:
    """Add to a weight's `grad`, in place where both are dense."""
    if weight.grad is not None:
        weight.grad = weight.grad.add_(grad) if weight.grad.layout == torch.strided else weight.grad + grad
    elif grad.layout == torch.strided:  # `grad` may be another weight's too, or on its way to the stage before
        weight.grad = torch.empty_like(weight, dtype=weight.grad_dtype).copy_(grad)
    else:
        weight.grad = grad.clone()


def _graph(starts: Sequence[Node]) -> dict[Node, list[Node]]:
    """What each node below `starts` leads to. A node comes after all those that it leads to."""
    children: dict[Node, list[Node]] = {}
    graph, stack = {}, list(starts)
    while stack:
        node = stack[-1]
        if node in children:
            graph.setdefault(stack.pop(), children[node])
        else:
            children[node] = [child for child, _ in node.next_functions if child is not None]
            stack += [child for child in children[node] if child not in children]
    return graph


def _on_the_way(graph: Mapping[Node, list[Node]], ends: set[Node]) -> tuple[dict[Node, int], dict[Node, Border]]:
    """Of each node from which an end is reached the number of borders on the longest way there, its own included; and
    the borders.
    """
    depth: dict[Node, int] = {}
    borders: dict[Node, Border] = {}
    for node, below in graph.items():
        closed = [child for child in below if child in depth]
        if closed or node in ends:
            depth[node] = max(map(depth.get, closed), default=0)
            down = [child for child in below if child not in depth]
            if down and (weights := dict.fromkeys(_leaves(down, graph))):
                borders[node] = Border(node, [], weights, closed)
                depth[node] += 1
    return depth, borders


def _root_border(root: Root, graph: Mapping[Node, list[Node]]) -> Border:
    """Of an output that depends on weights alone."""
    grads = [None] * root.edge.output_nr + [root.grad]
    return Border(root.edge.node, grads, dict.fromkeys(_leaves([root.edge.node], graph)), [])


def _leaves(nodes: Sequence[Node], graph: Mapping[Node, list[Node]]) -> Iterator[Tensor]:
    """The weights below nodes."""
    seen, stack = set(), list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                yield node.variable
            stack += graph[node]


def _weights(borders: Sequence[Border]) -> dict[Tensor, None]:
    """The weights of borders, each once."""
    return {weight: None for border in borders for weight in border.weights}


def _nothing(grads: Any) -> tuple[None, ...]:
    return (None,) * len(grads)
