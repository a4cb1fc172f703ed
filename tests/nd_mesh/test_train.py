"""The trainer: what every mesh has in common, and what a step without a single valid token does."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from collectives import layout
from collectives.agreement import Stopped
from collectives.runtime import Runtime
from nd_mesh import metrics
from nd_mesh import train as module
from nd_mesh.config import Config, DataConfig, MeshConfig, ModelConfig, TrainConfig
from nd_mesh.metrics import Record
from nd_mesh.sample import generate
from nd_mesh.train import Trainer, learning_rate
from tests import parity
from tests.reference import loop
from tests.reference import rng as reference_rng
from tests.reference.model import forward as reference_forward

MODEL = ModelConfig(vocab=37, layers=2, width=16, heads=4, kv_heads=2, hidden=20, dropout=0.1)
TRAIN = TrainConfig(steps=8, batch=5, lr=0.01, warmup=2, dtype="float64", sample=5, prompt="\x01")
MESHES = [1, 2, 3, 4]


def config(dp: int, **train) -> Config:
    return Config(MeshConfig(dp=dp), MODEL, DataConfig(context=16), replace(TRAIN, **train))


def documents(lengths=(50, 3, 90, 1, 41)) -> list[np.ndarray]:
    numbers = np.random.default_rng(1)
    return [numbers.integers(0, 37, length).astype(np.uint8) for length in lengths]


HELD_OUT = (30, 2, 1, 77)


def trainer(run: Runtime, cfg: Config, texts: list[np.ndarray]) -> Trainer:
    held_out = parity.stream(documents(HELD_OUT), cfg.data.context)
    return Trainer(cfg, parity.stream(texts, cfg.data.context), held_out, run)


def weights(built: Trainer) -> dict[str, torch.Tensor]:
    return {param.held.name: param.detach().clone() for param in built.handle.parameters()}


def run_a_few(run: Runtime, cfg: Config) -> dict:
    """A rank's initial weights, records, evaluation and sample."""
    built = trainer(run, cfg, documents())
    initial = weights(built)
    records = [built.step(step) for step in range(3)]
    tokens = generate(built.model, [1, 2], 20, context=16, vocab=37, seed=0)
    return {
        "initial": initial,
        "records": records,
        "evaluation": built.evaluate(),
        "tokens": tokens,
        "after": weights(built),
    }


@pytest.fixture(scope="module")
def runs(pool):
    """The same training on 1, 2, 3 and 4 ranks: one dictionary a rank."""
    return [ran for dp in MESHES for ran in pool.run(dp, run_a_few, config(dp))]


def test_initial_weights_are_equal_bit_for_bit(runs):
    assert all(torch.equal(ran["initial"][name], value) for ran in runs for name, value in runs[0]["initial"].items())


def test_every_rank_reports_the_same(runs):
    """Loss, tokens, norm and rate of each step: the same numbers within a mesh, and to rounding between meshes."""
    first = 0
    for dp in MESHES:
        ranks = runs[first : first + dp]
        first += dp
        for step in range(3):
            seen = {
                (r.loss, r.tokens, r.grad_norm, r.lr, r.slowest, r.median)
                for r in (rank["records"][step] for rank in ranks)
            }
            assert len(seen) == 1
            ours, one = ranks[0]["records"][step], runs[0]["records"][step]
            assert (ours.tokens, ours.lr) == (one.tokens, one.lr)
            assert (
                abs(ours.loss - one.loss) <= 1e-13 * one.loss
                and abs(ours.grad_norm - one.grad_norm) <= 1e-12 * one.grad_norm
            )


def test_evaluation_is_the_reference_on_every_mesh(runs):
    for ran in runs:
        expected = loop.evaluate(ran["after"], documents(HELD_OUT), T=16, heads=4, kv_heads=2)
        assert abs(ran["evaluation"] - expected) <= 1e-13 * expected


def test_generation_is_the_same_on_every_mesh(runs):
    assert all(ran["tokens"] == runs[0]["tokens"] for ran in runs) and len(runs[0]["tokens"]) == 22


@pytest.mark.parametrize("tied", [False, True])
def test_initial_weights_are_the_rule(pool, tied):
    """The reference's normals, times the standard deviations typed here."""
    cfg = replace(config(1), model=replace(MODEL, tied=tied), train=replace(TRAIN, seed=5))
    initial = pool.run(1, initial_weights, cfg)[0]
    into_stream, width, hidden = 4, 16, 20  # two additions in each of two layers
    deviations = {"embed.weight": width**-0.5 if tied else 1.0, "head.weight": 1 / width}
    deviations |= {f"blocks.1.{name}.weight": width**-0.5 for name in ("q", "k", "v", "ffn.gate", "ffn.up")}
    deviations["blocks.1.o.weight"] = (into_stream * width) ** -0.5
    deviations["blocks.1.ffn.down.weight"] = (into_stream * hidden) ** -0.5
    for name, deviation in deviations.items():
        if name in initial:
            index = np.arange(initial[name].numel(), dtype=np.uint64)
            expected = torch.from_numpy(reference_rng.normal(reference_rng.key(5, name), index)) * deviation
            assert torch.allclose(initial[name].flatten(), expected, rtol=1e-14, atol=0)
    assert ("head.weight" in initial) != tied
    assert torch.equal(initial["norm.weight"], torch.ones(width, dtype=torch.float64))


def initial_weights(run: Runtime, cfg: Config) -> dict[str, torch.Tensor]:
    return weights(trainer(run, cfg, documents()))


