"""Stages of every kind for the two halves of backward, each with the inputs that it takes."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from nd_mesh.recompute import recompute

D = 6


class Case(NamedTuple):
    """A stage, and what it is given."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], list[Tensor]]


class Of(nn.Module):
    """A stage of some modules by name and a function of them and of the inputs."""

    def __init__(self, run: Callable, **parts: nn.Module | Tensor):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part if isinstance(part, nn.Module) else nn.Parameter(part))

    def forward(self, *inputs: Tensor):
        return self.run(self, *inputs)


class Scaled(torch.autograd.Function):
    """x·w, by hand."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).sum(0)


class Detached(torch.autograd.Function):
    """x·w, and nothing goes back to w."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        return x * w

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


class Stopped(torch.autograd.Function):
    """x·w, and nothing goes back to x."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        return x * w

    @staticmethod
    def backward(ctx, grad):
        return None, (grad * ctx.saved_tensors[0]).sum(0)


def linear(out: int = D, bias: bool = True) -> nn.Linear:
    return nn.Linear(D, out, bias=bias)


def x(rows: int = 5) -> list[Tensor]:
    return [torch.randn(rows, D)]


def sequence() -> list[Tensor]:
    return [torch.randn(2, 4, D)]


def attention(m: Of, h: Tensor) -> Tensor:
    q, k, v = (part.unflatten(-1, (2, 3)).transpose(1, 2) for part in m.qkv(h).chunk(3, -1))
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return h + m.out(mixed.transpose(1, 2).flatten(2))


def cached(m: Of, h: Tensor) -> Tensor:
    with parametrize.cached():
        return m.a(torch.tanh(m.a(h)))


def transposed_once(m: Of, h: Tensor) -> Tensor:
    w = m.w.T
    return torch.tanh(h @ w) @ w


def one_output_twice(m: Of, h: Tensor) -> tuple[Tensor, ...]:
    return 2 * (m.a(h),)


def one_behind_the_other(m: Of, h: Tensor) -> tuple[Tensor, ...]:
    y = m.a(h)
    return y, m.b(torch.tanh(y))


def grown(h: Tensor) -> Tensor:
    """There are 2^40 ways through this."""
    for _ in range(40):
        h = h + 0.01 * h.sin()
    return h


def in_place(m: Of, h: Tensor) -> Tensor:
    h = m.a(h)
    h.add_(m.bias)
    h[:, :2].mul_(2)
    return m.b(h.relu_()).tanh_()


def recomputed(**parts: nn.Module) -> nn.Module:
    stage = nn.Sequential(*(nn.Sequential(part, nn.GELU(), linear()) for part in parts.values()))
    recompute(list(stage))
    return stage


CASES = {
    "linear": Case(linear, x),
    "mlp": Case(lambda: nn.Sequential(linear(9), nn.GELU(), nn.Linear(9, D, bias=False), nn.Tanh()), x),
    "residual": Case(
        lambda: Of(lambda m, h: h + m.b(torch.relu(m.a(m.n(h)))), n=nn.RMSNorm(D), a=linear(), b=linear()), x
    ),
    "norms": Case(lambda: nn.Sequential(nn.LayerNorm(D), linear(), nn.RMSNorm(D), nn.Tanh(), nn.RMSNorm(D)), x),
    "batch norm": Case(lambda: nn.Sequential(nn.BatchNorm1d(D), linear(), nn.BatchNorm1d(D)), x),
    "attention": Case(lambda: Of(attention, qkv=linear(3 * D), out=linear()), sequence),
    "torch's attention": Case(
        lambda: nn.TransformerEncoderLayer(D, 2, dim_feedforward=8, dropout=0.0, batch_first=True), sequence
    ),
    "convolution": Case(lambda: nn.Sequential(nn.Conv1d(4, 3, 3), nn.ReLU(), nn.ConvTranspose1d(3, 2, 3)), sequence),
    "gru": Case(lambda: Of(lambda m, h: m.gru(h)[0], gru=nn.GRU(D, 5, 2, batch_first=True)), sequence),
    "lstm with states": Case(
        lambda: Of(lambda m, h, c: m.out(m.lstm(h, (c, c))[0]), lstm=nn.LSTM(D, 5), out=nn.Linear(5, 2)),
        lambda: [torch.randn(4, 3, D), torch.randn(1, 3, 5)],
    ),
    "same in series": Case(lambda: Of(lambda m, h: m.a(torch.tanh(m.a(h))), a=linear()), x),
    "same three times": Case(lambda: Of(lambda m, h: m.a(torch.tanh(m.a(torch.tanh(m.a(h))))), a=linear()), x),
    "same in parallel": Case(lambda: Of(lambda m, h: m.a(h.sin()) * m.a(h.cos()), a=linear()), x),
    "same with others between": Case(
        lambda: Of(lambda m, h: m.a(m.b(torch.tanh(m.a(h)))) + m.b(h), a=linear(), b=linear()), x
    ),
    "transposed": Case(lambda: Of(lambda m, h: torch.tanh(h @ m.w) @ m.w.T, w=torch.randn(D, D)), x),
    "one transposed view twice": Case(lambda: Of(transposed_once, w=torch.randn(D, D)), x),
    "pieces of one weight": Case(
        lambda: Of(lambda m, h: torch.tanh(h @ m.w[:D]) @ m.w[D:] + m.w[0], w=torch.randn(2 * D, D)), x
    ),
    "weight norm": Case(lambda: Of(lambda m, h: m.a(h), a=weight_norm(linear())), x),
    "weight norm twice": Case(lambda: Of(lambda m, h: m.a(torch.tanh(m.a(h))), a=weight_norm(linear())), x),
    "weight norm computed once, used twice": Case(lambda: Of(cached, a=weight_norm(linear())), x),
    "a weight made of two": Case(lambda: Of(lambda m, h: h @ (m.u @ m.v), u=torch.randn(D, 2), v=torch.randn(2, D)), x),
    "a weight made of the input": Case(lambda: Of(lambda m, h: h @ (m.w * h.mean()) + m.w[0], w=torch.randn(D, D)), x),
    "a weight that is a sum": Case(
        lambda: Of(lambda m, h: h @ (m.u + m.v), u=torch.randn(D, D), v=torch.randn(D, D)), x
    ),
    "added as it is": Case(lambda: Of(lambda m, h: h + m.u + m.v, u=torch.randn(5, D), v=torch.randn(5, D)), x),
    "added three times": Case(lambda: Of(lambda m, h: h + m.u + m.u + m.u, u=torch.randn(5, D)), x),
    "an output that is a sum": Case(lambda: Of(lambda m, h: (h * m.u, m.u.sum()), u=torch.randn(5, D)), x),
    "a transposed copy": Case(lambda: Of(lambda m, h: h @ m.w.T.contiguous(), w=torch.randn(4, D)), x),
    "a scalar": Case(lambda: Of(lambda m, h: h * m.s + m.s * m.s, s=torch.tensor(1.5)), x),
    "two inputs": Case(
        lambda: Of(lambda m, h, g: (m.a(h) * m.a(g), m.b(g)), a=linear(), b=linear()), lambda: x() + x()
    ),
    "an input that is not used": Case(lambda: Of(lambda m, h, g: m.a(h), a=linear()), lambda: x() + x()),
    "no input is used": Case(lambda: Of(lambda m, h: m.w.sin(), w=torch.randn(3)), x),
    "an output of weights alone": Case(lambda: Of(lambda m, h: (m.a(h), m.a.weight.exp().sum()), a=linear()), x),
    "an output that is a weight": Case(lambda: Of(lambda m, h: (m.a(h), m.a.weight), a=linear()), x),
    "an output that is an input": Case(lambda: Of(lambda m, h: (h, m.a(h)), a=linear()), x),
    "identity": Case(nn.Identity, x),
    "an output twice": Case(lambda: Of(one_output_twice, a=linear()), x),
    "an output on the way to another": Case(lambda: Of(one_behind_the_other, a=linear(), b=linear()), x),
    "views of one output": Case(lambda: Of(lambda m, h: m.a(h).unbind(1), a=linear(2)), x),
    "pieces of one output": Case(lambda: Of(lambda m, h: m.a(h).chunk(2, 1), a=linear()), x),
    "an output without gradient": Case(lambda: Of(lambda m, h: (m.a(h), h.argmax(1)), a=linear()), x),
    "ids beside": Case(
        lambda: Of(lambda m, h, ids: h * m.e(ids), e=nn.Embedding(7, D)), lambda: [*x(), torch.randint(7, (5,))]
    ),
    "in place": Case(lambda: Of(in_place, a=linear(), b=linear(), bias=torch.randn(D)), x),
    "a function by hand": Case(lambda: Of(lambda m, h: m.a(Scaled.apply(h, m.w)), a=linear(), w=torch.randn(D)), x),
    "a function by hand, twice": Case(
        lambda: Of(lambda m, h: Scaled.apply(Scaled.apply(h, m.w).sin(), m.w), w=torch.randn(D)), x
    ),
    "a function that gives its weight nothing": Case(
        lambda: Of(lambda m, h: m.a(Detached.apply(h, m.w)), a=linear(), w=torch.randn(D)), x
    ),
    "a function that gives its input nothing": Case(
        lambda: Of(lambda m, h: m.b(Stopped.apply(m.a(h), m.w)), a=linear(), b=linear(), w=torch.randn(D)), x
    ),
    "many ways": Case(lambda: Of(lambda m, h: (grown(h * m.w), grown(m.w)), w=torch.randn(D)), x),
    "recomputed": Case(lambda: recomputed(a=linear(), b=linear()), x),
    "recomputed, the same twice": Case(lambda: recomputed(**dict.fromkeys("ab", linear())), x),
    "no weights": Case(nn.Tanh, x),
    "no rows": Case(lambda: nn.Sequential(linear(), nn.GELU(), linear()), lambda: x(0)),
}
FROZEN = ("mlp", "same in series", "residual", "attention", "an output of weights alone", "pieces of one output")
