"""A plan says which module has which role, by name: read and checked here, carried out in parallelize.py.

    {"embed": Vocabulary(), "blocks.*.norm": Stream(), "blocks.*.up": Column(), "blocks.*.down": Row()}

A role says how parameters are cut, and of what their gradients are sums. Every parameter must have one: a norm that is
forgotten would train on a part of its gradient, and nothing would say so. Whatever can be wrong with a plan is found
before anything is changed, by every rank for itself.

PyTorch's counterpart: the plan of parallelize_module, which leaves alone what it does not name.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch.distributed as dist
from torch import nn

from collectives.layout import Box
from collectives.lookup import Embedding
from tensor_parallel import cut
from tensor_parallel.embedding import check_settings

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
Pieces = Sequence[Sequence[range]]  # of each matrix in a parameter what each rank holds


@dataclass(frozen=True)
class Role:
    """What a module is to tensor parallelism. kinds: of which classes it can be, none: any."""

    kinds: ClassVar[tuple[type, ...]] = ()

    def cut(self, part: nn.Module, ranks: int) -> tuple[int, Pieces] | None:
        """The dim of the weight that is cut, and who holds what; None where it stays whole. Raises ValueError."""


@dataclass(frozen=True)
class Column(Role):
    """A linear layer whose outputs are cut. heads: of how many units, which must stay together, each matrix in it
    consists: (8,) for queries, (8, 2, 2) for queries, keys and values in one, (F, F) for gate and up in one; (): one
    matrix of single rows. All units have equally many rows.
    """

    kinds = (nn.Linear,)
    heads: tuple[int, ...] = ()
    gather_output: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.heads, tuple) or not all(_positive(heads) for heads in self.heads):
            raise ValueError(f"Column(heads={self.heads!r}): give a number for each matrix in the layer, as (8,)")

    def cut(self, part: nn.Module, ranks: int) -> tuple[int, Pieces]:
        """Rows, matrix by matrix."""
        rows = part.out_features
        if not self.heads:
            return 0, [cut.even(rows, ranks, what="output features")]
        if rows % sum(self.heads):
            raise ValueError(f"{rows} rows are not {' + '.join(map(str, self.heads))} heads of equal size")
        size, first, pieces = rows // sum(self.heads), 0, []
        for heads in self.heads:
            # IDEA: each matrix in a fused one is cut by itself: a rank's queries keep their own keys and values.
            piece = cut.even(heads * size, ranks, units=heads, what="heads")
            pieces.append([range(first + rows.start, first + rows.stop) for rows in piece])
            first += heads * size
        return 0, pieces


@dataclass(frozen=True)
class KeyValue(Role):
    """The linear layer of keys or of values. Where tp is more than its heads, the ranks of `group` hold the same one
    (`cut.sharers` tells which), and their gradients are summed over it.
    """

    kinds = (nn.Linear,)
    kv_heads: int
    heads: int  # of the queries
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if not _positive(self.kv_heads) or not _positive(self.heads):
            raise ValueError(
                f"KeyValue(kv_heads={self.kv_heads!r}, heads={self.heads!r}): both must be positive numbers"
            )

    def cut(self, part: nn.Module, ranks: int) -> tuple[int, Pieces]:
        """Rows, the same ones on the ranks that share them."""
        return 0, [cut.shared(part.out_features, ranks, units=self.kv_heads, heads=self.heads)]

    def check_group(self, group: dist.ProcessGroup) -> None:
        """Raise ValueError where heads are shared, and not over `self.group`."""
        if group.size() <= self.kv_heads:
            return
        runs = cut.sharers(dist.get_process_group_ranks(group), self.kv_heads)
        [mine] = [run for run in runs if dist.get_rank() in run]
        if self.group is None or tuple(dist.get_process_group_ranks(self.group)) != mine:
            raise ValueError(
                f"tp={group.size()} is more than {self.kv_heads} key and value heads, of which ranks {list(mine)} hold "
                f"the same: give KeyValue their group, which all ranks make (cut.sharers)"
            )


@dataclass(frozen=True)
class Row(Role):
    """A linear layer whose inputs are cut: it ends the region of the columns before it."""

    kinds = (nn.Linear,)
    input_is_cut: bool = True

    def cut(self, part: nn.Module, ranks: int) -> tuple[int, Pieces]:
        """Columns."""
        return 1, [cut.even(part.in_features, ranks, what="input features")]


@dataclass(frozen=True)
class Vocabulary(Role):
    """An embedding, or the linear layer that makes logits, cut by tokens, evenly or not."""

    kinds = (nn.Linear, nn.Embedding, Embedding)
    gather_output: bool = False  # of logits

    def cut(self, part: nn.Module, ranks: int) -> tuple[int, Pieces]:
        """Rows, one for each token."""
        if isinstance(part, nn.Embedding):
            check_settings(part)
        return 0, [cut.nearly_even(len(part.weight), ranks, what="tokens of a vocabulary")]


@dataclass(frozen=True)
class Stream(Role):
    """A module on the residual stream (a norm, a router): copies; with sequence parallelism each saw some tokens."""


@dataclass(frozen=True)
class Heads(Role):
    """A module that each rank applies to its own heads (a norm of queries): copies, each of which saw some heads."""


@dataclass(frozen=True)
class Whole(Role):
    """A module to which every rank gives all of the same: copies with the whole gradient."""


class Placed(NamedTuple):
    """A module with its role. place: what the stars of its pattern stood for, the same for all of a layer. cut: how its
    role cuts it.
    """

    name: str
    part: nn.Module
    role: Role
    place: tuple[str, ...]
    cut: tuple[int, Pieces] | None = None


def read(module: nn.Module, plan: Mapping[str, Role], group: dist.ProcessGroup) -> list[Placed]:
    """The modules that a plan names, in its order. Raises ValueError for whatever `parallelize` refuses."""
    if group is None:
        raise ValueError("this rank is no member of the group; let only members call it")
    matched = list(_matched(module, plan))
    _check_all_covered(module, matched)
    placed = []
    for each in matched:
        try:
            placed.append(each._replace(cut=_checked(each.part, each.role, group)))
        except ValueError as error:
            raise ValueError(f"{each.name}: {error}") from error
    _check_shared(placed)
    return placed


def _matched(module: nn.Module, plan: Mapping[str, Role]) -> Iterator[Placed]:
    parts = {name: part for name, part in module.named_modules(remove_duplicate=False) if name}
    roles: dict[nn.Module, tuple[str, Role, str]] = {}
    for pattern, role in plan.items():
        if not isinstance(role, Role) or type(role) is Role:
            raise ValueError(f"{pattern}: {role!r} is no role: give one of plan.py, made, as Row()")
        found = [(name, place) for name in parts if (place := _stars(pattern, name)) is not None]
        if not found:
            near = difflib.get_close_matches(pattern, parts, n=1, cutoff=0.0)
            nearest = f": did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"the plan names {pattern!r}, which the module does not have{nearest}")
        for name, place in found:
            other, before, by = roles.setdefault(parts[name], (name, role, pattern))
            if (other, by) == (name, pattern):
                yield Placed(name, parts[name], role, place)
            elif other == name or before != role:  # the same module may have other names
                raise ValueError(f"{name} has two roles, {before} by {by!r} and {role} by {pattern!r}: give it one")


def _positive(number: object) -> bool:
    return isinstance(number, int) and number > 0


def _stars(pattern: str, name: str) -> tuple[str, ...] | None:
    wanted, parts = pattern.split("."), name.split(".")
    if len(wanted) != len(parts) or any(a not in ("*", b) for a, b in zip(wanted, parts, strict=True)):
        return None
    return tuple(part for star, part in zip(wanted, parts, strict=True) if star == "*")


def _check_all_covered(module: nn.Module, placed: Sequence[Placed]) -> None:
    names = {part: name for name, part in module.named_modules()}
    owners: dict[nn.Module, str] = {}
    for name, part, *_ in placed:
        for inner in part.modules():
            if inner in owners:
                raise ValueError(f"{names[inner]} has two roles, those of {owners[inner]} and of {name}: give it one")
            owners[inner] = name
    for part, name in names.items():
        if _drops(part):
            raise ValueError(
                f"{name} is {type(part).__name__}: it draws by the generator of its rank, so copies would get other "
                f"masks; use collectives.rng.dropout, which draws by index"
            )
        own = [f"{name}.{param}".lstrip(".") for param, _ in part.named_parameters(recurse=False)]
        if own and part not in owners:
            raise ValueError(f"{own[0]} has no role: name its module in the plan; Stream() or Whole() leave it whole")


def _check_shared(placed: Sequence[Placed]) -> None:
    """A parameter that several modules have is one, however they treat it."""
    known: dict[nn.Parameter, tuple[str, object]] = {}
    for name, part, role, _, pieces in placed:
        for own, param in part.named_parameters():
            treated = pieces or type(role)
            other, before = known.setdefault(param, (f"{name}.{own}", treated))
            if before != treated:
                raise ValueError(
                    f"{name}.{own} is {other} too, which is cut otherwise: give both modules the same role"
                )


def _drops(part: nn.Module) -> bool:
    """Whether it is a module of torch's that drops elements."""
    if isinstance(part, nn.modules.dropout._DropoutNd):
        return part.p > 0
    return isinstance(part, nn.MultiheadAttention | nn.RNNBase) and part.dropout > 0


