"""A mixture of experts, forward and backward, beside a dense layer of equal work: time, bytes, peak memory.

    python -m expert_parallel.bench                        1, 2 and 4 ranks
    python -m expert_parallel.bench --ranks 2 --repeat 5   five whole runs, and the median of their ratios

A rank has 4 rows of 256 tokens of its own, D = 256, float32. A token goes to 2 of 8 experts with F = 512, few and
large, or to 8 of 64 with F = 128, many and small. In both it is multiplied as often as in a dense SwiGLU with
F = 1,024, which stands beside ours. "A P-th, nothing sent" is a layer of a P-th of the experts on each rank, to whom
its own tokens go, evenly: what is left of ours if nothing travels and no rank has more than its share. "Experts alone"
is the floor on one rank: torch's grouped matmul, of rows that are in the order of the experts already.

Balanced: of each rank's tokens every expert gets equally many. Skewed: expert i is sought in proportion to 1/(i + 1).
And the experts alone, balanced, on one rank: our loop beside torch's grouped matmul, in float32, and in bfloat16 with
rows of 32 tokens, since a CPU without such arithmetic takes long.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from collectives import comparison
from collectives.runtime import Runtime
from collectives.turns import Case
from expert_parallel import Experts, MoE
from nd_mesh.model import SwiGLU

ROWS = 4
ROUTINGS = ("balanced", "skewed")


M = TypeVar("M", bound=nn.Module)


class Size(NamedTuple):
    """k of E experts with F, and rows of T tokens with D numbers each."""

    experts: int
    choices: int
    hidden: int
    width: int = 256
    length: int = 256

    @property
    def tokens(self) -> int:
        """Of a rank: B·T."""
        return ROWS * self.length


SIZES: Mapping[str, Size] = MappingProxyType({"few large": Size(8, 2, 512), "many small": Size(64, 8, 128)})
ALONE = tuple(
    (size._replace(length=length), dtype)
    for size in SIZES.values()
    for dtype, length in ((torch.float32, 256), (torch.bfloat16, 32))
)
SMALL = Size(8, 2, 32, width=16, length=8)


class Part(NamedTuple):
    """A layer, and what a rank gives to it. A call is forward and backward."""

    layer: Callable[[Tensor], Tensor]
    params: Sequence[nn.Parameter]
    x: Tensor
    dout: Tensor

    def __call__(self) -> tuple[Tensor, ...]:
        """The output, the gradient of the input, and those of the parameters."""
        out = self.layer(self.x)
        return out.detach(), *torch.autograd.grad(out, (self.x, *self.params), self.dout)


def part(module: nn.Module, x: Tensor, layer: Callable[[Tensor], Tensor] | None = None) -> Part:
    """Of a module and its tokens x; `layer` is what is called, if it is not the module."""
    dout = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x)
    return Part(layer or module, list(module.parameters()), x.requires_grad_(), dout)


def choices(size: Size, routing: str, ranks: int) -> Tensor:
    """The experts [P, B·T, k] to which the tokens of all ranks go."""
    generator = torch.Generator().manual_seed(0)
    if routing == "balanced":
        even = torch.arange(size.tokens * size.choices).view(size.tokens, -1) % size.experts
        return torch.stack([even[torch.randperm(size.tokens, generator=generator)] for _ in range(ranks)])
    sought = 1 / torch.arange(1, size.experts + 1)
    everyones = torch.multinomial(sought.expand(ranks * size.tokens, -1), size.choices, generator=generator)
    return everyones.view(ranks, size.tokens, -1)


def tokens(run: Runtime, size: Size, experts: Tensor) -> Tensor:
    """x [B, T, D] of this rank. The first E numbers of a token are its logits, largest where it is to go [B·T, k]."""
    generator = torch.Generator().manual_seed(run.rank)
    x = torch.randn(size.tokens, size.width, generator=generator)
    x[:, : size.experts] = torch.rand(size.tokens, size.experts, generator=generator)
    return x.scatter_add(1, experts, torch.ones(experts.shape)).view(ROWS, size.length, -1).to(run.device)


def filled(run: Runtime, module: M) -> M:
    """The same values on every rank."""
    generator = torch.Generator().manual_seed(0)
    for param in module.parameters():
        nn.init.normal_(param, std=param.size(-1) ** -0.5, generator=generator)
    return module.to(run.device)


def mixture(run: Runtime, size: Size) -> MoE:
    """The layer on one rank; its router takes the first E numbers of a token for the logits."""
    layer = filled(run, MoE(size.width, size.hidden, size.experts, choices=size.choices))
    nn.init.eye_(layer.router.weight)
    return layer


def ours(run: Runtime, size: Size, experts: Tensor) -> Part:
    """The experts shared by all ranks."""
    layer = mixture(run, size)
    layer.distribute(run.world)
    return part(layer, tokens(run, size, experts))


def alone(run: Runtime, size: Size) -> Part:
    """A P-th of the experts for this rank's tokens."""
    share = size._replace(experts=size.experts // run.size)
    layer = mixture(run, share)
    return part(layer, tokens(run, share, choices(share, "balanced", 1)[0]))


def dense(run: Runtime, size: Size) -> Part:
    """One network, as large as a token's experts together."""
    layer = filled(run, SwiGLU(size.width, size.choices * size.hidden))
    return part(layer, tokens(run, size, choices(size, "balanced", 1)[0]))


def only_experts(
    run: Runtime, size: Size, experts: Tensor, way: Callable[..., Tensor], dtype: torch.dtype = torch.float32
) -> Part:
    """All experts, and the rows [B·T·k, D] that go to them, in their order."""
    module = filled(run, Experts(size.width, size.hidden, size.experts)).to(dtype)
    counts = torch.bincount(experts.flatten(), minlength=size.experts).tolist()
    rows = torch.randn(experts.numel(), size.width, generator=torch.Generator().manual_seed(run.rank))
    return part(module, rows.to(run.device, dtype), partial(way, module, counts=counts))


def loop(module: Experts, x: Tensor, counts: Sequence[int]) -> Tensor:
    """experts.py."""
    return module(x, counts)


def grouped(module: Experts, x: Tensor, counts: Sequence[int]) -> Tensor:
    """One call of torch's for each matrix of all experts."""
    ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=x.device)

    def product(rows: Tensor, matrices: Tensor) -> Tensor:
        return F.grouped_mm(rows, matrices.mT, offs=ends)

    return product(F.silu(product(x, module.gate)) * product(x, module.up), module.down)


