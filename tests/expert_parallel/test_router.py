"""The router: scores, weights, choices, ties, and in which precision."""

import itertools

import pytest
import torch

from expert_parallel import Router
from tests.expert_parallel import reference
from tests.expert_parallel.cases import near
from tests.expert_parallel.reference import Layer

BIAS = (0.9, -0.9, 0.0, 0.5, -0.2, 0.0)
TOKENS = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def router(layer, rows, dtype=torch.float64):
    """With these rows [E, D]."""
    made = Router(
        *(layer.width, layer.experts, layer.choices),
        score=layer.score,
        renormalise=layer.renormalise,
        scale=layer.scale,
        biased=layer.bias is not None,
    ).to(dtype)
    made.load_state_dict({"weight": rows, **({"bias": torch.tensor(layer.bias)} if layer.bias else {})})
    return made


def random_rows(layer):
    return reference.weights(layer)["router.weight"]


@pytest.mark.parametrize("bias", [None, BIAS])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("renormalise", "scale"), [(True, 1.0), (False, 1.0), (True, 2.5), (False, 2.5)])
@pytest.mark.parametrize("choices", [1, 2, 3, 6])
def test_choices_and_weights(choices, renormalise, scale, score, bias):
    layer = Layer(8, 5, 6, choices, score, renormalise, scale, bias)
    rows = random_rows(layer)
    routing = router(layer, rows)(TOKENS)
    logits = TOKENS @ rows.T
    scores, parts = reference.scores_of(logits, layer)
    for at in itertools.product(range(4), range(5)):
        best = reference.ranking(scores[at].tolist(), layer)
        assert routing.experts[at].tolist() == best
        among = sum(scores[at][e] for e in best) if renormalise else 1.0
        assert near(routing.weights[at].detach(), torch.stack([scale * scores[at][e] / among for e in best])) <= 1
    assert near(routing.shares.detach(), parts) <= 1 and near(routing.logits.detach(), logits) <= 1


def test_a_bias_chooses_and_does_not_weigh():
    """Typed: sigmoid(0) = 1/2 for everyone, so the bias alone decides, and weights do not know of it."""
    layer = Layer(8, 5, 6, 2, "sigmoid", True, 3.0, BIAS)
    routing = router(layer, torch.zeros(6, 8))(TOKENS)
    assert (routing.experts == torch.tensor([0, 3])).all()
    assert (routing.weights == 1.5).all() and (routing.shares == 1 / 6).all()


def test_a_bias_has_no_gradient_and_gives_none():
    layer = Layer(8, 5, 6, 2, "sigmoid", False, 1.0, BIAS)
    with_bias = router(layer, random_rows(layer))
    assert [name for name, _ in with_bias.named_parameters()] == ["weight"]
    assert [name for name, _ in with_bias.named_buffers()] == ["bias"]
    assert "bias" not in router(Layer(8, 5, 6), random_rows(layer)).state_dict()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalise", [True, False])
def test_gradients(score, renormalise):
    """By differences: of the weights along a direction."""
    layer = Layer(8, 5, 6, 2, score, renormalise, 1.5)
    made, x = router(layer, random_rows(layer)), TOKENS.clone().requires_grad_()
    factors = torch.randn(4, 5, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    along = torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def value(x):
        return (made(x).weights * factors).sum()

    [dx] = torch.autograd.grad(value(x), x)
    with torch.no_grad():
        step = (value(x + 1e-6 * along) - value(x - 1e-6 * along)) / 2e-6
    assert float((dx * along).sum()) == pytest.approx(float(step), rel=1e-7)


def test_weights_of_the_only_choice_are_one_and_move_nothing():
    """A renormalised top-1 gives the router no gradient: an exact zero."""
    layer = Layer(8, 5, 6, 1)
    made = router(layer, random_rows(layer))
    weights = made(TOKENS).weights
    assert (weights == 1).all()
    weights.sum().backward()
    assert float(made.weight.grad.abs().max()) < 1e-15


# -- T95: ties ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_t95_of_equal_scores_the_lowest_number_wins(score, dtype):
    """Rows 1 and 4 are the same, and 0 and 3. Small integers, so that sums are exact in any order."""
    a, b, c, d = torch.tensor([[3, 1], [4, -1], [0, 0], [-2, 2]]).double()
    rows = torch.stack([a, b, c, a, b, d])
    x = torch.tensor([[1, 1], [1, 0], [-1, 0], [0, 0], [0, 1]]).to(dtype)
    typed = [[0, 3, 1], [1, 4, 0], [5, 2, 0], [0, 1, 2], [5, 0, 3]]  # logits a = 4 3 -3 0 1, b = 3 4 -4 0 -1, d = 0 -2
    routing = router(Layer(2, 5, 6, 3, score), rows, dtype)(x)
    assert routing.experts.tolist() == typed
    for _ in range(3):
        assert torch.equal(router(Layer(2, 5, 6, 3, score), rows, dtype)(x).experts, routing.experts)


def test_t95_also_among_many():
    """As many as a sort that is not stable would mix."""
    layer = Layer(8, 5, 64, 8)
    for tokens in (1, 3, 200):
        routing = router(layer, torch.zeros(64, 8))(torch.randn(tokens, 8, dtype=torch.float64))
        assert (routing.experts == torch.arange(8)).all()


def test_t95_a_bias_that_makes_scores_equal():
    routing = router(Layer(8, 5, 4, 2, "sigmoid", bias=(0.0, 0.25, 0.25, 0.0)), torch.zeros(4, 8))(TOKENS)
    assert (routing.experts == torch.tensor([1, 2])).all()


# -- precision ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("tokens", "weights", "computed"),
    [
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float16, torch.float32, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.float32, torch.float32),
        (torch.float64, torch.float64, torch.float64),
        (torch.float64, torch.float32, torch.float64),
    ],
)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_in_float32_and_float64_for_float64(score, tokens, weights, computed, autocast):
    """The bits are those of a router whose input was made so before; in bf16 they would not be."""
    layer = Layer(8, 5, 6, 2, score)
    low = router(layer, random_rows(layer), weights)
    high = router(layer, low.weight.detach(), computed)
    x = TOKENS.to(tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        routing = low(x)
    true = high(x.to(computed))
    for ours, right in zip(vars(routing).values(), vars(true).values(), strict=True):
        assert ours.dtype == right.dtype and torch.equal(ours, right)
    assert {routing.weights.dtype, routing.shares.dtype, routing.logits.dtype} == {computed}


def test_a_score_that_bf16_rounds_away_still_counts():
    """In bf16 both logits were 256, and expert 0 would win."""
    rows = torch.tensor([[256.0, 0.0], [256.0, 0.5]])
    routing = router(Layer(2, 5, 2, 1), rows, torch.bfloat16)(torch.ones(1, 2, dtype=torch.bfloat16))
    assert routing.experts.tolist() == [[1]]


def test_gradients_of_a_router_in_bf16_are_in_bf16():
    made = router(Layer(8, 5, 6, 2), random_rows(Layer(8, 5, 6)), torch.bfloat16)
    x = TOKENS.bfloat16().requires_grad_()
    made(x).logits.square().sum().backward()
    assert made.weight.grad.dtype == x.grad.dtype == torch.bfloat16
