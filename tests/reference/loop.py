"""Training as one process would do it: the whole batch at once, every step recorded for comparison."""

import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from tests.reference.data import IGNORED, batch, sample, sample_count, stream
from tests.reference.ffn import balance_loss, moved, z_loss
from tests.reference.model import forward, loss_sum, routed_forward


@dataclass(frozen=True)
class Record:
    """One step. Gradients are those before clipping, parameters those after the update.

    The loss is the cross-entropy alone, the gradients are of the sum of all losses. Of each mixture, by the number of
    its layer: its losses, without their coefficients, or 0 if nobody asks for them; how many choices fell on each
    expert [E]; how many were dropped. By their names the biases [E] after the update.
    """

    loss: float
    count: int
    grad_norm: float
    grads: dict[str, torch.Tensor]
    params: dict[str, torch.Tensor]
    lr: float
    balance: dict[int, float] = field(default_factory=dict)
    z: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, torch.Tensor] = field(default_factory=dict)
    dropped: dict[int, int] = field(default_factory=dict)
    biases: dict[str, torch.Tensor] = field(default_factory=dict)


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
    experts=None,
):
    """Train from `weights` (left as they are) for `steps` steps: a Record for each.

    experts: the settings of the mixtures, if there are any (ffn.py), with the coefficients balance and z_loss of their
    losses, and the rate bias_rate at which a bias follows the load.
    """
    if tied == ("head.weight" in weights):
        raise ValueError(f"tied={tied}, but the weights are {sorted(weights)}; tied weights have no head.weight")
    params = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
    update = make_optimizer(params, optimizer, weight_decay=weight_decay, betas=betas, eps=eps, momentum=momentum)

    ask = {"balance": 0.0, "z_loss": 0.0, "bias_rate": 0.0} | (experts or {})
    routers = {name: len(weight) for name, weight in weights.items() if name.endswith("router.weight")}
    biases = {name.replace("weight", "bias"): torch.zeros(E, dtype=torch.float64) for name, E in routers.items()}
    biases = biases if ask["bias_rate"] else {}

    records = []
    for step in range(steps):
        ids, labels, docs, positions, numbers = batch(documents, T, B, step, seed)
        logits, routings = routed_forward(
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
            experts=experts,
            biases=biases,
            padding=len(documents),
        )
        count = int((labels != IGNORED).sum())
        loss = loss_sum(logits, labels) / max(count, 1)  # no label at all: 0, without a gradient
        balance, z = routers_losses(routings, (labels != IGNORED).any(1), ask)

        update.zero_grad()
        (loss + ask["balance"] * sum(balance.values()) + ask["z_loss"] * sum(z.values())).backward()
        grads = {name: p.grad.clone() for name, p in params.items()}
        grad_norm = math.sqrt(sum(float((g * g).sum()) for g in grads.values()))

        rate = lr_at(step, lr, warmup, total_steps, min_lr_ratio)
        if count > 0:  # else nothing moves: no decay, no momentum, no count of steps in the optimizer
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(params.values(), clip)
            for group in update.param_groups:
                group["lr"] = rate
            update.step()
            biases = {name: moved(bias, load(routings, name), ask["bias_rate"]) for name, bias in biases.items()}

        after = {name: p.detach().clone() for name, p in params.items()}
        of_mixtures = {
            "balance": {i: value.item() for i, value in balance.items()},
            "z": {i: value.item() for i, value in z.items()},
            "tokens": {i: routing.chosen.sum((0, 1)) for i, routing in routings.items()},
            "dropped": {i: int((routing.chosen & ~routing.kept).sum()) for i, routing in routings.items()},
            "biases": biases,
        }
        records.append(Record(loss.item(), count, grad_norm, grads, after, rate, **of_mixtures))
    return records


def load(routings, name):
    """The choices [E] that fell on the experts of the router whose bias has this name."""
    return routings[int(name.split(".")[1])].chosen.sum((0, 1))


def routers_losses(routings, labelled, ask):
    """The balance losses and the z-losses, by layer; 0 where nobody asks for them. labelled [B]: rows with a label."""
    zero = torch.tensor(0.0, dtype=torch.float64)
    balance = {i: balance_loss(r, ask["choices"], labelled) if ask["balance"] else zero for i, r in routings.items()}
    z = {i: z_loss(r) if ask["z_loss"] else zero for i, r in routings.items()}
    return balance, z


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
