"""A plan: which module has which role. It turns any module into this rank's part of it.

    parallelize(block, {"norm": Stream(), "up": Column(), "down": Row()}, group)

A role says how a module's parameters are cut and what its gradients are sums of; the declarations of the parameters
(collectives/layout.py) carry both from there on. Columns, and the row that comes after them in the plan, are a region:
they share its input. Every parameter must have a role: one that is forgotten would train on a part of its gradient, and
nothing would say so.

Shoeybi et al. 2019; Korthikanti et al. 2022. PyTorch's counterpart: parallelize_module, which leaves alone what a plan
does not name.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import nn

from tensor_parallel import cut
from tensor_parallel.embedding import VocabParallelEmbedding, check_settings
from tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, declare
from tensor_parallel.region import Region


@dataclass(frozen=True)
class Column:
    """A linear layer whose outputs are cut. heads: of how many units, which must stay together, each matrix in it
    consists: (8,) for queries, (8, 2, 2) for queries, keys and values in one, (F, F) for gate and up in one; (): one
    matrix of single rows. All units have equally many rows.
    """

    heads: tuple[int, ...] = ()
    gather_output: bool = False


@dataclass(frozen=True)
class KeyValue:
    """The linear layer of keys or of values. Where tp is more than its heads, the ranks of `group` hold the same one
    (`cut.sharers` tells which), and their gradients are summed over it.
    """

    kv_heads: int
    heads: int  # of the queries
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Row:
    """A linear layer whose inputs are cut: it ends the region of the columns before it."""

    input_is_cut: bool = True


@dataclass(frozen=True)
class Vocabulary:
    """An embedding, or the linear layer that makes logits, cut by tokens, evenly or not."""

    gather_output: bool = False  # of logits


@dataclass(frozen=True)
class Stream:
    """A module on the residual stream (a norm, a router): copies; with sequence parallelism each saw some tokens."""


@dataclass(frozen=True)
class Heads:
    """A module that each rank applies to its own heads (a norm of queries): copies, each of which saw some heads."""


@dataclass(frozen=True)
class Whole:
    """A module to which every rank gives all of the same: copies with the whole gradient."""


Role = Column | KeyValue | Row | Vocabulary | Stream | Heads | Whole


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

    Raises ValueError on every rank, before anything is changed, for names that the module does not have, modules that
    have two roles or the wrong kind, parameters without a role, sizes that do not divide, and nn.Dropout, which would
    draw other masks for copies (collectives/rng.py has one that does not).
    """
    roles = dict(_matched(module, plan))
    _check_all_covered(module, roles)
    settings = {"sequence_parallel": sequence_parallel, "save_gathered": save_gathered}
    Region(group, **settings)
    _check_kinds(module, roles)
    _check_sizes(module, roles, group)
    declare(module)
    work = _Work(module, group, settings)
    for name, (place, role) in roles.items():
        work.apply(name, place, role)


def _matched(module: nn.Module, plan: Mapping[str, Role]) -> Iterator[tuple[str, tuple[tuple[str, ...], Role]]]:
    """Each module that has a role, by name, with what the stars of its pattern stood for."""
    names = [name for name, _ in module.named_modules(remove_duplicate=False) if name]
    seen: dict[str, str] = {}
    for pattern, role in plan.items():
        found = [(name, place) for name in names if (place := _stars(pattern, name)) is not None]
        if not found:
            near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
            raise ValueError(f"the plan names {pattern!r}, which the module does not have{_nearest(near)}")
        for name, place in found:
            if name in seen:
                raise ValueError(f"{name} has two roles in the plan, by {seen[name]!r} and by {pattern!r}: give it one")
            seen[name] = pattern
            yield name, (place, role)


def _nearest(names: list[str]) -> str:
    return f": did you mean {names[0]!r}?" if names else ""


def _stars(pattern: str, name: str) -> tuple[str, ...] | None:
    wanted, parts = pattern.split("."), name.split(".")
    if len(wanted) != len(parts) or any(a not in ("*", b) for a, b in zip(wanted, parts, strict=True)):
        return None
    return tuple(part for star, part in zip(wanted, parts, strict=True) if star == "*")


def _check_all_covered(module: nn.Module, roles: Mapping[str, object]) -> None:
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
            raise ValueError(
                f"{name} is {type(part).__name__}: it draws by the generator of its rank, so copies would get other "
                f"masks; use collectives.rng.dropout, which draws by index"
            )
        owners = [given for given in roles if name == given or name.startswith(f"{given}.")]
        if len(owners) > 1:
            raise ValueError(
                f"{owners[-1]} has two roles, its own and that of {owners[0]}, which it is in: give it one"
            )
        if not owners and (own := [param for param, _ in part.named_parameters(recurse=False)]):
            missing = f"{name}.{own[0]}" if name else own[0]
            raise ValueError(f"{missing} has no role: name its module in the plan; Stream() or Whole() leave it whole")


