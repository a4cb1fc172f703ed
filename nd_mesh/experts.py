"""Mixtures of experts on a mesh: which ranks share the experts, and which have parts of one row.

ep is folded out of dp · fsdp · cp: the ranks that hold different experts are ranks that have different tokens. Without
sequence parallelism the ranks of tp have the same tokens, each sends them to the experts of its own ep group, and every
expert is cut over tp as any feed-forward network. With it the ranks of tp have different tokens too: tp is folded into
ep, and no expert is cut.

What this composes are parts of expert_parallel/; this file says with which groups.
"""

from typing import Any

import torch
from torch import Tensor, nn

from collectives.layout import Box, Constant, Held
from expert_parallel import Observation, cut_hidden, follow_load, observe
from expert_parallel.observe import Record
from nd_mesh.config import Config, ModelConfig
from nd_mesh.mesh import Mesh
from nd_mesh.model import Mixture

_MEANS = ("balance", "z", "entropy", "overflow")


def mixtures(model: nn.Module) -> dict[int, Mixture]:
    """Those of a model's or a rank's blocks, by layer."""
    return {int(i): block.ffn for i, block in model.blocks.items() if isinstance(block.ffn, Mixture)}


def share_experts(model: nn.Module, config: Config, mesh: Mesh) -> None:
    """Each rank keeps its experts, and where tp has the same tokens its part of each of them; the router's bias, if
    there is one, gets memory and a declaration.
    """
    sequence = config.parallel.sequence
    group = mesh.group("ep_tp" if sequence else "ep")
    rows = mesh.group("row" if sequence else "cp")
    for layer, mixture in mixtures(model).items():
        mixture.distribute(group, mesh.group("expert_data"), rows)
        if mesh.size("tp") > 1 and not sequence:
            cut_hidden(mixture.experts, mesh.group("tp"))
        if mixture.router.bias is not None:
            mixture.router.bias = _bias(mixture.router.bias, f"blocks.{layer}.ffn.router.bias", mesh.run.device)


def _bias(meta: Tensor, name: str, device: torch.device) -> Tensor:
    bias = torch.zeros_like(meta, device=device)
    bias.held = Held(name, (Box.whole(bias.shape),), Constant(0.0), decay=False)
    return bias


class Observer:
    """What the mixtures of the whole model have recorded in a step: the same on every rank, whatever layers it has."""

    def __init__(self, model: nn.Module, config: Config, mesh: Mesh):
        self.mine, self.rate, self.device = mixtures(model), config.model.bias_rate, mesh.run.device
        self.records = _records(config.model, self.mine)
        # Ranks of tp have copies of the same tokens, or tokens of their own.
        self.group = mesh.run.world if config.parallel.sequence else mesh.group("tokens")

    def observe(self) -> dict[int, Observation]:
        """Of each layer that is a mixture, since the last call. Collective."""
        found = observe(list(self.records.values()), self.device, group=self.group)
        return dict(zip(self.records, found, strict=True))

    def follow(self, observed: dict[int, Observation]) -> None:
        """Move the biases of this rank's layers."""
        for layer, mixture in self.mine.items():
            if mixture.router.bias is not None:
                follow_load(mixture.router.bias, observed[layer].tokens.to(self.device), self.rate)

    def biases(self) -> dict[str, Tensor]:
        """Of this rank's layers, by name."""
        found = (mixture.router.bias for mixture in self.mine.values())
        return {bias.held.name: bias for bias in found if bias is not None}


def _records(model: ModelConfig, mine: dict[int, Mixture]) -> dict[int, Record]:
    layers = filter(model.mixture, range(model.layers))
    return {layer: mine[layer].record if layer in mine else Record(model.experts) for layer in layers}


def summary(observed: dict[int, Observation]) -> dict[str, Any] | None:
    """What a record of a step has of its mixtures, None without any: means over layers, of the imbalance the largest,
    and the tokens of each layer's experts.
    """
    if not observed:
        return None
    layers = observed.values()
    means = {name: sum(getattr(each, name) for each in layers) / len(layers) for name in _MEANS}
    tokens = {str(layer): each.tokens.tolist() for layer, each in observed.items()}
    return {**means, "imbalance": max(each.imbalance for each in layers), "tokens": tokens}