def busiest(experts: Tensor, size: Size, parts: int) -> float:
    """Of so many equal parts of the experts the largest load, over the mean."""
    loads = torch.bincount(experts.flatten(), minlength=size.experts).view(parts, -1).sum(1)
    return (loads.max() / loads.double().mean()).item()


def layer(run: Runtime, size: Size, routing: str) -> Case:
    """The whole layer."""
    everyones = choices(size, routing, run.size)
    experts = everyones[run.rank]
    calls = {"expert_parallel": ours(run, size, experts), "dense, equal work": dense(run, size)}
    if run.size == 1:
        calls["experts alone, grouped matmul"] = only_experts(run, size, experts, grouped)
    else:
        calls["a P-th, nothing sent"] = alone(run, size)
    most = ", ".join(
        f"{kind} {busiest(everyones, size, parts):.2f}"
        for kind, parts in (("expert", size.experts), ("rank", run.size))
    )
    return Case(
        f"{size.choices} of {size.experts} experts, F = {size.hidden}, {routing} (busiest {most} of the mean)", calls
    )


def products(run: Runtime, size: Size, dtype: torch.dtype) -> Case:
    """The experts alone."""
    [experts] = choices(size, "balanced", 1)
    calls = {"the loop": loop, "grouped matmul": grouped}
    made = {who: only_experts(run, size, experts, way, dtype) for who, way in calls.items()}
    kind = str(dtype).removeprefix("torch.")
    return Case(f"{size.experts} experts alone, F = {size.hidden}, {kind}, {experts.numel()} rows", made)


def cases(run: Runtime) -> list[Case]:
    """What is measured on this many ranks."""
    torch.set_num_threads(1)  # on one rank too, whose times are compared with those on more
    whole = [layer(run, size, routing) for size in SIZES.values() for routing in ROUTINGS]
    return whole if run.size > 1 else [*whole, *(products(run, *each) for each in ALONE)]


if __name__ == "__main__":
    sys.exit(comparison.main(cases, ranks=(1, 2, 4)))