def _check_kinds(module: nn.Module, roles: Mapping[str, tuple[object, Role]]) -> None:
    kinds = {Column: [nn.Linear], KeyValue: [nn.Linear], Row: [nn.Linear], Vocabulary: [nn.Linear, nn.Embedding]}
    for name, (_, role) in roles.items():
        part = module.get_submodule(name)
        if type(part) not in kinds.get(type(role), [type(part)]):  # a subclass has a forward of its own
            raise ValueError(f"{name} is {type(part).__name__}, which cannot have the role {type(role).__name__}")


def _check_sizes(module: nn.Module, roles: Mapping[str, tuple[object, Role]], group: dist.ProcessGroup) -> None:
    for name, (_, role) in roles.items():
        part = module.get_submodule(name)
        try:
            if isinstance(role, Column | KeyValue):
                pieces_of(role, part.out_features, group.size())
            elif isinstance(role, Row):
                cut.even(part.in_features, group.size(), what="input features")
            elif isinstance(role, Vocabulary):
                if isinstance(part, nn.Embedding):
                    check_settings(part)
                cut.nearly_even(len(part.weight), group.size(), what="tokens of a vocabulary")
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        _check_sharers(name, role, group)


def _check_sharers(name: str, role: Role, group: dist.ProcessGroup) -> None:
    if isinstance(role, KeyValue) and group.size() > role.kv_heads:
        ranks = dist.get_process_group_ranks(group)
        [mine] = [run for run in cut.sharers(ranks, role.kv_heads) if dist.get_rank() in run]
        if role.group is None or tuple(dist.get_process_group_ranks(role.group)) != mine:
            raise ValueError(
                f"{name}: tp={group.size()} is more than {role.kv_heads} key and value heads, of which ranks "
                f"{list(mine)} hold the same: give KeyValue their group, which all ranks make (cut.sharers)"
            )


def pieces_of(role: Column | KeyValue, rows: int, ranks: int) -> list[list[range]]:
    """Of each matrix in a layer with so many rows, the rows that each rank holds."""
    if isinstance(role, KeyValue):
        return [cut.shared(rows, ranks, units=role.kv_heads, heads=role.heads)]
    if not role.heads:
        return [cut.even(rows, ranks, what="output features")]
    if rows % sum(role.heads):
        raise ValueError(f"{rows} rows are not {' + '.join(map(str, role.heads))} heads of equal size")
    size, first, pieces = rows // sum(role.heads), 0, []
    for heads in role.heads:
        # IDEA: each matrix in a fused one is cut by itself: a rank's queries keep their own keys and values.
        piece = cut.even(heads * size, ranks, units=heads, what="heads")
        pieces.append([range(first + rows.start, first + rows.stop) for rows in piece])
        first += heads * size
    return pieces


@dataclass
class _Work:
    """The plan being carried out, module by module."""

    module: nn.Module
    group: dist.ProcessGroup
    settings: Mapping[str, bool]
    regions: dict[tuple[str, ...], Region] = field(default_factory=dict)  # begun by columns, by the place of the stars

    def apply(self, name: str, place: tuple[str, ...], role: Role) -> None:
        part = self.module.get_submodule(name)
        match role:
            case Column():
                pieces = pieces_of(role, part.out_features, self.group.size())
                new = ColumnParallelLinear(part, self._region(place), pieces=pieces, gather_output=role.gather_output)
            case KeyValue():
                pieces = pieces_of(role, part.out_features, self.group.size())
                new = ColumnParallelLinear(part, self._region(place), pieces=pieces)
                if self.group.size() > role.kv_heads:
                    for param in new.parameters():
                        param.held.sums["kv"] = role.group
            case Row():
                region = self._region(place)
                del self.regions[place]
                new = RowParallelLinear(part, region, input_is_cut=role.input_is_cut)
            case Vocabulary() if isinstance(part, nn.Embedding):
                new = VocabParallelEmbedding(part, Region(self.group, **self.settings))
            case Vocabulary():
                region = Region(self.group, **self.settings)
                rows = cut.nearly_even(part.out_features, self.group.size())
                new = ColumnParallelLinear(part, region, pieces=[rows], gather_output=role.gather_output)
            case Stream() | Heads() | Whole():
                if isinstance(role, Heads) or (isinstance(role, Stream) and self.settings["sequence_parallel"]):
                    for param in part.parameters():
                        param.held.sums["tp"] = self.group
                return
        parent, _, child = name.rpartition(".")
        setattr(self.module.get_submodule(parent), child, new)

    def _region(self, place: tuple[str, ...]) -> Region:
        if place not in self.regions:
            self.regions[place] = Region(self.group, **self.settings)
        return self.regions[place]
