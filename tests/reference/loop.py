"""Training as one process would do it: the whole batch at once, every step recorded for comparison."""

import math
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import torch

from tests.reference.data import IGNORED, batch, sample, sample_count, stream
from tests.reference.model import forward, loss_sum


@dataclass(frozen=True)
class Record:
    """One step. Gradients are those before clipping, parameters those after the update."""

    loss: float
    count: int
    grad_norm: float
    grads: dict[str, torch.Tensor]
    params: dict[str, torch.Tensor]
    lr: float


def run(
    weights,
    documents,
    *,
    T,
    B,
    steps,
    seed,
    heads,
    kv_heads,
    tied,
    lr,
    total_steps,
    optimizer="adamw",
    dropout=0.0,
    warmup=0,
    min_lr_ratio=0.1,
    weight_decay=0.0,
    betas=(0.9, 0.95),
    eps=1e-8,
    momentum=0.9,
    clip=None,
    rope_base=10000,
):
    """Train from `weights` (left as they are) for `steps` steps: a Record for each."""
    if tied == ("head.weight" in weights):
        raise ValueError(f"tied={tied}, but the weights are {sorted(weights)}; tied weights have no head.weight")
    params = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
    update = make_optimizer(params, optimizer, weight_decay=weight_decay, betas=betas, eps=eps, momentum=momentum)

    records = []
    for step in range(steps):
        ids, labels, docs, positions, numbers = batch(documents, T, B, step, seed)
        logits = forward(
            params,
            ids,
            docs,
            positions,
            heads=heads,
            kv_heads=kv_heads,
            dropout=dropout,
            seed=seed,
            step=step,
            numbers=numbers,
            base=rope_base,
        )
        count = int((labels != IGNORED).sum())
        loss = loss_sum(logits, labels) / max(count, 1)  # no label at all: 0, and so is every gradient

        update.zero_grad()
        loss.backward()
        grads = {name: p.grad.clone() for name, p in params.items()}
        grad_norm = math.sqrt(sum(float((g * g).sum()) for g in grads.values()))

        rate = lr_at(step, lr, warmup, total_steps, min_lr_ratio)
        if count > 0:  # else nothing moves: no decay, no momentum, no count of steps in the optimizer
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(params.values(), clip)
            for group in update.param_groups:
                group["lr"] = rate
            update.step()

        after = {name: p.detach().clone() for name, p in params.items()}
        records.append(Record(loss.item(), count, grad_norm, grads, after, rate))
    return records


def make_optimizer(params, optimizer, *, weight_decay, betas, eps, momentum):
    """Torch's optimizer; matrices decay, the norms' gains do not. The learning rate is set at every step."""
    groups = [
        {"params": [p for name, p in params.items() if not name.endswith("norm.weight")], "weight_decay": weight_decay},
        {"params": [p for name, p in params.items() if name.endswith("norm.weight")], "weight_decay": 0.0},
    ]
    if optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=momentum)
    if optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps)
    raise ValueError(f"optimizer={optimizer!r} is not known; use 'sgd' or 'adamw'")


def lr_at(step, lr, warmup, total_steps, min_lr_ratio):
    """A straight line up to `lr`, then half a cosine down to `lr · min_lr_ratio`."""
    if step < warmup:
        return lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, total_steps - warmup)
    return lr * (min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))


@torch.no_grad()
def evaluate(weights, documents, *, T, heads, kv_heads):
    """The mean loss of a token over all samples of a stream, each once, in order, without dropout."""
    tokens, owners = stream(documents)
    total, count = 0.0, 0
    for s in range(sample_count(tokens, T)):
        ids, labels, docs, positions = torch.tensor(sample(tokens, owners, T, s))[:, None]  # four times [1, T]
        logits = forward(weights, ids, docs, positions, heads=heads, kv_heads=kv_heads)
        total += loss_sum(logits, labels).item()
        count += int((labels != IGNORED).sum())
    return total / max(count, 1)


def bigram_loss(train_documents, val_documents, V):
    """Nats a token of the model "count which token follows which, and add one", trained on one stream, on the other."""
    pair_count = Counter(pairs(train_documents))
    first_count = Counter(first for first, _ in pairs(train_documents))
    losses = [-math.log((pair_count[a, b] + 1) / (first_count[a] + V)) for a, b in pairs(val_documents)]
    return math.fsum(losses) / max(len(losses), 1)


def pairs(documents):
    """Every token with the next one, inside documents only."""
    for document in documents:
        yield from pairwise(int(token) for token in document)
