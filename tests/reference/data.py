"""Packed rows: all documents end to end, cut into samples of T tokens, in a new random order each epoch."""

import numpy as np
import torch

from tests.reference.rng import key, permutation

IGNORED = -100  # the label of a slot that counts for nothing


def stream(documents):
    """The tokens of all documents, end to end, and the number of the document that each belongs to: two lists."""
    tokens = [int(token) for document in documents for token in document]
    owners = [number for number, document in enumerate(documents) for _ in document]
    return tokens, owners


def sample_count(tokens, T):
    """How many samples it takes until every token but the first has had its turn as a label."""
    return -(-(len(tokens) - 1) // T)


def sample(tokens, owners, T, s):
    """Sample `s` of the stream: ids, labels, docs and positions, lists of T."""
    ids, labels, docs, positions = [], [], [], []
    padding = owners[-1] + 1  # the slots behind the stream's end are a document of their own
    for slot in range(T):
        at = s * T + slot
        inside = at < len(tokens)
        ids.append(tokens[at] if inside else 0)
        docs.append(owners[at] if inside else padding)
        has_next = at + 1 < len(tokens) and owners[at] == owners[at + 1]
        labels.append(tokens[at + 1] if has_next else IGNORED)
        positions.append(slot - docs.index(docs[slot]))  # index: the first slot of the same document
    return ids, labels, docs, positions


def batch(documents, T, B, step, seed):
    """The rows of one step: ids, labels, docs, positions [B, T], and the samples' numbers [B], counted for ever."""
    tokens, owners = stream(documents)
    n = sample_count(tokens, T)
    if n < 1:
        raise ValueError(f"a stream of {len(tokens)} tokens has no pair of neighbours; give documents with two or more")
    numbers = [step * B + row for row in range(B)]
    order = [permutation(key(seed, "data order", j // n), j % n, n) for j in numbers]
    rows = np.array([sample(tokens, owners, T, s) for s in order], dtype=np.int64)  # [B, 4, T]
    ids, labels, docs, positions = torch.from_numpy(rows).unbind(1)
    return ids, labels, docs, positions, torch.tensor(numbers)