def _checked(part: nn.Module, role: Role, group: dist.ProcessGroup) -> tuple[int, Pieces] | None:
    """How a module is cut."""
    kind = type(role).__name__
    if role.kinds and type(part) not in role.kinds:  # a subclass has a forward of its own
        raise ValueError(f"a {type(part).__name__} cannot have the role {kind}")
    if role.kinds:
        _check_replaceable(part, kind)
    pieces = role.cut(part, group.size())
    if isinstance(role, KeyValue):
        role.check_group(group)
    return pieces


def _check_replaceable(part: nn.Module, kind: str) -> None:
    """Raise ValueError for what would be lost with a module, or would not be cut with its parameters."""
    if any(getattr(part, hooks) for hooks in HOOKS):
        raise ValueError(f"it has hooks, which would be lost, since {kind} replaces it: register them afterwards")
    if "forward" in vars(part):
        raise ValueError(f"it has a forward of its own, which would be lost, since {kind} replaces it")
    for name, param in part.named_parameters():
        held = getattr(param, "held", None)
        if held is not None and held.boxes != (Box.whole(held.boxes[0].shape),):
            raise ValueError(
                f"its {name} has been cut before; tensor parallelism comes before what cuts flat or in shards"
            )
        if param.grad is not None:
            raise ValueError(f"its {name} has a gradient, of its whole shape: zero_grad(set_to_none=True) comes first")
