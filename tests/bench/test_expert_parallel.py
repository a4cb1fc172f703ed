"""A mixture of experts beside a dense layer: that each computes what it should, and that all have equal work."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from collectives import comm
from expert_parallel import bench
from tests.bench import ranks

SIZES = (1, 2, 4)
BALANCE = 0.01  # the layer's coefficient, if nobody sets another


@pytest.mark.benchmark(timer=ranks.clock)
@pytest.mark.parametrize("routing", bench.ROUTINGS)
@pytest.mark.parametrize("experts", bench.SIZES)
@pytest.mark.parametrize("size", SIZES)
def test_layer(pool, benchmark, size, experts, routing):
    ranks.record(
        benchmark, pool, size, bench.layer, bench.SMALL if benchmark.disabled else bench.SIZES[experts], routing
    )


@pytest.mark.benchmark(timer=ranks.clock)
@pytest.mark.parametrize(("size", "dtype"), bench.ALONE)
def test_experts_alone(pool, benchmark, size, dtype):
    ranks.record(benchmark, pool, 1, bench.products, bench.SMALL if benchmark.disabled else size, dtype, rounds=5)


def swiglu(x, gate, up, down):
    hidden = x @ gate.mT
    return hidden * hidden.sigmoid() * (x @ up.mT) @ down.mT


def mixture(x, router, *experts, choices=bench.SMALL.choices):
    """Every expert computes every token. The output, and the balance loss from its definition. x [B, T, D]."""
    shares = (x @ router.T).softmax(-1)  # [B, T, E]
    chosen = shares >= shares.topk(choices).values[..., -1:]
    weights = shares * chosen / (shares * chosen).sum(-1, keepdim=True)
    y = (swiglu(x.unsqueeze(1), *experts) * weights.movedim(-1, 1).unsqueeze(-1)).sum(1)
    f = chosen.double().mean(1) * len(router) / choices
    return y, BALANCE * (f * shares.mean(1)).sum(1).mean()


def expected(part, definition, params):
    """Output and gradients of a part in float64, by a definition that returns an output and a loss."""
    x, *params = (each.detach().double().requires_grad_() for each in (part.x, *params))
    y, loss = definition(x, *params)
    return [y.detach(), *torch.autograd.grad((y * part.dout).sum() + loss, (x, *params))]


def furthest(made, right):
    """Of all, relative to the largest entry of each."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(made, right, strict=True))


def deviations(part, definition):
    """How far it is from the definition, and from that of tokens in another order."""
    others = part.x.detach().roll(1, -2)
    return [furthest(part(), expected(part._replace(x=x), definition, part.params)) for x in (part.x, others)]


def ours_shared(run, routing):
    """The same of the experts that all ranks share."""
    part = bench.ours(run, bench.SMALL, bench.choices(bench.SMALL, routing, run.size)[run.rank])
    params = list(bench.mixture(run, bench.SMALL).parameters())
    made = together(run, part(), held=run.size)
    others = part._replace(x=part.x.detach().roll(1, -2))
    return [furthest(made, together(run, expected(each, mixture, params), held=1)) for each in (part, others)]


def together(run, made, held):
    """Outputs and gradients of inputs of all ranks side by side, the router's added up, the experts' too, or, if each
    rank holds a part of them, side by side.
    """
    y, dx, router, *experts = zip(*comm.all_gather_object(made, group=run.world), strict=True)
    return [torch.cat(y), torch.cat(dx), sum(router), *map(torch.cat if held > 1 else sum, experts)]


@pytest.mark.parametrize("routing", bench.ROUTINGS)
@pytest.mark.parametrize("size", SIZES)
def test_ours_computes_the_mixture(pool, size, routing):
    for right, wrong in pool.run(size, ours_shared, routing):
        assert right < 1e-5
        assert wrong > 0.1


def a_pth(run):
    return deviations(bench.alone(run, bench.SMALL), mixture)


@pytest.mark.parametrize("size", [2, 4])
def test_a_pth_computes_a_mixture(pool, size):
    for right, wrong in pool.run(size, a_pth):
        assert right < 1e-5
        assert wrong > 0.1


def one_dense(run):
    return deviations(bench.dense(run, bench.SMALL), lambda *tensors: (swiglu(*tensors), 0))


def test_dense_computes_a_swiglu(pool):
    [(right, wrong)] = pool.run(1, one_dense)
    assert right < 1e-5
    assert wrong > 0.1


def experts_alone(run, routing, dtype):
    """Of the loop, and of grouped matmul."""
    [experts] = bench.choices(bench.SMALL, routing, 1)
    counts = torch.bincount(experts.flatten(), minlength=bench.SMALL.experts).tolist()

    def definition(x, *params):
        return torch.cat([swiglu(*each) for each in zip(x.split(counts), *params, strict=True)]), 0

    ways = [bench.only_experts(run, bench.SMALL, experts, way, dtype) for way in (bench.loop, bench.grouped)]
    return [deviations(part, definition) for part in ways]


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("routing", bench.ROUTINGS)
def test_loop_and_grouped_matmul_compute_the_experts(pool, routing, dtype, close):
    for right, wrong in pool.run(1, experts_alone, routing, dtype)[0]:
        assert right < close
        assert wrong > 0.1


def multiplications(run, routing):
    """Of ours, of a P-th, and of the dense layer; of a forward and backward, without the router's and combine's."""
    size = bench.SMALL
    ours = bench.ours(run, size, bench.choices(size, routing, run.size)[run.rank])
    return [
        flops(ours, size.experts),
        flops(bench.alone(run, size), size.experts // run.size),
        flops(bench.dense(run, size)),
    ]


def flops(part, routed=0):
    with Products() as products:
        part()
    return products.flops - 3 * 2 * bench.SMALL.tokens * bench.SMALL.width * routed


class Products(TorchDispatchMode):
    """Counts as torch's own counter does, which takes no autograd.grad; but for combine, which is a bmm."""

    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry and func.overloadpacket is not torch.ops.aten.bmm:
            self.flops += flop_registry[func.overloadpacket](*args, out_val=out)
        return out


@pytest.mark.parametrize("routing", bench.ROUTINGS)
@pytest.mark.parametrize("size", SIZES)
def test_all_have_equal_work(pool, size, routing):
    """Of a skewed routing only all ranks together."""
    ours, alone, dense = map(list, zip(*pool.run(size, multiplications, routing), strict=True))
    assert sum(ours) == sum(dense)
    assert alone == dense
    assert (ours == dense) == (routing == "balanced" or size == 1)


@pytest.mark.parametrize("routing", bench.ROUTINGS)
@pytest.mark.parametrize("size", bench.SIZES.values(), ids=bench.SIZES)
def test_choices(size, routing):
    """No token has an expert twice; of balanced ones every rank's loads are even."""
    everyones = bench.choices(size, routing, 2)
    assert (everyones.sort(-1).values.diff() > 0).all()
    for experts in everyones:
        loads = torch.bincount(experts.flatten(), minlength=size.experts)
        assert (loads.min() == loads.max()) == (routing == "balanced")
    assert (bench.busiest(everyones, size, 2) > 1.25) == (routing == "skewed")
