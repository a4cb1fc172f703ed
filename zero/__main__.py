"""Demo of ZeRO: one small model trained by stages 0, 1, 2 and 3, beside one process, and what each keeps and sends.

    python -m zero                                       4 local ranks
    python -m zero --figure memory.png                   the bars as a picture too; needs matplotlib
    torchrun --standalone --nproc-per-node 2 -m zero     the ranks of torchrun

Each stage twice. In float64, with AdamW: 13 rows a batch, dealt unevenly to the ranks and to two microbatches. In
bfloat16 with float32 masters: the bytes of every part, by storage, between backward and the update. K is what the
optimizer keeps for a parameter: its master and two moments. Nothing in the model divides evenly; padding is counted in
elements, of p tensors in B buckets. Then stage 2 with masters and moments on the host, in memory and in files.
"""

import contextlib
import hashlib
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from collectives import comm, demo
from collectives.demo import Demo
from collectives.host import FilePool, Moves, Pool
from collectives.layout import Box
from collectives.ledger import Ledger
from collectives.runtime import Runtime
from collectives.watch import watching
from zero import Mixed, stage0, stage1, stage2, stage3
from zero.optimizer import PieceByPiece
from zero.sharded import Sharded

STAGES = (stage0, stage1, stage2, stage3)
ROWS, STEPS, MICROBATCHES, VOCAB, WIDTH, HIDDEN = 13, 3, 2, 509, 97, 211
CAP = 1 << 19  # bytes of a bucket
TRAFFIC = (("2n(P-1)/P", 2), ("2n(P-1)/P", 2), ("(k+1)n(P-1)/P", MICROBATCHES + 1), ("3kn(P-1)/P", 3 * MICROBATCHES))
CALLS = (
    ("B + 1", 1),
    ("2B + 1", 2),
    ("(k+1)B + 1", MICROBATCHES + 1),
    ("3kB + 1", 3 * MICROBATCHES),
)  # B buckets, or layers; 1 agreement
PARTS = ("weights", "gradients", "masters", "moments")
CUT = ((), PARTS[2:], PARTS[1:], PARTS)  # by stage
MEMORY = ("({0}+K)N", "({0}+K/P)N", "(2+({1}+K)/P)N", "({0}+K)N/P")  # N parameters, {1} bytes of gradient, {0} and 2
KINDS = {  # bytes a parameter, part by part
    "K = 12": (Mixed(gradients=torch.bfloat16), (2, 2, 4, 8)),
    "K = 8": (Mixed(gradients=torch.bfloat16, moments=torch.bfloat16), (2, 2, 4, 4)),
    "K = 12, fp32 grads": (Mixed(), (2, 4, 4, 8)),
}
DRAWN = "K = 12"


class Block(nn.Module):
    """A feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())  # [B, D]


class Model(nn.Sequential):
    """The next token from one token, [B] → [B, V]. Every parameter lies in a layer."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(VOCAB, WIDTH), Block(), Block(), nn.Linear(WIDTH, VOCAB))


def work(run: Runtime, show: Demo) -> None:
    """Every stage on every rank; then the bars."""
    held = []
    for stage in range(len(STAGES)):
        train(run, show, stage)
        held.append(memory(run, show, stage))
    offload(run, show)
    if run.rank == 0:
        print(bars(held, run.size))
        if show.figure:
            draw(held, run.size, show.figure)


# -- parity and traffic ------------------------------------------------------------------------------------------------


