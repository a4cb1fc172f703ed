"""Tensor and sequence parallelism in the trainer: what the grid's steps do not show."""

from dataclasses import replace

import pytest
import torch

from collectives.runtime import Runtime
from nd_mesh.config import Config
from nd_mesh.model import Dropout, Where
from nd_mesh.sample import generate
from tests import parity

MODES = {"tp": {}, "gathered again": {"sequence": True}, "kept": {"sequence": True, "save_gathered": True}}
MESHES = [(2, "tp"), (2, "gathered again"), (3, "kept"), (4, "tp"), (4, "gathered again")]
ONE = parity.config(tp=1, kv_heads=1, dropout=0.1)


def config(tp: int, mode: str) -> Config:
    return parity.config(tp=tp, kv_heads=1, dropout=0.1, **MODES[mode])


def evaluated(run: Runtime, cfg: Config) -> tuple[float, list[int], torch.Tensor]:
    """After a step: the validation loss, a sample, and the whole logits of a few tokens."""
    built = parity.built(run, cfg, parity.documents())
    built.step(0)
    loss = built.evaluate()
    settings = {"context": parity.CONTEXT, "vocab": 37, "rows": built.rows}
    [batch] = built.microbatches(1)
    with torch.no_grad():
        built.model.eval()
        logits = built.model.logits(built.model(batch.ids, where=batch.where))
    return loss, generate(built.model, [1, 2], 30, seed=0, **settings), logits


@pytest.fixture(scope="module")
def alone(pool):
    [result] = pool.run(1, evaluated, ONE)
    return result


@pytest.mark.parametrize(("tp", "mode"), MESHES)
def test_evaluation_and_text_do_not_depend_on_tp(pool, alone, tp, mode):
    loss, tokens, logits = alone
    for ours in pool.run(tp, evaluated, config(tp, mode)):
        assert abs(ours[0] - loss) <= 1e-12 * loss
        assert ours[1] == tokens and len(set(tokens)) > 5
        assert torch.allclose(ours[2], logits, rtol=0, atol=1e-12) and ours[2].shape[-1] == parity.VOCAB


def few(run: Runtime, cfg: Config) -> list[int]:
    """A sample of tokens less than 5, of a model that knows more."""
    built = parity.built(run, cfg, parity.documents())
    return generate(built.model, [1, 2], 40, seed=0, context=parity.CONTEXT, vocab=5, rows=built.rows)


def test_text_is_of_the_vocabulary_that_is_asked_for(pool):
    [tokens] = {tuple(tokens) for tokens in pool.run(2, few, config(2, "kept"))}
    assert set(tokens) == set(range(5))


def masks(run: Runtime, cfg: Config) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """By name the mask that each dropout draws, and the numbers of the tokens that it is for."""
    built, seen = parity.built(run, cfg, parity.documents()), {}
    true = Dropout.forward

    def forward(self: Dropout, x: torch.Tensor, where: Where) -> torch.Tensor:
        seen[self.name] = true(self, torch.ones_like(x), where), where.tokens
        return true(self, x, where)

    Dropout.forward = forward
    try:
        built.gradients(0)
    finally:
        Dropout.forward = true
    return seen


@pytest.mark.parametrize(("tp", "mode"), MESHES)
def test_dropout_is_that_of_one_process_bit_for_bit(pool, tp, mode):
    [whole] = pool.run(1, masks, ONE)
    for rank, seen in enumerate(pool.run(tp, masks, config(tp, mode))):
        assert seen.keys() == whole.keys() and len(whole) == 1 + 2 * parity.MODEL.layers
        for name, (mask, tokens) in seen.items():
            piece = [part.tensor_split(tp, 1)[rank] if MODES[mode] else part for part in whole[name]]
            assert torch.equal(mask, piece[0]) and torch.equal(tokens, piece[1])
            assert len(mask.unique()) == 2


def numbers(run: Runtime, cfg: Config) -> tuple[int, list[tuple[int, ...]]]:
    """How many elements a rank has, and the rows of the vocabulary."""
    built = parity.built(run, cfg, parity.documents())
    [boxes] = [p.held.boxes for p in built.model.parameters() if p.held.name == "embed.weight"]
    return sum(p.numel() for p in built.model.parameters()), [(box.offset[0], box.local[0]) for box in boxes]


def test_a_rank_has_its_part_and_no_padding(pool):
    """Everything but norms and the shared key and value head is cut; 37 tokens are 10, 9, 9 and 9."""
    [(whole, _)], ranks = pool.run(1, numbers, ONE), pool.run(4, numbers, config(4, "tp"))
    width, layers, head = parity.MODEL.width, parity.MODEL.layers, parity.MODEL.width // parity.MODEL.heads
    copied = width * (2 * layers + 1) + layers * 2 * head * width  # norms, and one key and one value head
    assert sum(numel for numel, _ in ranks) == whole + 3 * copied
    assert [rows for _, rows in ranks] == [[(0, 10)], [(10, 9)], [(19, 9)], [(28, 9)]]


def test_sums_are_declared(pool):
    """Without sequence parallelism no norm has a partial gradient; keys and values that are shared have, either way."""
    for mode, settings in MODES.items():
        for labels in pool.run(4, declared, replace(config(4, mode), mesh=replace(ONE.mesh, tp=4))):
            assert labels["blocks.0.k.weight"] == labels["blocks.0.v.weight"] == {"kv"}
            assert labels["blocks.0.q.weight"] == labels["embed.weight"] == labels["blocks.0.ffn.down.weight"] == set()
            assert labels["norm.weight"] == labels["blocks.1.ffn_norm.weight"] == ({"tp"} if settings else set())


def declared(run: Runtime, cfg: Config) -> dict[str, set[str]]:
    built = parity.built(run, cfg, parity.documents())
    return {p.held.name: p.held.sums.keys() - {"data"} for p in built.handle.parameters()}


def kinds(run: Runtime, cfg: Config) -> list[set[bool]]:
    """Of each of ZeRO's buckets whether it has norms, and whether it has others."""
    handle = parity.built(run, cfg, parity.documents()).handle
    return [{"norm" in param.held.name for param in bucket.params} for bucket in handle.buckets]


def test_copies_have_buckets_of_their_own(pool):
    """Beside an uneven part of the vocabulary copies would be cut at other places on each rank of tp."""
    cfg = parity.config(dp=2, tp=2, data="zero1", sequence=True)
    assert pool.run(4, kinds, cfg) == [[{False}, {True}]] * 4
