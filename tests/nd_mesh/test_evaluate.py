"""The validation loss: every sample once, whatever the mesh, and every label once."""

from collections import Counter
from typing import Any

import pytest
import torch

from collectives.runtime import Runtime
from nd_mesh.config import Config
from nd_mesh.model import IGNORE
from tests import parity
from tests.reference.data import IGNORED, sample, sample_count, stream
from tests.reference.model import loss_sum, routed_forward

DENSE = {"dropout": 0.1, "kv_heads": 1, "tied": True}
EXPERTS = {"dropout": 0.1, "experts": 4, "expert_hidden": 12, "pattern": "dm", "capacity": 1.0}
# 13 samples: no number of ranks has equally many, and 3 rows at a time leave a rest.
MESHES = {
    "one device": (1, DENSE, {}),
    "dp": (3, DENSE, {"dp": 3, "microbatches": 2}),
    "more ranks than rows": (4, DENSE, {"dp": 4, "batch": 3}),
    "more rows than samples": (2, DENSE, {"dp": 2, "batch": 60}),
    "cp, tp": (4, DENSE, {"cp": 2, "tp": 2}),
    "cp, padded": (4, DENSE, {"cp": 4, "microbatches": 3}),
    "tp, sequences, fsdp": (4, DENSE, {"tp": 2, "sequence": True, "fsdp": 2}),
    "pp": (2, DENSE, {"pp": 2, "microbatches": 3}),
    "pp, zbv, fsdp": (4, DENSE, {"pp": 2, "fsdp": 2, "schedule": "zbv", "microbatches": 2}),
    "experts on one device": (1, EXPERTS, {}),
    "fsdp, ep": (2, EXPERTS, {"fsdp": 2, "ep": 2}),
    "pp, dp, ep": (4, EXPERTS, {"pp": 2, "dp": 2, "ep": 2}),
}


def documents() -> list[Any]:
    """The parity's documents and a few tokens more, so that the samples do not divide."""
    return [*parity.documents(), *parity.documents()[2:4], parity.documents()[0]]


def evaluated(run: Runtime, cfg: Config) -> tuple[dict, list[float], list[int], int]:
    """On each rank: its pieces of the weights, the loss, told twice, and in one evaluation the samples it read and the
    labels it had.
    """
    built = parity.built(run, cfg, documents())
    first, cut, seen, labels = built.evaluate(), built.rows.cut, [], 0

    def counting(batch):
        nonlocal labels
        seen.extend(batch.where.samples.tolist())
        part = cut(batch)
        labels += int((part.labels != IGNORE).sum())
        return part

    built.rows.cut = counting
    return parity.weights(built), [first, built.evaluate()], seen, labels


def by_reference(cfg: Config, weights: dict[str, torch.Tensor]) -> tuple[float, int, int]:
    """The loss, the number of labels and of samples, one sample after the other, each whole."""
    model, texts = cfg.model, documents()
    shape = {"heads": model.heads, "kv_heads": model.kv_heads, "base": model.rope_base, "padding": len(texts)}
    shape |= {"experts": {name: getattr(model, name) for name in parity.OF_ROUTERS}}
    total, count, (tokens, owners) = 0.0, 0, stream(texts)
    for number in range(sample_count(tokens, parity.CONTEXT)):
        row = sample(tokens, owners, parity.CONTEXT, number)
        ids, labels, docs, positions = (torch.tensor([each]) for each in row)
        total += loss_sum(routed_forward(weights, ids, docs, positions, **shape)[0], labels).item()
        count += int((labels != IGNORED).sum())
    return total / count, count, sample_count(tokens, parity.CONTEXT)


@pytest.mark.parametrize("name", MESHES)
def test_every_sample_counts_once(pool, name):
    ranks, model, settings = MESHES[name]
    cfg = parity.config(**model, **settings)
    results = pool.run(ranks, evaluated, cfg)
    right, labels, samples = by_reference(cfg, parity.whole([weights for weights, *_ in results]))
    assert all(abs(loss - right) <= 1e-13 * right for _, losses, *_ in results for loss in losses)
    # Ranks of pp, and of tp, have the same labels; ranks of cp parts of the same rows.
    same_rows, same_labels = cfg.mesh.pp * cfg.mesh.tp * cfg.mesh.cp, cfg.mesh.pp * cfg.mesh.tp
    assert Counter(number for *_, seen, _ in results for number in seen) == dict.fromkeys(range(samples), same_rows)
    assert sum(had for *_, had in results) == labels * same_labels
    assert samples % 2 and samples % 3 and samples % 4