def watched(run: Runtime, cfg: Config, watch: bool) -> list[Record]:
    """Three steps, with or without an evaluation after the first and a sample after the second."""
    built = trainer(run, cfg, documents())
    records = []
    for step in range(3):
        records.append(built.step(step))
        if watch and step == 0:
            built.evaluate()
        if watch and step == 1:
            generate(built.model, [1], 3, context=16, vocab=37, seed=0)
    return [replace(record, seconds=0, slowest=0, median=0) for record in records]


def test_watching_changes_nothing(pool):
    assert pool.run(2, watched, config(2), True) == pool.run(2, watched, config(2), False)


def most_likely(run: Runtime, length: int) -> tuple[dict[str, torch.Tensor], list[int]]:
    """A sample so cold that each token is the most likely one."""
    built = trainer(run, config(1), documents())
    with torch.no_grad():
        built.model.head.weight.normal_(generator=torch.Generator().manual_seed(0))  # the tokens vary
    return weights(built), generate(built.model, [1, 2], length, context=16, vocab=30, seed=0, temperature=1e-9)


def test_a_cold_sample_is_what_the_reference_finds_most_likely(pool):
    [(values, tokens)] = pool.run(1, most_likely, 25)
    for end in range(2, 27):
        window = torch.tensor([tokens[max(0, end - 16) : end]])
        slots = torch.arange(window.shape[1])[None]
        logits = reference_forward(values, window, torch.zeros_like(window), slots, heads=4, kv_heads=2)
        assert tokens[end] == int(logits[0, -1, :30].argmax())


def rows_of_a_forward(run: Runtime, cfg: Config) -> list[int]:
    built = trainer(run, cfg, documents())
    seen = []
    built.model.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    built.evaluate()
    return seen


def test_evaluation_takes_no_more_rows_at_a_time_than_training(pool):
    seen = pool.run(2, rows_of_a_forward, config(2, batch=4, microbatches=2))
    assert all(max(rows) == 1 for rows in seen) and len(seen[0]) == len(seen[1])


@pytest.mark.parametrize("warmup", [0, 3])
def test_learning_rate(warmup):
    ours = [learning_rate(replace(TRAIN, warmup=warmup, steps=13), step) for step in range(13)]
    assert ours == [loop.lr_at(step, TRAIN.lr, warmup, 13, TRAIN.min_lr) for step in range(13)]
    assert max(ours) == TRAIN.lr and ours[-1] < 0.2 * TRAIN.lr


def step_without_labels(run: Runtime, optimizer: str) -> None:
    """Every document is a single token: nothing may move, though AdamW would decay, and the loss is finite."""
    built = trainer(run, config(run.size, optimizer=optimizer), [np.array([7], dtype=np.uint8)] * 200)
    before = weights(built)
    record = built.step(0)
    assert (record.loss, record.tokens, record.grad_norm) == (0.0, 0, 0.0)
    assert all(torch.equal(before[name], value) for name, value in weights(built).items())
    assert not built.optimizer.state


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_step_without_labels(pool, optimizer):
    pool.run(2, step_without_labels, optimizer)


def step_that_overflows(run: Runtime) -> None:
    """A gradient that is not finite stops every rank with the same words, before anything moves."""
    built = trainer(run, config(run.size), documents())
    with torch.no_grad():
        built.model.norm.weight[0] = float("inf")
    before = weights(built)
    with pytest.raises(Stopped, match="step 1: the gradient norm is nan"):
        built.step(0)
    assert all(torch.equal(before[name], value) for name, value in weights(built).items())


def test_step_that_overflows(pool):
    pool.run(2, step_that_overflows)


def copies_stay_equal(run: Runtime) -> None:
    """Fifty clipped AdamW steps in float32: parameters have equal bits on all ranks."""
    built = trainer(run, config(run.size, dtype="float32", steps=50), documents())
    for step in range(50):
        built.step(step)
        if step % 10 == 9:
            layout.check_copies(((param.held, param) for param in built.handle.parameters()), run.world)


def test_copies_stay_equal(pool):
    pool.run(3, copies_stay_equal)


def mean_of_means(run: Runtime, cfg: Config, texts: list[np.ndarray]) -> list[parity.Step]:
    """The classic fault: each rank scales by its own count, and the ranks are averaged."""

    class Own:
        def wait(self) -> None:
            pass

    real = module.comm
    broken = type("comm", (), dict(vars(real)))
    broken.all_reduce = staticmethod(
        lambda tensor, *args, **kw: Own() if tensor.dtype == torch.int64 else real.all_reduce(tensor, *args, **kw)
    )
    module.comm = broken
    try:
        return parity.train(run, cfg, texts, 1)[1]
    finally:
        module.comm = real


def test_counts_that_are_not_reduced_are_caught(pool):
    cfg = config(2, optimizer="sgd", lr=0.5, clip=0.5)
    initial, right = pool.run(2, parity.train, cfg, documents(), 1)[0]
    expected = parity.reference(cfg, initial, documents(), 1)
    assert max(parity.judge(initial, right, expected).values()) <= 1
    [wrong] = pool.run(2, mean_of_means, cfg, documents())[0]
    wrong = replace(wrong, count=expected[0].count)
    assert parity.judge(initial, [wrong], expected)["gradient"] > 1e6


def test_bigram_loss_is_the_reference():
    texts, held_out = documents(), documents((30, 2, 7))
    ours = metrics.bigram_loss(parity.stream(texts, 16), parity.stream(held_out, 16), 37)
    assert abs(ours - loop.bigram_loss(texts, held_out, 37)) < 1e-12
