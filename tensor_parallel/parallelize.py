"""Turns any module into this rank's part of it, by a plan of names and roles (plan.py).

    parallelize(block, {"norm": Stream(), "up": Column(), "down": Row()}, group)

Columns, and the row that comes after them in the plan, are a region: they share its input. How a parameter is cut, and
what its gradient is a sum of, is in its declaration from there on (collectives/layout.py): reduction, norm,
initialisation and checkpoints read it there.

Shoeybi et al. 2019; Korthikanti et al. 2022. PyTorch's counterpart: parallelize_module.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import nn

from tensor_parallel.embedding import VocabParallelEmbedding
from tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, declare
from tensor_parallel.plan import Column, Heads, KeyValue, Placed, Role, Row, Stream, Vocabulary, read
from tensor_parallel.region import Region


def parallelize(
    module: nn.Module,
    plan: Mapping[str, Role],
    group: dist.ProcessGroup,
    *,
    sequence_parallel: bool = False,
    save_gathered: bool = False,
) -> None:
    """Turn a module that every rank of `group` has whole, on the meta device or with the same values, into this rank's
    part of it, in place: linear layers and embeddings are replaced, parameters stay the objects they are.

    plan: roles by the names of modules, `*` for any one part of a name: "blocks.*.ffn.up"; a role holds for a module
    and all in it. With sequence_parallel what comes into the regions and leaves them has T/tp tokens a rank; who gives
    the module its input cuts it (collectives/differentiable.py, split_all_gather; an embedding does so itself).

    Raises ValueError on every rank, before anything is changed: for names that the module does not have; for a module
    with two roles, of the wrong class, or with hooks, which would be lost; for a parameter without a role, or shared by
    roles that cut it otherwise; for sizes that do not divide; for nn.Dropout, which would draw other masks for copies
    (collectives/rng.py has one that does not).
    """
    placed = read(module, plan, group)
    work = _Work(module, group, {"sequence_parallel": sequence_parallel, "save_gathered": save_gathered})
    work.region()  # which refuses a mode that there is none
    declare(module)
    for each in placed:
        work.apply(each)


@dataclass
class _Work:
    """The plan being carried out, module by module."""

    module: nn.Module
    group: dist.ProcessGroup
    settings: Mapping[str, bool]
    regions: dict[tuple[str, ...], Region] = field(default_factory=dict)  # begun by columns, by the place of the stars

    def region(self) -> Region:
        return Region(self.group, **self.settings)

    def apply(self, each: Placed) -> None:
        _, part, role, place, pieces = each
        match role:
            case Column():
                # IDEA: columns share the region that the next row of their layer closes: one input, one output.
                region = self.regions.setdefault(place, self.region())
                new = ColumnParallelLinear(part, region, pieces=pieces[1], gather_output=role.gather_output)
            case KeyValue():
                new = ColumnParallelLinear(part, self.regions.setdefault(place, self.region()), pieces=pieces[1])
                if self.group.size() > role.kv_heads:
                    add_sum(new, "kv", role.group)
            case Row():
                new = RowParallelLinear(part, self.regions.pop(place, self.region()), input_is_cut=role.input_is_cut)
            case Vocabulary() if isinstance(part, nn.Embedding):
                new = VocabParallelEmbedding(part, self.region())
            case Vocabulary():
                new = ColumnParallelLinear(part, self.region(), pieces=pieces[1], gather_output=role.gather_output)
            case _:
                if isinstance(role, Heads) or (isinstance(role, Stream) and self.settings["sequence_parallel"]):
                    add_sum(part, "tp", self.group)
                return
        self._replace(part, new.train(part.training))

    def _replace(self, part: nn.Module, new: nn.Module) -> None:
        """Wherever it is: a module may have several names."""
        for parent in list(self.module.modules()):
            for name, child in list(parent._modules.items()):
                if child is part:
                    setattr(parent, name, new)


def add_sum(module: nn.Module, label: str, group: dist.ProcessGroup) -> None:
    """Declare that gradients of a module's parameters are terms of a sum over a group."""
    for param in module.parameters():
        param.held.sums[label] = group
