"""Demo of data parallelism: a small model on rows dealt out to the ranks, beside one process that does the whole batch.

    python -m ddp                                       4 local ranks
    torchrun --standalone --nproc-per-node 2 -m ddp     the ranks of torchrun

Every rank starts from weights of its own, which wrap makes rank 0's. 13 rows are dealt out unevenly; the last four go
through a head of their own, so most ranks have no row for one of the two heads; one parameter is used by nobody.
float64, SGD with momentum.
"""

import copy
import hashlib
import sys
from collections.abc import Iterable
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from collectives import comm, demo
from collectives.demo import Demo
from collectives.runtime import Runtime
from ddp import naive

ROWS, STEPS, VOCAB, WIDTH, HIDDEN = 13, 4, 512, 128, 384


class Model(nn.Module):
    """The next token, from one token, by one of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, VOCAB) for _ in range(2))
        self.unused = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, ids: Tensor, head: int) -> Tensor:
        x = self.embed(ids)  # [B, D]
        x = x + self.down(self.up(self.norm(x)).relu())
        return self.heads[head](x)  # [B, V]


def backward(model: Model, rows: Tensor, batch: Tensor) -> None:
    """The gradient of these rows' part of the loss, which is the mean over the rows of the whole batch."""
    heads = (rows >= ROWS - 4).long()
    for head in heads.unique().tolist():
        ids, labels = batch[rows[heads == head]].unbind(1)
        (cross_entropy(model(ids, head), labels, reduction="sum") / ROWS).backward()


def work(run: Runtime, show: Demo) -> None:
    """Train both ways on every rank, and record what holds."""
    torch.manual_seed(run.rank)
    model = Model().double()
    handle = naive.wrap(model, run.world, average=False)  # the sum: each loss is divided by all rows already
    alone = copy.deepcopy(model)
    initial = _values(model)
    optimizer, reference = (torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (model, alone))
    dealt = torch.arange(ROWS).tensor_split(run.size)
    rows, everything = dealt[run.rank], torch.arange(ROWS)
    batches = torch.randint(VOCAB, (STEPS, ROWS, 2), generator=torch.Generator().manual_seed(0))  # the same everywhere

    gradient_error = 0.0
    for batch in batches:
        optimizer.zero_grad()
        with show.time("forward and backward of this rank's rows"):
            backward(model, rows, batch)
        before = demo.bytes_written()
        with show.time("reduction"), mock.patch.object(comm, "all_reduce", wraps=comm.all_reduce) as all_reduce:
            handle.finish()
        sent, calls = demo.bytes_since(before), all_reduce.call_count

        reference.zero_grad()
        with show.time("forward and backward of all rows in one process"):
            backward(alone, everything, batch)
        expected = _gradients(alone)
        gradient_error = max(gradient_error, _error(_gradients(model), expected, expected))
        optimizer.step()
        reference.step()

    ours, expected = _values(model), _values(alone)
    gradients = [param.grad for param in model.parameters() if param.grad is not None]
    n, weights = sum(grad.nbytes for grad in gradients), sum(value.nbytes for value in ours)
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    moved = [after - before for after, before in zip(expected, initial, strict=True)]
    show.parity("gradients", gradient_error, 1e-12)
    show.parity(f"update, {STEPS} steps", _error(ours, expected, moved), 1e-10)
    digest = hashlib.sha256(torch.cat([value.flatten() for value in ours]).numpy()).hexdigest()
    digests = set(comm.all_gather_object(digest, group=run.world))
    show.claim("different replicas", "1, bit for bit", 1, len(digests))
    show.claim("without gradient", "the unused one", 1, len(ours) - len(gradients))
    show.claim("all_reduces a step", "a gradient, + 1", len(gradients) + 1, calls)
    show.traffic("bytes sent a step", "2n(P-1)/P", 2 * n * (run.size - 1) // run.size, sent, calls=calls)
    held = _memory([*model.parameters(), *gradients, *state])
    show.claim("bytes of state", "3n + the unused", weights + 2 * n, held)
    if run.rank == 0:
        print(f"{ROWS} rows dealt to {run.size} ranks: {[len(part) for part in dealt]}; n = {n:,} bytes of gradients")


def _values(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def _gradients(model: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(param) if param.grad is None else param.grad for param in model.parameters()]


def _error(ours: Iterable[Tensor], expected: Iterable[Tensor], scale: Iterable[Tensor]) -> float:
    """The largest error of any tensor, each as a share of its largest entry in `scale`; absolute where that is zero."""
    largest = [
        float((a - b).abs().max()) / (float(s.abs().max()) or 1.0)
        for a, b, s in zip(ours, expected, scale, strict=True)
    ]
    return max(largest)


def _memory(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind these tensors, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


if __name__ == "__main__":
    sys.exit(demo.main(work))
