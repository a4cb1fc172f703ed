"""An optimizer's step, a piece at a time: any elementwise one, on shards, with state in other dtypes and places.

An elementwise optimizer cannot tell a piece of a tensor from a tensor. So it is given pieces: a slice of the masters,
of the gradients in the masters' dtype, and of its state; it steps them as its own parameters, and the result goes back.
What the step needs only for a moment, a gradient in float32, moments of bfloat16 in float32, a copy on the device of
what lies on the host, is then the size of a piece, not of the model.

Memory of a parameter with AdamW: 4 bytes master and 4 + 4 of moments; 4 + 2 + 2 with moments in bfloat16. Rajbhandari
et al. 2019, "ZeRO", 3.1 (K = 12); the pieces are those of ZeRO-Infinity, see offload.py. Lecture A, "ZeRO"
(docs/notation.md). PyTorch's counterpart: ZeroRedundancyOptimizer, which wraps a class instead and steps tensors whole.
Left out: stochastic rounding. To nearest, a bfloat16 number does not change by less than 1/512 of itself, so with
beta2 = 0.999 a second moment never decays; with 0.995 it does (DeepSeek-V3, whose moments are bfloat16, has 0.95).
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from collectives.elementwise import check_elementwise, is_elementwise, keep_settings, step_alone
from collectives.host import Pool
from zero.offload import Offload
from zero.pieces import Part, cut_pieces, stand_ins

UNTOUCHED = "Nothing has changed on any rank: weights, masters and state are those before the step"
MIDWAY = (
    "The step ended midway: the module still has its weights from before it, but masters and state may be partly new; "
    "load a checkpoint"
)


@dataclass(frozen=True)
class Staged:
    """A part where it will be computed, in the dtypes in which it is stored."""

    part: Part
    master: Tensor  # [n]
    grad: Tensor  # [n]
    state: dict[str, Any]


class PieceByPiece(torch.optim.Optimizer):
    """Steps an elementwise optimizer `inner`, piece by piece; bit for bit what `inner` alone would do, but for what
    `moments` rounds. Parameter groups, their settings and hooks are those of `inner`, whose schedulers work on either.

    inner: built on this rank's shards, flat tensors, some perhaps empty. piece: elements stepped at a time. moments:
    the dtype in which floating state with an element for each of the shard's is kept; it is computed in the shard's.
    pool: host memory, in which the state is kept. What lies there, state, shards, gradients, is staged on the pool's
    device, at most three pieces at a time; what does not is used where it lies. agree: called twice a step with
    a pool, before anything moves and at the end, with an empty text or this rank's error; it raises on all ranks if one
    has failed.

    `state[shard]` is {kind: flat tensor of the shard's size, or a number}. Raises ValueError if `inner` needs whole
    tensors (collectives/elementwise.py) or a shard is not flat.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        piece: int = 1 << 20,
        moments: torch.dtype | None = None,
        pool: Pool | None = None,
        agree: Callable[[str], None] = lambda error: None,
    ):
        if piece < 1:
            raise ValueError(f"a piece has at least 1 element, not {piece}")
        check_elementwise(inner)
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.piece, self.moments, self.pool, self.agree = inner, piece, moments, pool, agree
        self.offload = None if pool is None else Offload(pool)
        for name in [name for name in vars(inner) if name.startswith("_optimizer_") and name.endswith("_hooks")]:
            setattr(self, name, getattr(inner, name))  # once a step, not once a piece
            setattr(inner, name, OrderedDict())
        inner.param_groups = self.param_groups
        made, inner.state = inner.state, defaultdict(dict)
        for shard, kinds in made.items():  # Adagrad has its state from the beginning
            self._take_over(shard, kinds)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the parameters are flat, as shards are."""
        super().add_param_group(param_group)
        for shard in self.param_groups[-1]["params"]:
            if shard.dim() != 1 or not shard.is_contiguous():
                raise ValueError(
                    f"a shard is a flat tensor, not one of shape {tuple(shard.shape)}; give handle.parameters()"
                )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every shard that has a gradient; returns what `closure`, called first, returns.

        With a pool raises RuntimeError when host memory fails, saying what still holds: nothing is changed before
        every file has been looked at and all new state has its room, and the module's weights are not changed here.
        """
        loss = None if closure is None else _with_grad(closure)
        with torch.no_grad():
            if self.pool is None:
                for piece in self._pieces():
                    self._write(self._compute(self._read(piece)))
            else:
                self._step_in_agreement()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's: from the `state_dict()` of an optimizer of the same groups and shards. State is copied to where
        and in what dtype it is kept here. Raises ValueError for state of other sizes, before anything has changed.
        """
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        shards = dict(zip(saved, self._shards(), strict=False))  # torch's own compares the groups
        for number, kinds in state_dict["state"].items():
            _check_sizes(shards.get(number), kinds)
        super().load_state_dict({**state_dict, "state": {}})
        self.inner.param_groups = self.param_groups
        for number, kinds in state_dict["state"].items():
            self._take_over(shards[number], {kind: _like(shards[number], value) for kind, value in kinds.items()})

    def _shards(self) -> Iterator[nn.Parameter]:
        return (shard for group in self.param_groups for shard in group["params"])

    def _pieces(self) -> list[list[Part]]:
        """All shards that have a gradient, cut."""
        whole = [
            Part(shard, 0, shard.numel(), group, settings, dict(self.state.get(shard, {})))
            for group, settings in ((group, dict(group)) for group in self.param_groups)
            for shard in group["params"]
            if shard.grad is not None
        ]
        pieces = cut_pieces([part.stop for part in whole], self.piece)
        return [[replace(whole[which], start=start, stop=stop) for which, start, stop in piece] for piece in pieces]

    def _read(self, piece: list[Part]) -> list[Staged]:
        return [self._staged(part) for part in piece]

    def _staged(self, part: Part) -> Staged:
        state = {
            kind: self._stage(part.of(value)) if is_elementwise(value, part.shard) else value
            for kind, value in part.state.items()
        }
        return Staged(part, self._stage(part.of(part.shard)), self._stage(part.of(part.shard.grad)), state)

    def _stage(self, stored: Tensor) -> Tensor:
        return self.pool.stage(stored) if self.pool is not None and self.pool.holds(stored) else stored

    def _compute(self, staged: list[Staged]) -> list[tuple[Tensor, Tensor]]:
        """Step a piece. Returns what is to be written back, as (where it is kept, what it is now)."""
        parts = [piece.part for piece in staged]
        params = [_param(piece.master, piece.grad) for piece in staged]
        state = defaultdict(dict)
        for piece, param in zip(staged, params, strict=True):
            state[param] = {kind: self._working(value, param, piece.part) for kind, value in piece.state.items()}
        # IDEA: to the inner optimizer the slices are its parameters, and all of them.
        groups = stand_ins(parts, params)
        step_alone(self.inner, [alone for _, alone in groups], state)
        for group, alone in groups:
            keep_settings(group, alone)
        return [
            (kept, value)
            for part, param in zip(parts, params, strict=True)
            for kept, value in self._results(part, param, state[param])
            if kept.data_ptr() != value.data_ptr()  # or it was updated where it lies
        ]

    def _working(self, value: Any, param: nn.Parameter, part: Part) -> Any:
        """An entry of the state as the inner optimizer takes it, to change it at will."""
        if is_elementwise(value, param):
            return value.to(param.dtype) if self.moments and value.is_floating_point() else value
        if isinstance(value, Tensor):  # a count of steps: the next part of the shard starts from the same
            beside = part.settings.get("fused") or part.settings.get("capturable")
            return value.to(param.device if beside else value.device, copy=True)
        return value

    def _results(self, part: Part, param: nn.Parameter, state: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """(where it is kept, what it is now) for a part's master and state; numbers are kept at once."""
        yield part.of(part.shard), param.detach()
        for kind, value in state.items():
            if is_elementwise(value, param):
                yield part.of(self._storage(part.shard, kind, value)), value
            else:
                self.state[part.shard][kind] = value

    def _storage(self, shard: nn.Parameter, kind: str, like: Tensor) -> Tensor:
        """Where this kind of state of a whole shard is kept, from its first appearance on."""
        kinds = self.state[shard]
        if kinds.get(kind) is None:
            dtype = self.moments if self.moments and like.is_floating_point() else like.dtype
            if self.pool is None:
                kinds[kind] = torch.empty_like(shard, dtype=dtype, requires_grad=False)
            else:
                kinds[kind] = self.pool.empty(shard.numel(), dtype)
        return kinds[kind]

    def _write(self, results: list[tuple[Tensor, Tensor]]) -> None:
        for kept, value in results:
            rounded = value.to(kept.dtype)
            if self.pool is not None and self.pool.holds(kept):
                self.pool.write(kept, rounded)
            else:
                kept.copy_(rounded)

    def _take_over(self, shard: nn.Parameter, kinds: dict[str, Any]) -> None:
        """Copy state of a whole shard to where it is kept."""
        for kind, value in kinds.items():
            if is_elementwise(value, shard):
                self._write([(self._storage(shard, kind, value), value)])
            else:
                self.state[shard][kind] = value

    def _step_in_agreement(self) -> None:
        """Nothing moves on any rank before all have seen that nothing is in the way on theirs."""
        pieces = self._pieces()
        before = {part.shard: part.state for piece in pieces for part in piece}
        try:
            self._agreed(lambda: self._prepare(pieces), UNTOUCHED)
        except Exception:
            self.state.update(before)  # room that was reserved here is given back
            raise
        self._agreed(lambda: self.offload.run(pieces, self._read, self._computed, self._write), MIDWAY)

    def _agreed(self, work: Callable[[], None], what_holds: str) -> None:
        try:
            work()
        except Exception as error:
            told = f"{error}. {what_holds}"
            self.agree(told)
            raise RuntimeError(told) from error
        self.agree("")

    def _prepare(self, pieces: list[list[Part]]) -> None:
        self.pool.check()
        self._reserve([part for piece in pieces for part in piece if part.start == 0 and not part.state])

    def _computed(self, staged: list[Staged]) -> list[tuple[Tensor, Tensor]]:
        """A step of a piece, whose results count as staged: state as it is computed may be wider than as it is kept."""
        results = self._compute(staged)
        for _, value in results:
            if value not in self.pool.staged:
                self.pool.staged.add(value)
        return results

    def _reserve(self, parts: list[Part]) -> None:
        """Have room for all state that the first step of these shards will make; two zeros each show what it is."""
        zeros = [torch.zeros(2, dtype=part.shard.dtype, device=self.pool.device) for part in parts]
        params = [_param(zero, zero) for zero in zeros]
        state = defaultdict(dict)
        step_alone(self.inner, [alone for _, alone in stand_ins(parts, params)], state)
        for part, param in zip(parts, params, strict=True):
            for kind, value in state[param].items():
                if is_elementwise(value, param):
                    self._storage(part.shard, kind, value)


def _with_grad(closure: Callable[[], Any]) -> Any:
    with torch.enable_grad():
        return closure()


def _param(master: Tensor, grad: Tensor) -> nn.Parameter:
    param = nn.Parameter(master)
    param.grad = grad.to(master)  # in the master's dtype, where it is
    return param


def _like(shard: nn.Parameter, value: Any) -> Any:
    """An entry of saved state in the dtype in which it is computed: bfloat16 moments may be loaded as float32 ones."""
    return value.to(shard.dtype) if is_elementwise(value, shard) and value.is_floating_point() else value


def _check_sizes(shard: nn.Parameter | None, kinds: dict[str, Any]) -> None:
    for kind, value in kinds.items():
        if shard is not None and isinstance(value, Tensor) and value.dim() and value.shape != shard.shape:
            raise ValueError(
                f"state {kind!r} has {value.numel()} elements, for a shard of {shard.numel()}: it is another rank's or "
                f"of another number of ranks; load it through a checkpoint"
            )
