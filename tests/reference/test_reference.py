"""What keeps the reference itself honest: properties that hold whatever code is measured against it."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.reference import rng
from tests.reference.data import IGNORED, batch, sample, sample_count, stream
from tests.reference.loop import bigram_loss, evaluate, lr_at, run
from tests.reference.model import forward, loss_sum

V, D, F = 13, 12, 10
HEADS, KV_HEADS, K = 4, 2, 6
SHAPE = {"heads": HEADS, "kv_heads": KV_HEADS}


def random_weights(layers=2, tied=False):
    shapes = {"embed": (V, D), "norm": (D,)} | ({} if tied else {"head": (V, D)})
    for i in range(layers):
        shapes |= {
            f"blocks.{i}.attend_norm": (D,),
            f"blocks.{i}.q": (HEADS * K, D),
            f"blocks.{i}.k": (KV_HEADS * K, D),
            f"blocks.{i}.v": (KV_HEADS * K, D),
            f"blocks.{i}.o": (D, HEADS * K),
            f"blocks.{i}.ffn_norm": (D,),
            f"blocks.{i}.ffn.gate": (F, D),
            f"blocks.{i}.ffn.up": (F, D),
            f"blocks.{i}.ffn.down": (D, F),
        }
    random = torch.Generator().manual_seed(0)
    draw = {name: torch.randn(shape, generator=random, dtype=torch.float64) for name, shape in shapes.items()}
    return {f"{name}.weight": 1 + 0.2 * w if "norm" in name else 0.5 * w for name, w in draw.items()}


def random_documents(lengths):
    random = np.random.default_rng(0)
    return [random.integers(0, V, length) for length in lengths]


# ---- random numbers


def test_bits_are_the_formula_in_whole_numbers():
    def by_hand(key, index):
        z = (index * 0x9E3779B97F4A7C15 + key) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z + key * 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    key = rng.key(3, "a name", 7)
    for index in [0, 1, 2, 12345, 2**40 + 1, 2**63 - 1]:
        assert int(rng.bits(key, index)) == by_hand(key, index)
        word = [by_hand(key, index) >> 16 * lane & 0xFFFF for lane in range(4)]
        drawn = [lane - 2**16 if lane >= 2**15 else lane for lane in word]
        for p, least in [(0.1, 6554 - 32768), (0.5, 0)]:  # a row of four is one draw
            assert rng.keep(key, [index], 4, p).tolist() == [[lane >= least for lane in drawn]]


@pytest.mark.parametrize("n", range(1, 41))
def test_permutation_is_a_permutation(n):
    assert sorted(rng.permutation(rng.key(0, "order", n), x, n) for x in range(n)) == list(range(n))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5])
def test_keep_keeps_one_minus_p(p):
    rows, width = np.arange(4000), 7  # 7: the last group of four is not whole
    kept = rng.keep(rng.key(0, "dropout"), rows, width, p)
    assert kept.shape == (4000, 7)
    spread = math.sqrt(p * (1 - p) / len(rows))
    assert np.abs(kept.mean(0) - (1 - p)).max() <= 5 * spread  # every channel by itself
    assert abs(rng.scale(p) * (1 - p) - 1) < 1e-4
    part = rng.keep(rng.key(0, "dropout"), rows[100:130].reshape(5, 6), width, p)
    assert np.array_equal(part, kept[100:130].reshape(5, 6, 7))  # a row is the same whoever asks for it


def test_normal_has_the_moments_of_a_normal():
    x = rng.normal(rng.key(0, "normal"), np.arange(20_000))
    assert abs(x.mean()) < 5 / math.sqrt(len(x))
    assert abs((x**2).mean() - 1) < 5 * math.sqrt(2 / len(x))
    u = torch.from_numpy(rng.uniform(rng.key(0, "normal"), np.arange(20_000)))
    assert np.abs(x - math.sqrt(2) * torch.erfinv(2 * u - 1).numpy()).max() < 1e-12


# ---- data


def test_a_sample_is_this_picture():
    tokens, owners = stream([[5, 6, 7], [8], [9, 4, 3, 2]])  # 8 tokens: two samples of 5, the second with 2 slots empty
    assert sample_count(tokens, 5) == 2
    assert sample(tokens, owners, 5, 0) == (
        [5, 6, 7, 8, 9],
        [6, 7, IGNORED, IGNORED, 4],
        [0, 0, 0, 1, 2],
        [0, 1, 2, 0, 0],
    )
    assert sample(tokens, owners, 5, 1) == (
        [4, 3, 2, 0, 0],
        [3, 2, IGNORED, IGNORED, IGNORED],
        [2, 2, 2, 3, 3],
        [0, 1, 2, 0, 1],
    )


@pytest.mark.parametrize("lengths", [[9, 1, 4, 7], [9, 1, 4, 8], [9, 1, 4, 9], [9, 1, 4, 10], [2], [6], [5, 1]])
def test_an_epoch_is_every_pair_inside_a_document_once(lengths):
    T, B = 5, 2
    numbered = np.split(np.arange(1, sum(lengths) + 1), np.cumsum(lengths)[:-1])  # every token differs; 0 is padding
    inside = {(int(a), int(b)) for document in numbered for a, b in pairwise(document)}
    n = math.ceil((sum(lengths) - 1) / T)

    seen, order = Counter(), []
    for step in range(n):  # n steps of 2 rows are two epochs
        ids, labels, docs, _, numbers = batch(numbered, T, B, step, seed=1)
        valid = labels != IGNORED
        seen.update(zip(ids[valid].tolist(), labels[valid].tolist(), strict=True))
        order += zip(numbers.tolist(), ids[:, 0].tolist(), strict=True)
        assert not (docs[ids == 0][:, None] == docs[ids != 0]).any()  # padding shares no document with a token
    assert seen == Counter(dict.fromkeys(inside, 2))
    assert [number for number, _ in order] == list(range(2 * n))
    firsts = [first for _, first in order]
    assert sorted(firsts[:n]) == sorted(firsts[n:]) == list(range(1, n * T, T))  # each epoch is every sample once


# ---- model


@pytest.mark.parametrize("padding", [0, 3])
def test_a_packed_row_is_its_documents_alone(padding):
    weights, documents = random_weights(), random_documents([6, 2, 9, 5])
    T = 22 - 1 + padding
    ids, labels, docs, positions, _ = batch(documents, T, 1, step=0, seed=0)
    packed = forward(weights, ids, docs, positions, **SHAPE)
    for number, document in enumerate(documents):
        ids, alone, own, positions, _ = batch([document], len(document) - 1, 1, step=0, seed=0)
        expected = loss_sum(forward(weights, ids, own, positions, **SHAPE), alone)
        found = loss_sum(packed, labels.where(docs == number, IGNORED))
        assert abs(found - expected) < 1e-12 * max(1, expected)


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_by_finite_differences(tied):
    weights = {name: w.requires_grad_() for name, w in random_weights(tied=tied).items()}
    ids, labels, docs, positions, numbers = batch(random_documents([6, 2, 9, 5]), 7, 2, step=1, seed=0)

    def loss():
        logits = forward(weights, ids, docs, positions, **SHAPE, dropout=0.1, seed=0, step=1, numbers=numbers)
        return loss_sum(logits, labels)

    loss().backward()
    h = 1e-5
    with torch.no_grad():
        for name, w in weights.items():
            flat, grad = w.view(-1), w.grad.view(-1)
            for i in {0, len(flat) // 2, int(grad.abs().argmax())}:
                at = flat[i].item()
                flat[i] = at + h
                up = loss()
                flat[i] = at - h
                down = loss()
                flat[i] = at
                assert abs((up - down) / (2 * h) - grad[i]) < 1e-7 * max(1, grad.abs().max()), name


# ---- loop

TRAINING = {"T": 5, "B": 1, "seed": 0, "tied": True, "lr": 0.02, "warmup": 2, "total_steps": 60, **SHAPE}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_batch_without_a_label_moves_nothing(optimizer):
    documents = [[1]] * 5 + [[2, 3, 4, 5, 6, 7]]  # one of the two samples has no pair inside a document
    records = run(random_weights(tied=True), documents, steps=4, optimizer=optimizer, weight_decay=0.1, **TRAINING)
    before = random_weights(tied=True)
    assert sorted(r.count for r in records) == [0, 0, 5, 5]
    for r in records:
        moved = any(not torch.equal(r.params[name], before[name]) for name in before)
        assert moved == (r.count > 0) == (r.loss > 0) == (r.grad_norm > 0)
        assert (r.count > 0) == any(g.any() for g in r.grads.values())
        before = r.params
    assert [r.lr for r in records] == [lr_at(step, 0.02, 2, 60, 0.1) for step in range(4)]


def test_learning_rate():
    assert [lr_at(step, 8.0, 4, 12, 0.5) for step in [0, 1, 3, 4, 8, 12]] == pytest.approx([2, 4, 8, 8, 6, 4])


def test_training_learns_what_the_bigram_model_knows():
    documents = [np.arange(start, start + 12) % V for start in range(6)]  # each token says which one follows
    followed = Counter(int(token) for document in documents for token in document[:-1])
    expected = -sum(times * math.log((times + 1) / (times + V)) for times in followed.values()) / 66
    assert bigram_loss(documents, documents, V) == pytest.approx(expected, rel=1e-12)

    records = run(random_weights(tied=True), documents, steps=60, clip=1.0, dropout=0.05, **TRAINING | {"B": 4})
    assert max(r.grad_norm for r in records) > 1  # clipping had something to do
    loss = evaluate(records[-1].params, documents, T=5, **SHAPE)
    assert loss < 0.5 * expected < expected < evaluate(random_weights(tied=True), documents, T=5, **SHAPE)
