"""Chains of small stages, for what a stage may do: run by ranks, and by one process, microbatch after microbatch."""

import torch

from pipeline import Microbatch, Pipeline, connect, schedule
from tests.training import furthest


def total(output, target):
    """A loss: a fixed random cotangent, of the microbatch that the target tells."""
    output = output[0] if isinstance(output, tuple | list) else output
    numbers = torch.Generator().manual_seed(int(target))
    return (output.double() * torch.randn(output.shape, generator=numbers, dtype=torch.float64)).sum()


def pipeline(run, plan, make, **settings):
    """A rank's pipeline of make(stages), a list of all stages."""
    modules = made(make, plan.length)
    stages = {stage: modules[stage % plan.length] for stage in plan.stages_of(run.rank)}
    links = connect(plan, [range(run.size)], run.new_group)
    return Pipeline(plan, stages, links, run.world, **{"loss": total} | settings)


def made(make, stages):
    torch.manual_seed(0)
    return [module.double() for module in make(stages)]


def given(inputs):
    return [Microbatch(x if isinstance(x, tuple) else (x,), {}, m) for m, x in enumerate(inputs)]


def run_chain(run, way, make, steps, settings):
    """Of each step (losses, {(stage, parameter): gradient}) on this rank. steps: of each its microbatches' inputs."""
    name, virtual = way
    plan = schedule(name, run.size, len(steps[0]), virtual)
    pipe, found = pipeline(run, plan, make, **settings), []
    for inputs in steps:
        for stage in pipe.stages.values():
            stage.zero_grad()
        losses = pipe.step(given(inputs))
        named = {(s, n): p for s, stage in pipe.stages.items() for n, p in stage.named_parameters()}
        found.append((losses, {key: p.grad for key, p in named.items()}))
    return found


def check_chain(pool, ranks, way, make, steps, **settings):
    """The ranks' losses and gradients are those of one process. way: a schedule, and stages a rank. Where no later
    stage uses a weight, its gradient may be zero instead of None.
    """
    results = pool.run(ranks, run_chain, way, make, steps, settings, timeout=60)
    modules = made(make, ranks * way[1])
    for step, inputs in enumerate(steps):
        for module in modules:
            module.zero_grad()
        losses = [_alone(modules, microbatch) for microbatch in given(inputs)]
        found = [loss for of_rank in results for loss in of_rank[step][0]]
        assert all(furthest(a, b) <= 1e-12 * (1 + abs(float(b))) for a, b in zip(found, losses, strict=True))
        grads = {key: grad for of_rank in results for key, grad in of_rank[step][1].items()}
        assert len(grads) == sum(len(list(module.parameters())) for module in modules)
        for (stage, n), grad in grads.items():
            expected = modules[stage].get_parameter(n).grad
            if expected is None:
                assert grad is None or not grad.any(), (stage, n)
            else:
                assert furthest(grad, expected) <= 1e-12 * float(expected.abs().max()), (stage, n)


def _alone(modules, microbatch):
    args = microbatch.args
    for module in modules:
        args = module(*args)
        args = args if isinstance(args, tuple | list) else (args,)
    loss = total(args[0], microbatch.target)
    loss.backward()
    return loss.detach()
