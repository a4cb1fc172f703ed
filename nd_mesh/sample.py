"""Text from a trained model, token by token, with the draws made by counter: the same text on every rank and mesh."""

import torch

from collectives import rng
from expert_parallel import Sequences
from nd_mesh.context import Rows
from nd_mesh.data import Batch
from nd_mesh.model import GPT, Where

TEMPERATURE = 0.8  # below 1 likely tokens are likelier than the model says


@torch.no_grad()
def generate(
    model: GPT,
    prompt: list[int],
    length: int,
    *,
    context: int,
    vocab: int,
    seed: int,
    temperature: float = TEMPERATURE,
    rows: Rows | None = None,
    device: torch.device | None = None,
) -> list[int]:
    """The prompt and `length` more tokens less than `vocab`, drawn from the logits over the last `context` tokens.

    Every rank of a mesh calls it, since forward may communicate. rows: how the mesh cuts them, if it does. No cache of
    keys and values: a forward pass a token.
    """
    model.eval()
    tokens = list(prompt)
    for draw in rng.uniform(rng.key(seed, "sample"), torch.arange(length)).tolist():
        window = tokens[-context:]
        ids, slots = torch.tensor([window], device=device), torch.arange(len(window), device=device)
        place = {"sequences": Sequences.whole(ids)}
        batch = Batch(ids, ids, Where(0, slots[:1], slots, slots, context, slots[None], torch.zeros_like(ids), **place))
        batch = rows.cut(batch) if rows else batch
        logits = model.logits(model(batch.ids, where=batch.where))
        logits = (rows.join(logits, len(window)) if rows else logits)[0, -1, :vocab].double()
        chances = (logits / temperature).softmax(0).cumsum(0)
        tokens.append(min(int((chances < draw).sum()), len(chances) - 1))
    model.train()
    return tokens