def train(run: Runtime, show: Demo, stage: int) -> None:
    """A few steps in float64 beside one process. Ranks start from weights of their own, which wrap makes rank 0's."""
    show.part = f"stage {stage}, float64"
    batches = torch.randint(VOCAB, (STEPS, ROWS, 2), generator=torch.Generator().manual_seed(0))  # the same everywhere
    initial, expected_gradients, expected = alone(batches)
    torch.manual_seed(run.rank)
    model = Model().double()
    handle = STAGES[stage].wrap(model, run.world, average=False, cap=CAP)  # the sum: a loss is divided by all rows
    optimizer = handle.optimizer(adamw(handle.parameters()))
    if run.rank == 0:
        print(f"stage {stage}: {handle.padding()}; k = {MICROBATCHES} microbatches", flush=True)

    gradient_error = 0.0
    for batch, expected_gradient in zip(batches, expected_gradients, strict=True):
        optimizer.zero_grad()
        before = demo.bytes_written()
        with watching(book := Ledger()):
            with show.time("forward, backward, finish"):
                backward(model, handle, batch.tensor_split(run.size)[run.rank])
            with show.time("update and gather"):
                optimizer.step()
                handle.after_step()
        sent = demo.bytes_since(before)
        gradient_error = max(gradient_error, error_of_shards(handle, expected_gradient))

    with handle.whole():
        ours = {name: param.detach().clone() for name, param in model.named_parameters()}
    moved = {name: float((expected[name] - value).abs().max()) for name, value in initial.items()}
    update_error = max(worst(value - expected[name], moved[name]) for name, value in ours.items())
    show.parity("gradients", gradient_error, 1e-12)
    show.parity(f"update, {STEPS} steps", update_error, 1e-10)
    digest = hashlib.sha256(torch.cat([value.flatten() for value in ours.values()]).numpy()).hexdigest()
    replicas = len(set(comm.all_gather_object(digest, group=run.world)))
    show.claim("different replicas", "1, bit for bit", 1, replicas)
    calls = sum(row.calls for row in book.rows())
    formula, times = CALLS[stage]
    show.claim("collectives a step", formula, times * len(handle.buckets) + 1, calls)
    formula, times = TRAFFIC[stage]
    n = sum(value.nbytes for value in ours.values())
    show.traffic("bytes sent a step", formula, times * n * (run.size - 1) // run.size, sent, calls=calls)


def alone(batches: Tensor) -> tuple[dict[str, Tensor], list[dict[str, Tensor]], dict[str, Tensor]]:
    """One process with whole batches: the weights, the gradients of each step, and the weights after the last."""
    torch.manual_seed(0)
    model, gradients = Model().double(), []
    initial = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = adamw(model.parameters())
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        gradients.append({name: param.grad.clone() for name, param in model.named_parameters()})
        optimizer.step()
    return initial, gradients, {name: param.detach() for name, param in model.named_parameters()}


def adamw(params: Sequence[nn.Parameter]) -> torch.optim.AdamW:
    """eps is large, because Adam divides by the gradient: noise in a tiny one would be a large part of the update."""
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-4)


def loss_of(model: Model, rows: Tensor) -> Tensor:
    """These rows' part of the loss, which is the mean over the rows of the whole batch."""
    ids, labels = rows.unbind(1)
    return cross_entropy(model(ids), labels, reduction="sum") / ROWS


def backward(model: Model, handle: Sharded, rows: Tensor) -> None:
    """The gradient of all ranks' rows, in the shards."""
    for i, part in enumerate(rows.tensor_split(MICROBATCHES), start=1):
        with contextlib.nullcontext() if i == MICROBATCHES else handle.no_sync():
            loss_of(model, part).backward()
    handle.finish()


def error_of_shards(handle: Sharded, expected: Mapping[str, Tensor]) -> float:
    """The largest error of this rank's gradients, each as a share of its tensor's largest entry."""
    errors = [0.0]
    for shard in handle.parameters():
        whole, start = expected[shard.held.name], 0
        for box in shard.held.boxes:
            ours = shard.grad[start : start + box.numel].view(box.local)
            errors.append(worst(ours - whole[box.slices(Box.whole(whole.shape))], float(whole.abs().max())))
            start += box.numel
    return max(errors)


def worst(difference: Tensor, scale: float) -> float:
    """The largest entry as a share of `scale`; infinite where one is not a number: max(0.0, nan) is 0.0."""
    largest = float(difference.abs().max()) / scale
    return largest if math.isfinite(largest) else math.inf


# -- memory ------------------------------------------------------------------------------------------------------------


def memory(run: Runtime, show: Demo, stage: int) -> list[float]:
    """Bytes by part in mixed precision, with every kind of optimizer; of the first kind bytes a parameter."""
    show.part = f"stage {stage}, bfloat16"
    shares = [run.size if part in CUT[stage] else 1 for part in PARTS]
    for kind, (mixed, each) in KINDS.items():
        handle, found = after_backward(run, stage, mixed)
        cuts = [bucket.partition for bucket in handle.buckets]
        numel, padding = sum(cut.numel for cut in cuts), sum(cut.padding for cut in cuts)
        whole = [nbytes * numel / share for nbytes, share in zip(each, shares, strict=True)]
        formula = MEMORY[stage].format(each[0] + each[1], each[1])
        show.claim(kind, formula, sum(whole), sum(found.values()), allowed=sum(each) * padding)
        if kind == DRAWN:
            limit = 31 * len(handle.params) + (run.size - 1) * len(cuts)
            show.claim("  padding", "≤ 31p + (P-1)B", 0, padding, allowed=limit)
            for part, nbytes, share in zip(PARTS[:3], each, shares, strict=False):
                formula = f"{nbytes}(N + padding)" + ("/P" if share > 1 else "")
                show.claim(f"  {part}", formula, nbytes * (numel + padding) / share, found[part])
            # of what this rank has of the padding there is none
            formula = f"{each[3]}N" + ("/P" if shares[3] > 1 else "")
            show.claim("  moments", formula, whole[3], found["moments"], allowed=each[3] * padding)
            drawn = [found[part] / numel for part in PARTS]
    return drawn


def after_backward(run: Runtime, stage: int, mixed: Mixed) -> tuple[Sharded, dict[str, int]]:
    """A handle, and the bytes of each part after its second step's backward."""
    model, handle, optimizer = in_bfloat16(run, stage, mixed)
    half_a_step(run, model, handle)
    optimizer.step()
    handle.after_step()
    optimizer.zero_grad()
    half_a_step(run, model, handle)
    return handle, parts(model, handle, optimizer)


