"""The entry of a first stage: where its backward is split, since token ids have no gradient.

Without a gradient of inputs, I of a first stage would be empty and W all of its backward, which the others wait for at
the end of a step. So what the stage's first weights return, the embedding's output, stands for its input: I ends there.
"""

import weakref
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves

from collectives.hooks import called


class Entry:
    """`with entry: stage(…)` notes where the outputs of the first module with weights are in the graph: `taken`."""

    def __init__(self, stage: nn.Module):
        self.edges: list[GradientEdge] = []
        self.inside = False
        # IDEA: weights come in the order of the modules that run, so the first one's output comes before all others.
        module = next((part for part in stage.modules() if any(True for _ in part.parameters(recurse=False))), None)
        if module is not None:
            self.module = weakref.ref(module)
            module.register_forward_hook(called(self._ran))

    def _ran(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.inside and module is self.module() and torch.is_grad_enabled():
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            # a weight itself that it returns is no way to the weights: its gradient is W's
            self.edges += [get_gradient_edge(tensor) for tensor in tensors if tensor.grad_fn is not None]
            self.inside = False  # a module that runs again is on the way

    def taken(self) -> list[GradientEdge]:
        """The edges, which are kept here no longer: they hold the graph."""
        edges, self.edges = self.edges, []
        return edges

    def __enter__(self) -> "Entry":
        self.edges, self.inside = [], True
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.inside = False
