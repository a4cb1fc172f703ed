"""Text from a trained model, token by token, with the draws made by counter: the same text on every rank and mesh."""

import torch

from collectives import rng
from nd_mesh.model import GPT, Where


@torch.no_grad()
def generate(
    model: GPT,
    prompt: list[int],
    length: int,
    *,
    context: int,
    vocab: int,
    seed: int,
    temperature: float = 0.8,
    multiple: int = 1,
    device: torch.device | None = None,
) -> list[int]:
    """The prompt and `length` more tokens less than `vocab`, drawn from the logits over the last `context` tokens.

    Every rank of a mesh calls it, since forward may communicate. Rows are padded at their end, where no token before
    sees it, to a length that `multiple` divides. No cache of keys and values: a forward pass a token.
    """
    model.eval()
    tokens = list(prompt)
    for draw in rng.uniform(rng.key(seed, "sample"), torch.arange(length)).tolist():
        window = tokens[-context:]
        ids = torch.tensor([window + [0] * (-len(window) % multiple)], device=device)
        slots = torch.arange(ids.shape[1], device=device)
        where = Where(0, slots[:1], slots, slots, context, slots[None], torch.zeros_like(ids))
        logits = model.logits(model(ids, where=where))[0, len(window) - 1, :vocab].double()
        chances = (logits / temperature).softmax(0).cumsum(0)
        tokens.append(min(int((chances < draw).sum()), len(chances) - 1))
    model.train()
    return tokens
