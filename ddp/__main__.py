"""Demo of data parallelism: a small model on rows dealt out to the ranks, beside one process that does the whole batch.

    python -m ddp                                       4 local ranks
    torchrun --standalone --nproc-per-node 2 -m ddp     the ranks of torchrun

The three versions in turn. Every rank starts from weights of its own, which wrap makes rank 0's. 13 rows are dealt out
unevenly; the last four read a second embedding, so some ranks have no row for it; one parameter is used by nobody.
float64, SGD with momentum.
"""

import copy
import hashlib
import math
import sys
from collections.abc import Iterable, Sequence
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from collectives import comm, demo
from collectives.demo import Demo
from collectives.runtime import Runtime
from ddp import bucketed, naive, overlapped

ROWS, SECOND, STEPS, VOCAB, WIDTH, HIDDEN = 13, 4, 4, 512, 128, 384
CAP = 1 << 20  # bytes of a bucket: three of them for this model


class Model(nn.Module):
    """The next token from one token; a second embedding is added to where `second` is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.second = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.unused = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, ids: Tensor, second: Tensor) -> Tensor:
        x = self.embed(ids)  # [B, D]
        if second.any():
            x = x + self.second(ids) * second.unsqueeze(1)
        return self.head(x + self.down(self.up(self.norm(x)).relu()))  # [B, V]


def backward(model: Model, rows: Tensor, batch: Tensor) -> None:
    """The gradient of these rows' part of the loss, which is the mean over the rows of the whole batch."""
    ids, labels = batch[rows].unbind(1)
    (cross_entropy(model(ids, rows >= ROWS - SECOND), labels, reduction="sum") / ROWS).backward()


def alone(model: Model, batches: Tensor) -> tuple[list[list[Tensor]], list[Tensor]]:
    """One process with whole batches: the gradients of each step, and the weights after the last."""
    optimizer, gradients = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), []
    for batch in batches:
        optimizer.zero_grad()
        backward(model, torch.arange(ROWS), batch)
        gradients.append(_gradients(model))
        optimizer.step()
    return gradients, _values(model)


def version(run: Runtime, show: Demo, name: str) -> list[Tensor]:
    """Train by one version beside one process, record what holds; the gradients of the last step."""
    show.part = name
    torch.manual_seed(run.rank)
    model = Model().double()
    settings = {} if name == "naive" else {"cap": CAP}
    wrap = {"naive": naive.wrap, "bucketed": bucketed.wrap, "overlapped": overlapped.wrap}[name]
    handle = wrap(model, run.world, average=False, **settings)  # the sum: each loss is divided by all rows already
    optimizer = torch.optim.SGD(handle.parameters(), lr=0.5, momentum=0.9)
    batches = torch.randint(VOCAB, (STEPS, ROWS, 2), generator=torch.Generator().manual_seed(0))  # the same everywhere
    initial = _values(model)
    expected_gradients, expected = alone(copy.deepcopy(model), batches)
    rows = torch.arange(ROWS).tensor_split(run.size)[run.rank]

    gradient_error = 0.0
    for batch, expected_gradient in zip(batches, expected_gradients, strict=True):
        optimizer.zero_grad()
        before = demo.bytes_written()
        with mock.patch.object(comm, "all_reduce", wraps=comm.all_reduce) as all_reduce:
            with show.time("forward and backward"):
                backward(model, rows, batch)
            early = all_reduce.call_count
            with show.time("finish"):
                handle.finish()
        sent, calls = demo.bytes_since(before), all_reduce.call_count
        gradient_error = max(gradient_error, _error(_gradients(model), expected_gradient, expected_gradient))
        optimizer.step()

    ours = _values(model)
    gradients = [param.grad for param in model.parameters() if param.grad is not None]
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    moved = [after - before for after, before in zip(expected, initial, strict=True)]
    show.parity("gradients", gradient_error, 1e-12)
    show.parity(f"update, {STEPS} steps", _error(ours, expected, moved), 1e-10)
    digest = hashlib.sha256(torch.cat([value.flatten() for value in ours]).numpy()).hexdigest()
    digests = set(comm.all_gather_object(digest, group=run.world))
    show.claim("different replicas", "1, bit for bit", 1, len(digests))
    show.claim("without gradient", "the unused one", 1, len(ours) - len(gradients))
    weights, used = sum(value.nbytes for value in ours), sum(grad.nbytes for grad in gradients)
    if name == "naive":
        n, what, collectives = used, "a gradient, + 1", len(gradients) + 1
    else:
        n, what, collectives = weights + 2 * 8 * len(ours), "a bucket", len(handle.buckets)  # notes: 2 a parameter
    show.claim("all_reduces a step", what, collectives, calls)
    overlap = name == "overlapped"
    show.claim("begun in backward", "all but the last" if overlap else "0", collectives - 1 if overlap else 0, early)
    show.traffic("bytes sent a step", "2n(P-1)/P", 2 * n * (run.size - 1) // run.size, sent, calls=calls)
    held = _memory([*model.parameters(), *gradients, *state])
    show.claim("bytes of state", "weights + n + momentum", weights + n + used, held)
    return gradients


def work(run: Runtime, show: Demo) -> None:
    """All versions on every rank; they must agree to the bit."""
    if run.rank == 0:
        dealt = [len(part) for part in torch.arange(ROWS).tensor_split(run.size)]
        print(f"{ROWS} rows dealt to {run.size} ranks: {dealt}")
    first, *others = [version(run, show, name) for name in ("naive", "bucketed", "overlapped")]
    show.part = "together"
    different = sum(not torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    show.claim("gradients that differ in bits", "0", 0, different)


def _values(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def _gradients(model: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(param) if param.grad is None else param.grad.clone() for param in model.parameters()]


def _error(ours: Iterable[Tensor], expected: Iterable[Tensor], scale: Iterable[Tensor]) -> float:
    """The largest error of any tensor, each as a share of its largest entry in `scale`; absolute where that is zero.
    Infinite where anything is not a number: max(0.0, nan) is 0.0.
    """
    errors = [
        float((a - b).abs().max()) / (float(s.abs().max()) or 1.0)
        for a, b, s in zip(ours, expected, scale, strict=True)
    ]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def _memory(tensors: Sequence[Tensor]) -> int:
    """Bytes of the storages behind these tensors, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


if __name__ == "__main__":
    sys.exit(demo.main(work))