def in_bfloat16(
    run: Runtime, stage: int, mixed: Mixed, host: Pool | None = None
) -> tuple[Model, Sharded, torch.optim.Optimizer]:
    """The same model every time."""
    torch.manual_seed(0)
    model = Model()
    handle = STAGES[stage].wrap(model, run.world, average=False, cap=CAP, mixed=mixed, host=host)
    return model, handle, handle.optimizer(adamw(handle.parameters()))


def half_a_step(run: Runtime, model: Model, handle: Sharded) -> None:
    """The gradients of the same rows every time."""
    rows = torch.randint(VOCAB, (ROWS, 2), generator=torch.Generator().manual_seed(0))
    backward(model, handle, rows.tensor_split(run.size)[run.rank])


def parts(model: Model, handle: Sharded, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of the storages behind each part; AdamW's counts of steps, 4 bytes a tensor, are left out."""
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    tensors = {
        "weights": [weights for bucket in handle.buckets for weights in (bucket.weights, bucket.shard)],
        "gradients": [*(shard.grad for shard in handle.parameters()), *(bucket.full for bucket in handle.buckets)],
        "masters": handle.parameters(),
        "moments": [value for value in state if isinstance(value, Tensor) and value.dim()],
    }
    seen: dict[int, tuple[str, int]] = {}
    for part, members in tensors.items():
        for storage in (tensor.untyped_storage() for tensor in members if tensor is not None):
            seen.setdefault(storage.data_ptr(), (part, storage.nbytes()))
    return {part: sum(nbytes for of, nbytes in seen.values() if of == part) for part in PARTS}


def offload(run: Runtime, show: Demo) -> None:
    """Two steps of stage 2 with masters and moments on the device, then in host memory, in files: the same bits."""
    expected: list[Tensor] = []
    with tempfile.TemporaryDirectory() as folder:
        pools = {
            "none": lambda: None,
            "in host memory": lambda: Pool(run.device),
            "in files": lambda: FilePool(folder, run.device),
        }
        for place, make in pools.items():
            host = make()
            show.part = f"offload, {place}"
            model, handle, optimizer = in_bfloat16(run, 2, Mixed(), host)
            for _ in range(2):
                optimizer.zero_grad()
                half_a_step(run, model, handle)
                moved = host.moves if host else None
                with show.time("update and gather"):
                    optimizer.step()
                    handle.after_step()
            ours = [param.detach() for param in model.parameters()]
            expected = expected or ours
            different = sum(not torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
            show.claim("weights that differ", "0, bit for bit", 0, different)
            if host is not None:
                told(run, show, handle, optimizer, host.moves - moved)


def told(run: Runtime, show: Demo, handle: Sharded, optimizer: PieceByPiece, moved: Moves) -> None:
    """What is where, and what a step moves: masters are read once more, for the weights that are made of them. Those of
    padding too.
    """
    owned, row = sum(shard.numel() for shard in handle.parameters()), sum(b.partition.length for b in handle.buckets)
    show.claim("bytes on the host", "(4 + 8)N/P", 4 * row + 8 * owned, optimizer.pool.host.now)
    show.claim("bytes read a step", "(12 + 4)N/P", 12 * owned + 4 * row, moved.read)
    show.claim("bytes written a step", "12N/P", 12 * owned, moved.written)
    if run.rank == 0:
        print(f"{show.part}: {optimizer.offload.report()}", flush=True)


def bars(held: Sequence[Sequence[float]], ranks: int) -> str:
    """Bytes a parameter as text: four letters a byte."""
    lines = [f"bytes a parameter on each of {ranks} ranks, {DRAWN}: weights, gradients, masters, moments (o)"]
    for stage, each in enumerate(held):
        bar = "".join(letter * round(4 * nbytes) for letter, nbytes in zip("wgmo", each, strict=True))
        lines.append(f"  stage {stage} {sum(each):6.2f}  {bar}")
    return "\n".join(lines)


def draw(held: Sequence[Sequence[float]], ranks: int, path: Path) -> None:
    """The same as a picture."""
    import matplotlib  # noqa: PLC0415, an extra

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
    stages, left = [f"stage {stage}" for stage in range(len(held))], [0.0] * len(held)
    for part, widths in zip(PARTS, zip(*held, strict=True), strict=True):
        axes.barh(stages, widths, left=left, label=part)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    axes.bar_label(axes.containers[-1], labels=[f"{total:.2f}" for total in left], padding=3)
    axes.margins(x=0.1)  # room for the last label
    axes.invert_yaxis()
    axes.set_xlabel(f"bytes a parameter on each of {ranks} ranks, after backward; bfloat16, {DRAWN}")
    axes.legend()
    figure.savefig(path, dpi=80)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(demo.main(work, figure="memory by part as bars"))
