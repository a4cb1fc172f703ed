"""Context parallelism in the trainer: what the grid's steps do not show."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from collectives.runtime import Runtime
from context_parallel import NOWHERE, Places, slots
from nd_mesh import context, data, loop
from nd_mesh.config import Config, DataConfig, MeshConfig, ParallelConfig
from nd_mesh.context import Rows
from nd_mesh.data import Batch
from nd_mesh.mesh import Mesh
from nd_mesh.model import IGNORE
from nd_mesh.sample import generate
from nd_mesh.train import Trainer
from tests import parity
from tests.nd_mesh.faults import FAULTS as SUMS
from tests.nd_mesh.test_tensor import masks
from tests.reference.model import forward

ONE = parity.config(kv_heads=1, dropout=0.1)
MESHES = {  # ranks, and what cuts
    "ring, zigzag": (2, {"cp": 2}),
    "ring, padded": (4, {"cp": 4}),
    "ring, striped": (3, {"cp": 3, "order": "striped"}),
    "all_gather": (3, {"cp": 3, "attention": "all_gather", "order": "contiguous"}),
    "ulysses": (4, {"cp": 4, "attention": "ulysses", "order": "striped"}),
    "ring_ulysses": (4, {"cp": 4, "attention": "ring_ulysses"}),
    "tp and sequences": (4, {"cp": 2, "tp": 2, "sequence": True}),
    "pipeline": (4, {"cp": 2, "pp": 2, "schedule": "zbv", "microbatches": 3}),
    "fsdp": (4, {"cp": 2, "fsdp": 2, "data": "fsdp"}),
    "zero3": (4, {"cp": 2, "dp": 2, "data": "zero3"}),
}


def config(**settings: Any) -> Config:
    return parity.config(**{"kv_heads": 1, "dropout": 0.1, **settings})


# -- which tokens a rank has -------------------------------------------------------------------------------------------

# Tokens of a row, what cuts it, and the slots of each rank of cp.
ROWS = [
    (12, {}, [[*range(12)]]),
    (12, {"order": "contiguous", "cp": 3}, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]),
    (5, {"order": "contiguous", "cp": 2}, [[0, 1, 2], [3, 4, 5]]),
    (12, {"cp": 2}, [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]),
    (12, {"cp": 4}, [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]),
    (13, {"order": "striped", "cp": 3}, [[0, 3, 6, 9, 12], [1, 4, 7, 10, 13], [2, 5, 8, 11, 14]]),
    (3, {"cp": 2, "tp": 2, "sequence": True}, [[0, 3], [1, 2]]),
    (13, {"cp": 2, "tp": 3, "sequence": True}, [[*range(6), *range(18, 24)], [*range(6, 18)]]),
    (5, {"order": "contiguous", "cp": 2, "tp": 2, "sequence": True}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    (5, {"tp": 2, "sequence": True}, [[0, 1, 2, 3, 4, 5]]),
    (5, {"tp": 2}, [[0, 1, 2, 3, 4]]),
]


def rows_of(length: int) -> Batch:
    """Three whole rows of this many tokens."""
    numbers = torch.arange(3)
    return data.make_batch(parity.stream(parity.documents(), length), 4, numbers, numbers)


def cut(run: Runtime, mesh: MeshConfig, parallel: ParallelConfig, length: int) -> tuple[int, Batch, Places, Batch]:
    """On each rank: its number in cp, its part without the places of the others, these, and the joined part."""
    rows, whole = Rows(parallel, where := Mesh(mesh, run)), rows_of(length)
    part = rows.cut(whole)
    ids, labels = rows.join(torch.stack([part.ids, part.labels], -1), length).unbind(-1)
    joined = replace(part, ids=ids, labels=labels, where=None)
    return where.rank("cp"), replace(part, where=replace(part.where, places=None)), part.where.places, joined


@pytest.mark.parametrize(("length", "settings", "expected"), ROWS)
def test_a_rank_has_its_slots_of_everything(pool, length, settings, expected):
    """Labels are shifted before the cut; padding has none, and belongs to no document."""
    cfg, whole = parity.config(**settings), rows_of(length)
    size = cfg.mesh.cp * cfg.mesh.tp
    for rank, part, places, joined in pool.run(size, cut, cfg.mesh, cfg.parallel, length):
        mine = expected[rank]
        assert part.where.slots.tolist() == part.where.stream.tolist() == mine
        assert (part.where.context, part.where.step) == (length, 4) and part.where.samples.tolist() == [0, 1, 2]
        for place, slot in enumerate(mine):
            padding = slot >= length
            assert padding or torch.equal(part.ids[:, place], whole.ids[:, slot])
            assert padding or torch.equal(part.where.positions[:, place], whole.where.positions[:, slot])
            assert (part.labels[:, place] == (IGNORE if padding else whole.labels[:, slot])).all()
            assert (part.where.documents[:, place] == (NOWHERE if padding else whole.where.documents[:, slot])).all()
        if places is not None:
            right = Places.of(whole.where.documents, torch.tensor(expected))
            assert places.slots.tolist() == expected
            assert torch.equal(places.first, right.first) and torch.equal(places.last, right.last)
        assert torch.equal(joined.ids, whole.ids) and torch.equal(joined.labels, whole.labels)


def labels(run: Runtime, cfg: Config) -> list[int]:
    """How many valid labels this rank has in each microbatch of four steps."""
    built = parity.built(run, cfg, parity.documents())
    return [int((batch.labels != IGNORE).sum()) for step in range(4) for batch in built.microbatches(step)]


def test_some_parts_have_no_label_and_others_of_the_same_rows_have(pool):
    counts = zip(*pool.run(4, labels, config(cp=4, microbatches=8)), strict=True)
    assert any(min(each) == 0 < max(each) for each in counts)


def described(run: Runtime, cfg: Config) -> list[str]:
    return loop.describe(parity.built(run, cfg, parity.documents()))


def test_padding_is_told(pool):
    assert "rows of 12 tokens are padded to 16" in pool.run(4, described, config(cp=4))[0]
    assert not any("padded" in line for line in pool.run(2, described, config(cp=2))[0])
    sequences = replace(config(tp=2, sequence=True), data=DataConfig(context=5))
    assert "rows of 5 tokens are padded to 6" in pool.run(2, described, sequences)[0]


# -- the same whatever cuts --------------------------------------------------------------------------------------------


def evaluated(run: Runtime, cfg: Config) -> tuple[float, list[int], torch.Tensor, dict[str, torch.Tensor]]:
    """After a step: the validation loss, a sample, the whole logits of two rows, and the weights."""
    built = parity.built(run, cfg, parity.documents())
    built.step(0)
    return built.evaluate(), sampled(built), logits(built), parity.parameters(built)


def sampled(built: Trainer) -> list[int]:
    return generate(built.model, [1, 2], 20, seed=0, context=parity.CONTEXT, vocab=37, rows=built.rows)


@torch.no_grad()
def logits(built: Trainer) -> torch.Tensor:
    batch = built.rows.cut(rows_of(parity.CONTEXT))
    built.model.eval()
    return built.rows.join(built.model.logits(built.model(batch.ids, where=batch.where)), parity.CONTEXT)


@pytest.fixture(scope="module")
def alone(pool):
    [result] = pool.run(1, evaluated, ONE)
    return result


@pytest.mark.parametrize("name", MESHES)
def test_evaluation_text_and_logits_do_not_depend_on_cp(pool, alone, name):
    """Logits, not losses alone: rotations by other positions move a loss but little."""
    ranks, settings = MESHES[name]
    loss, tokens, *_ = alone
    whole, heads = rows_of(parity.CONTEXT), {"heads": parity.MODEL.heads, "kv_heads": 1, "base": parity.MODEL.rope_base}
    assert len(set(tokens)) > 5
    for ours in pool.run(ranks, evaluated, config(**settings)):
        assert abs(ours[0] - loss) <= 1e-12 * loss and ours[1] == tokens
        expected = forward(ours[3], whole.ids, whole.where.documents, whole.where.positions, **heads)
        assert torch.allclose(ours[2], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["ring, zigzag", "ring, padded", "ulysses", "tp and sequences"])
def test_dropout_is_that_of_one_process_bit_for_bit(pool, name):
    [whole] = pool.run(1, masks, ONE)
    ranks, settings = MESHES[name]
    cfg = config(**settings)
    tp, multiple = cfg.mesh.tp, cfg.mesh.tp if cfg.parallel.sequence else 1
    everyones = slots(cfg.parallel.order, parity.CONTEXT, cfg.mesh.cp, multiple=multiple)
    for rank, seen in enumerate(pool.run(ranks, masks, cfg)):
        mine = everyones[rank // tp].tensor_split(multiple)[rank % multiple]
        real = mine < parity.CONTEXT
        assert seen.keys() == whole.keys() and len(whole) == 1 + 2 * parity.MODEL.layers
        for dropout, pair in seen.items():
            for ours, theirs in zip(pair, whole[dropout], strict=True):
                assert torch.equal(ours[:, real], theirs[:, mine[real]])


# -- faults that the judge must see ------------------------------------------------------------------------------------


@contextmanager
def cut_otherwise(change: Callable[[Batch, Batch, torch.Tensor], Batch]) -> Iterator[None]:
    """`change(whole, part, slots)` makes of a right part a wrong one; the slots are those of a contiguous order."""
    true = Rows.cut

    def wrong(self: Rows, batch: Batch) -> Batch:
        everyones = slots("contiguous", batch.ids.shape[1], self.group.size())
        return change(batch, true(self, batch), everyones[self.group.rank()])

    with mock.patch.object(Rows, "cut", wrong):
        yield


def elsewhere(part: Batch, **where: Any) -> Batch:
    return replace(part, where=replace(part.where, **where))


def other_documents(whole: Batch, part: Batch, mine: torch.Tensor) -> Batch:
    others = Places.of(whole.where.documents, slots("contiguous", whole.ids.shape[1], 2))
    return elsewhere(part, places=replace(others, slots=part.where.places.slots))


def shifted_after_the_cut(whole: Batch, part: Batch, mine: torch.Tensor) -> Batch:
    return replace(part, labels=F.pad(part.ids[:, 1:], (0, 1), value=IGNORE))


def own_keys_alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, places: Places, *, group: Any) -> torch.Tensor:
    visible = places.visible(group.rank(), group.rank()).unsqueeze(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)


FAULTS = SUMS | {
    "keys of the own part alone": lambda: mock.patch.object(context, "ring_attention", own_keys_alone),
    "contiguous positions of zigzag tokens": lambda: cut_otherwise(
        lambda whole, part, mine: elsewhere(part, positions=whole.where.positions[:, mine])
    ),
    "labels of other slots than the ids": lambda: cut_otherwise(
        lambda whole, part, mine: replace(part, labels=whole.labels[:, mine])
    ),
    "labels shifted after the cut": lambda: cut_otherwise(shifted_after_the_cut),
    "documents of other slots than the ids": lambda: cut_otherwise(other_documents),
    "dropout by the place in the part": lambda: cut_otherwise(
        lambda whole, part, mine: elsewhere(part, stream=torch.arange(len(mine)))
    ),
}


def faulty(run: Runtime, fault: str, cfg: Config) -> tuple[dict[str, torch.Tensor], list[parity.Step]]:
    with FAULTS[fault]():
        return parity.train(run, cfg, parity.documents(), 2, equal_bits=False)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows(pool, fault):
    """For counts, gradients and all that a part must be: each by the gradient, whatever is logged."""
    cfg = config(cp=2)
    ranks = pool.run(2, faulty, fault, cfg)
    expected = parity.reference(cfg, ranks[0][0], parity.documents(), 2)
    for initial, done in ranks:
        counted = [replace(step, count=right.count) for step, right in zip(done, expected, strict=True)]
        assert parity.judge(initial, counted, expected)["gradient"] > 1e6
