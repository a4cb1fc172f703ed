"""What keeps the reference itself honest: properties that hold whatever code is measured against it."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.reference import rng
from tests.reference.data import IGNORED, batch, sample, sample_count, stream
from tests.reference.ffn import Routing, balance_loss, dense, mixture, moved, the_best, with_room, z_loss
from tests.reference.loop import bigram_loss, evaluate, lr_at, run
from tests.reference.model import forward, loss_sum, part_of, routed_forward

V, D, F = 13, 12, 10
HEADS, KV_HEADS, K = 4, 2, 6
E = 5
SHAPE = {"heads": HEADS, "kv_heads": KV_HEADS}


def random_weights(layers=2, tied=False, mixtures=(), common=False):
    """mixtures: the layers that are one, with an expert for every token or not."""
    shapes = {"embed": (V, D), "norm": (D,)} | ({} if tied else {"head": (V, D)})
    for i in range(layers):
        shapes |= {
            f"blocks.{i}.attend_norm": (D,),
            f"blocks.{i}.q": (HEADS * K, D),
            f"blocks.{i}.k": (KV_HEADS * K, D),
            f"blocks.{i}.v": (KV_HEADS * K, D),
            f"blocks.{i}.o": (D, HEADS * K),
            f"blocks.{i}.ffn_norm": (D,),
        }
        network = {"gate": (F, D), "up": (F, D), "down": (D, F)}
        if i in mixtures:
            ffn = {"router": (E, D)} | {f"experts.{name}": (E, *shape) for name, shape in network.items()}
            ffn |= {f"shared.{name}": shape for name, shape in network.items()} if common else {}
        else:
            ffn = network
        shapes |= {f"blocks.{i}.ffn.{name}": shape for name, shape in ffn.items()}
    random = torch.Generator().manual_seed(0)
    draw = {name: torch.randn(shape, generator=random, dtype=torch.float64) for name, shape in shapes.items()}
    return {named(name): 1 + 0.2 * w if "norm" in name else 0.5 * w for name, w in draw.items()}


def named(name):
    return name if ".experts." in name else f"{name}.weight"


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

    check_gradients(weights, loss)


def check_gradients(weights, loss):
    """Against differences, some elements of each tensor."""
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


# ---- mixtures of experts

SOFTMAX = {"choices": 2, "score": "softmax", "renormalise": True, "scale": 1.0, "capacity": 0.0}
SIGMOID = SOFTMAX | {"choices": 3, "score": "sigmoid", "scale": 2.5}
TOP_1 = SOFTMAX | {"choices": 1, "renormalise": False, "capacity": 1.0}


def picture(*rows):
    """[B, T, E] from a line an expert, x where a token chose it; rows between slashes."""
    lines = [[[mark == "x" for mark in line.strip()] for line in row.split("/")] for row in rows]
    return torch.tensor(lines).transpose(1, 2)


def test_drops_are_this_picture():
    chosen = picture("xx.xx.xx/.x.x..../x...x.xx", "......xx/xxxxxx../xxxx..xx")  # two rows, 3 experts, 8 slots
    # ⌈c · 2 · 8 / 3⌉ is 2, 3 and 6
    for factor, kept in [
        (0.3, picture("xx....../.x.x..../x...x...", "......xx/xx....../xx......")),
        (0.5, picture("xx.x..../.x.x..../x...x.x.", "......xx/xxx...../xxx.....")),
        (1.0, picture("xx.xx.xx/.x.x..../x...x.xx", "......xx/xxxxxx../xxxx..xx")),
        (0.0, chosen),
    ]:
        assert torch.equal(with_room(chosen, factor, 2), kept), factor


def test_of_equal_scores_the_first_wins():
    scores = torch.tensor([[[0.5, 0.7, 0.5, 0.7, 0.1], [0.2] * 5, [0.0, 0.0, 0.0, 0.1, 0.0]]])
    best = [torch.nonzero(each).flatten().tolist() for each in the_best(scores, 3)[0]]
    assert best == [[0, 1, 3], [0, 1, 2], [0, 1, 3]]


@pytest.mark.parametrize("settings", [SOFTMAX, SIGMOID, TOP_1], ids=["softmax", "sigmoid", "top 1"])
def test_a_token_gets_what_its_experts_make_of_it(settings):
    """In words of one token at a time: its scores in order, the experts that have room, their outputs, their sum."""
    weights = part_of(random_weights(mixtures=[0], common=True), "blocks.0.ffn.")
    x = torch.randn(2, 9, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    bias = torch.tensor([0.3, 0.0, -0.4, 0.2, 0.0], dtype=torch.float64)
    routed = torch.ones(2, 9, dtype=torch.bool)
    routed[1, 4:] = False
    y, routing = mixture(x, weights, bias, routed, settings)
    room = math.ceil(settings["capacity"] * settings["choices"] * 9 / E) or 9
    for row in range(2):
        taken, dropped = [0] * E, 0
        for slot, token in enumerate(x[row]):
            logits = (weights["router.weight"] @ token).tolist()
            scores = [1 / (1 + math.exp(-logit)) for logit in logits]
            if settings["score"] == "softmax":
                scores = [math.exp(logit) / sum(map(math.exp, logits)) for logit in logits]
            best = sorted(range(E), key=lambda e: -(scores[e] + bias[e]))[: settings["choices"]]
            whole = sum(scores[e] for e in best) if settings["renormalise"] else 1.0
            expected = dense(token, *(weights[f"shared.{name}.weight"] for name in ("gate", "up", "down")))
            for e in best if routed[row, slot] else ():
                if taken[e] < room:
                    output = dense(token, *(weights[f"experts.{name}"][e] for name in ("gate", "up", "down")))
                    expected = expected + settings["scale"] * scores[e] / whole * output
                dropped += taken[e] >= room
                taken[e] += 1
            assert (y[row, slot] - expected).abs().max() < 1e-12 * expected.abs().max()
        assert routing.chosen[row].sum(0).tolist() == taken
        assert (routing.chosen & ~routing.kept)[row].sum() == dropped
    assert bool((routing.chosen & ~routing.kept).any()) == (settings["capacity"] > 0)


def test_losses_of_routers_by_hand():
    even = torch.full((2, 4, 2), 0.5, dtype=torch.float64)
    chosen = picture("xxx./...x", "x.../.x..")  # the second row has two tokens
    routing = Routing(torch.zeros_like(even), even, chosen, chosen)
    assert balance_loss(routing, 1, torch.tensor([True, True])).item() == pytest.approx(1.0)  # whoever is chosen
    assert z_loss(routing).item() == pytest.approx(math.log(2) ** 2)

    logits = torch.tensor([3.0, 1.0], dtype=torch.float64).log().expand(2, 4, 2)
    routing = Routing(logits, logits.softmax(-1), chosen, chosen)
    first = 2 * (0.75 * 0.75 + 0.25 * 0.25)  # E Σ share of choices · share of scores
    assert balance_loss(routing, 1, torch.tensor([True, False])).item() == pytest.approx(first)
    assert balance_loss(routing, 1, torch.tensor([True, True])).item() == pytest.approx((first + 1) / 2)
    assert balance_loss(routing, 1, torch.tensor([False, False])).item() == 0
    assert z_loss(routing).item() == pytest.approx(math.log(4) ** 2)


@pytest.mark.parametrize("settings", [SOFTMAX, SIGMOID, TOP_1], ids=["softmax", "sigmoid", "top 1"])
def test_gradients_of_mixtures_by_finite_differences(settings):
    weights = {name: w.requires_grad_() for name, w in random_weights(mixtures=[1], common=True).items()}
    ids, labels, docs, positions, _ = batch(random_documents([6, 2, 9, 5]), 8, 3, step=0, seed=0)
    biases = {"blocks.1.ffn.router.bias": torch.tensor([0.1, 0.0, -0.1, 0.1, 0.0], dtype=torch.float64)}
    choices = []

    def loss():
        more = {"experts": settings, "biases": biases, "padding": 4}
        logits, routings = routed_forward(weights, ids, docs, positions, **SHAPE, **more)
        choices.append(routings[1].kept)
        balance = balance_loss(routings[1], settings["choices"], (labels != IGNORED).any(1))
        return loss_sum(logits, labels) + 3 * balance + 2 * z_loss(routings[1])

    check_gradients(weights, loss)
    assert all(torch.equal(each, choices[0]) for each in choices)  # no difference is taken across a choice
    assert (docs == 4).any() and not choices[0][docs == 4].any()


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


def test_a_bias_follows_the_load():
    bias = torch.tensor([0.0, 0.5, 0.0, -0.5], dtype=torch.float64)
    assert moved(bias, torch.tensor([5, 2, 1, 0]), 0.25).tolist() == [-0.25, 0.5, 0.25, -0.25]

    documents = [[1]] * 5 + [[2, 3, 4, 5, 6, 7]]
    experts = SIGMOID | {"balance": 0.1, "z_loss": 0.0, "bias_rate": 0.25}
    records = run(random_weights(tied=True, mixtures=[1]), documents, steps=4, **TRAINING, experts=experts)
    before = torch.zeros(E, dtype=torch.float64)
    for r in records:
        [bias], [tokens] = r.biases.values(), r.tokens.values()
        assert tokens.sum() == 3 * 5 and r.z == {1: 0.0} and (r.balance[1] > 0) == (r.count > 0)
        assert torch.equal(bias, moved(before, tokens, 0.25) if r.count else before)
        before = bias
    assert bias.abs().max() >= 0.25


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
