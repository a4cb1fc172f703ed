"""Demo of checkpoints: a run is killed while it saves, and goes on, on as many ranks, on 3 and on 2.

    python -m checkpoint                                       4 local ranks
    torchrun --standalone --nproc-per-node 2 -m checkpoint     the ranks of torchrun: nothing is killed or started again
    python -m checkpoint inspect FOLDER                        what a checkpoint, or a folder of them, holds
    python -m checkpoint verify FOLDER                         hash every byte of it

In float64, with AdamW and a learning-rate schedule. The run that is killed has saved step 6 and is writing step 9. N
parameters in T tensors, P ranks; n are the bytes of parameters, two moments and counters: 24N + 4T.
"""

import math
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

from checkpoint import Checkpoints, Keep, Saved, State, find, inspect, random_state, restore, training
from checkpoint.dtypes import DTYPES
from checkpoint.files import Bytes, Files
from collectives import comm, demo, runtime
from collectives.agreement import Stopped
from collectives.demo import Demo
from collectives.layout import Box, Held
from collectives.runtime import Runtime

ROWS, STEPS, EVERY, VOCAB, WIDTH, HIDDEN = 13, 12, 3, 211, 97, 331
KILLED = 9  # the step whose save does not end
RESUMED = KILLED - EVERY
CUT = {"embed.weight": 0, "up.weight": 0, "up.bias": 0, "down.weight": 1}  # along this dim; every rank has the others


class Model(nn.Module):
    """The next token from one token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, WIDTH), nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + self.down(gelu(self.up(self.norm(x)))))  # [B] → [B, V]


# -- a run, sharded by hand --------------------------------------------------------------------------------------------


class Shards:
    """Every rank computes with whole weights; of those in CUT it updates a piece, and has its moments alone."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup):
        self.group, self.pairs = group, []
        for name, whole in model.named_parameters():
            box = piece(name, whole.shape, group.rank(), group.size())
            shard = nn.Parameter(whole.detach()[box.slices(Box.whole(whole.shape))].clone())
            shard.held = Held(name, (box,), None, decay=True)
            self.pairs.append((shard, box, whole))

    def reduce(self) -> None:
        """Add the gradients of all ranks; each shard gets its part."""
        for shard, box, whole in self.pairs:
            comm.all_reduce(whole.grad, group=self.group, ordered=True)
            shard.grad = whole.grad[box.slices(Box.whole(whole.shape))].contiguous()
            whole.grad = None

    @torch.no_grad()
    def gather(self) -> None:
        """Make the weights whole again."""
        for shard, box, whole in self.pairs:
            whole.zero_()[box.slices(Box.whole(whole.shape))] = shard
            if box.numel < whole.numel():
                comm.all_reduce(whole.data, group=self.group)


def piece(name: str, shape: Sequence[int], rank: int, size: int) -> Box:
    """What a rank has of a tensor."""
    whole = Box.whole(shape)
    if name not in CUT:
        return whole
    dim = CUT[name]
    return whole.cut(dim, first := shape[dim] * rank // size, shape[dim] * (rank + 1) // size - first)


class Training:
    """A run on the ranks of a group."""

    def __init__(self, group: dist.ProcessGroup):
        torch.manual_seed(0)
        random.seed(0)  # its state is text, whose length the README tells
        self.group, self.model = group, Model().double()
        self.shards = Shards(self.model, group)
        self.params = [shard for shard, _, _ in self.shards.pairs]
        self.optimizer, self.schedule = adamw(self.params)
        self.losses: list[float] = []  # of the steps so far

    @property
    def step(self) -> int:
        """The steps that are done."""
        return len(self.losses)

    def run(self, stop: int) -> Iterator[int]:
        """Train to a step; yields after each."""
        while self.step < stop:
            ids, labels = batch(self.step).tensor_split(self.group.size())[self.group.rank()].unbind(1)
            loss = cross_entropy(self.model(ids), labels, reduction="sum") / ROWS
            loss.backward()
            self.shards.reduce()
            self.optimizer.step()
            self.schedule.step()
            self.shards.gather()
            comm.all_reduce(total := loss.detach(), group=self.group, ordered=True)
            self.losses.append(total.item())
            yield self.step

    def state(self) -> State:
        """All that the run needs to go on."""
        shared = {"losses": self.losses, "rows": ROWS * self.step, "schedule": self.schedule.state_dict()}
        return State(training(self.params, self.optimizer), shared, own={"random": random_state.capture()})

    def load(self, saved: Saved) -> None:
        """Go on where a checkpoint was made, on whatever ranks."""
        restore(saved, self.params, self.optimizer)
        self.shards.gather()
        self.losses = saved.shared["losses"]
        self.schedule.load_state_dict(saved.shared["schedule"])
        for settings, rate in zip(self.optimizer.param_groups, self.schedule.get_last_lr(), strict=True):
            settings["lr"] = rate  # which the schedule sets after the next step, not now
        if saved.own:  # as many ranks as before
            random_state.restore(saved.own["random"])


def adamw(params: Iterable[nn.Parameter]) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LRScheduler]:
    """eps is large, because Adam divides by the gradient: noise in a tiny one would be a large part of the update."""
    optimizer = torch.optim.AdamW(params, lr=1e-2, eps=1e-4)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def batch(step: int) -> Tensor:
    """The rows of a step, the same everywhere: so the step is all that a checkpoint must know of the data."""
    return torch.randint(VOCAB, (ROWS, 2), generator=torch.Generator().manual_seed(step))


# -- jobs that end and start again -------------------------------------------------------------------------------------


class Struck(Files):
    """Storage on which this process is killed in the middle of its file of one step."""

    def write(self, path: Path, chunks: Iterable[Bytes]) -> None:
        """Every file but that one."""
        super().write(path, self._until_killed(chunks) if f"{KILLED}.tmp" in path.parent.name else chunks)

    def _until_killed(self, chunks: Iterable[Bytes]) -> Iterator[Bytes]:
        for count, chunk in enumerate(chunks):
            if count == 6:  # the header and five pieces are in it
                os.kill(os.getpid(), signal.SIGKILL)
            yield chunk


def lives(path: Path, ranks: int, timeout: float) -> int:
    """A job that is killed, and the jobs that go on from what it has left; the status of these."""
    adamw([nn.Parameter(torch.empty(0))])  # what torch imports for its first optimizer it imports here, for all ranks
    print(f"{ranks} ranks train; one is killed by SIGKILL while step {KILLED} is being written", flush=True)
    runtime.launch(partial(life, path, timeout), ranks)
    inspect.main(["inspect", str(path / "run")])
    return max(runtime.launch(partial(next_life, path, timeout), size) for size in dict.fromkeys((ranks, 3, 2)))


def life(path: Path, timeout: float) -> None:
    """Train, save every few steps, and be killed."""
    mute(path)
    with runtime.start(timeout=timeout) as run:
        struck = Struck() if run.rank == run.size - 1 else Files()
        with checkpoints_of(run, path / "run", log=partial(print, flush=True), files=struck) as checkpoints:
            trainer = Training(run.world)
            for step in trainer.run(STEPS):
                if step == KILLED:
                    checkpoints.wait()  # the one before it is durable, so the end is the same every time
                if step % EVERY == 0:
                    checkpoints.save_async(step, trainer.state())


def mute(path: Path) -> None:
    """What ranks have to say when they lose one of them goes into a file."""
    os.dup2(os.open(path / "stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND), sys.stderr.fileno())


def next_life(path: Path, timeout: float) -> None:
    """Go on from the newest checkpoint to the end, and save that."""
    with runtime.start(timeout=timeout) as run:
        saved = find(path / "run", group=run.world, verify=True)
        if run.rank == 0:
            print(f"{run.size} ranks go on from {saved.path.name}", flush=True)
        go_on(saved, path / f"on-{run.size}")


def go_on(saved: Saved, path: Path) -> Saved:
    """Train from a checkpoint to the end; the checkpoint of that."""
    trainer = Training(saved.group)
    trainer.load(saved)
    for _ in trainer.run(STEPS):
        pass
    with Checkpoints(path, saved.group) as checkpoints:
        checkpoints.save(STEPS, trainer.state())
        return checkpoints.open()


def checkpoints_of(run: Runtime, path: Path, **settings: Any) -> Checkpoints:
    """With what asynchronous saves need."""
    writers = run.new_group(range(run.size), "writers", backend="gloo")
    return Checkpoints(path, run.world, writer_group=writers, **settings)


class Counted(Files):
    """Storage that counts what this process writes."""

    written = 0

    def write(self, path: Path, chunks: Iterable[Bytes]) -> None:
        """Any file."""
        super().write(path, chunks)
        self.written += path.stat().st_size


# -- what is claimed ---------------------------------------------------------------------------------------------------


def work(run: Runtime, show: Demo, path: Path) -> None:
    """A run that nobody kills; those that were, beside it; what is on the disk, and what happens when it is damaged."""
    path = Path(comm.all_gather_object(str(path), group=run.world)[0])  # rank 0's, under torchrun
    reference = alone()
    whole = uninterrupted(run, show, path / "whole")
    judge(show, whole, reference)
    killed = path / "run"
    if killed.exists():
        before = find(killed, group=run.world)
        resumed = [find(path / f"on-{size}", group=run.world) for size in dict.fromkeys((run.size, 3, 2))]
    else:
        if run.rank == 0:
            print("under torchrun nothing is killed or started again: what goes on does so in the same processes")
        resumed = [go_on(find(path / f"whole/step-{KILLED:06d}", group=run.world), path / "again")]
    for saved in resumed:
        compare(run, show, saved, whole)
    if run.rank == 0:
        columns = {f"{run.size} ranks": whole.shared["losses"]}
        if killed.exists():
            columns["the killed one"] = before.shared["losses"]
        table(reference, columns | {f"resumed on {saved.manifest.world}": saved.shared["losses"] for saved in resumed})
    on_disk(run, show, whole)
    damaged(run, show, whole)


class Reference(NamedTuple):
    """What one process does with whole batches. Tensors by name."""

    losses: list[float]
    moved: dict[str, float]  # the largest step of each tensor
    last: dict[str, Tensor]


def alone() -> Reference:
    """The losses, and the weights after the last step."""
    torch.manual_seed(0)
    model, losses = Model().double(), []
    first = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer, schedule = adamw(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        ids, labels = batch(step).unbind(1)
        loss = cross_entropy(model(ids), labels, reduction="sum") / ROWS
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    last = {name: param.detach() for name, param in model.named_parameters()}
    return Reference(losses, {name: float((last[name] - first[name]).abs().max()) for name in last}, last)


def uninterrupted(run: Runtime, show: Demo, path: Path) -> Saved:
    """Train to the end, saving behind it, and the last step in front of it; the last checkpoint."""
    show.part = f"{run.size} ranks, not interrupted"
    files = Counted()
    with checkpoints_of(run, path, keep=Keep(last=2), files=files) as checkpoints:
        trainer = Training(run.world)
        for step in trainer.run(STEPS):
            if step % EVERY == 0 and step < STEPS:
                with show.time("training stands still in save_async"):
                    checkpoints.save_async(step, trainer.state())
        checkpoints.wait()
        files.written, before = 0, demo.bytes_written()
        with show.time("save, until durable"):
            checkpoints.save(STEPS, trainer.state())
        wrote = demo.bytes_since(before)
        saved = checkpoints.open(verify=True)
    if run.rank == 0 and wrote:
        print(
            f"rank 0 wrote {files.written:,} bytes into files in the last save and {wrote - files.written:,} to sockets"
        )
    staged = sum(slot.nbytes for slot in checkpoints._staging._slots if slot is not None)
    counts = comm.all_gather_object((files.written, sum(param.numel() for param in trainer.params)), group=run.world)
    there = sum(file.stat().st_size for file in saved.path.iterdir())
    show.claim("written by all ranks, bytes", "the folder", there, sum(written for written, _ in counts))
    weights = [tensor for name, tensor in saved.manifest.tensors.items() if name.startswith("parameter/")]
    total = sum(math.prod(tensor.shape) for tensor in weights)
    copied = sum(whole.numel() for _, box, whole in trainer.shards.pairs if box.numel == whole.numel())
    slots = 2 * state_bytes(saved) / run.size
    show.claim("staging of a rank, bytes", "2n/P, within 5 %", slots, staged, allowed=0.05 * slots)
    if run.size > 1:
        show.claim("held by all ranks", "N + (P-1)C", total + (run.size - 1) * copied, sum(held for _, held in counts))
    stored = sum(math.prod(part.local) for tensor in weights for part in tensor.pieces)
    show.claim("written, copies once", "N", total, stored)
    return saved


def state_bytes(saved: Saved) -> int:
    """n: of each parameter three tensors in float64, and a counter in float32."""
    names = [name for name in saved.tensors if name.startswith("parameter/")]
    return 24 * sum(math.prod(saved.tensors[name][1]) for name in names) + 4 * len(names)


def judge(show: Demo, whole: Saved, reference: "Reference") -> None:
    """Parity of losses, and of the weights after the last step."""
    errors = [abs(a - b) / b for a, b in zip(whole.shared["losses"], reference.losses, strict=True)]
    show.parity(f"losses, {STEPS} steps", max(errors), 1e-12)
    last = tensors_of(whole)
    differences = {name: last[f"parameter/{name}"] - value for name, value in reference.last.items()}
    update = max(float(value.abs().max()) / reference.moved[name] for name, value in differences.items())
    show.parity("update", update, 1e-10)


def tensors_of(saved: Saved) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole, on every rank."""
    found = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in saved.tensors.items()}
    saved.read({name: [(Box.whole(tensor.shape), tensor)] for name, tensor in found.items()})
    return found


def compare(run: Runtime, show: Demo, saved: Saved, whole: Saved) -> None:
    """A run that was resumed beside the one that was not interrupted: every tensor, moments and counters too."""
    size = saved.manifest.world
    show.part = f"resumed on {size} ranks"
    errors = [abs(a - b) / b for a, b in zip(saved.shared["losses"], whole.shared["losses"], strict=True)]
    show.parity("losses", max(errors), 1e-12)
    ours, theirs = tensors_of(saved), tensors_of(whole)
    unlike = [name for name, value in ours.items() if not torch.equal(value, theirs[name])]
    if size == run.size:
        show.claim("tensors not bitwise equal", "0", 0, len(unlike))
    errors = [float((value - theirs[name]).abs().max() / theirs[name].abs().max()) for name, value in ours.items()]
    show.parity("weights, moments", max(errors), 1e-10)


def table(reference: "Reference", columns: Mapping[str, Sequence[float]]) -> None:
    """The losses of one process, and how far each run's are from them."""
    print(f"{'step':>4}  {'one process':>18}" + "".join(f"  {name:>15}" for name in columns))
    for step, loss in enumerate(reference.losses):
        cells = [f"{losses[step] - loss:>15.1e}" if step < len(losses) else f"{'':>15}" for losses in columns.values()]
        print(f"{step + 1:>4}  {loss:>18.15f}  {'  '.join(cells)}", flush=True)


def on_disk(run: Runtime, show: Demo, saved: Saved) -> None:
    """How many bytes there are, and how even."""
    show.part = "on the disk"
    sizes = dict.fromkeys(saved.manifest.files, 0)
    for tensor in saved.manifest.tensors.values():
        for part in tensor.pieces:
            sizes[part.file] += math.prod(part.local) * DTYPES[tensor.dtype].itemsize
    n = state_bytes(saved)
    show.claim("bytes of all tensors", "n = 24N + 4T", n, sum(sizes.values()))
    mine = sizes[f"rank-{run.rank}.safetensors"]
    show.claim("in a rank's file", "n/P, within 5 %", n / run.size, mine, allowed=0.05 * n / run.size)
    if run.rank == 0:
        headers = sum(file.bytes for file in saved.manifest.files.values()) - n
        text = len(saved.manifest.text())
        print(
            f"n = {n:,} bytes of tensors, {headers:,} of headers in {run.size} files, {text:,} of manifest", flush=True
        )


def damaged(run: Runtime, show: Demo, saved: Saved) -> None:
    """One bit of one file flips: the checkpoint is refused, and the one before it is taken if that is allowed."""
    show.part = "a bit flips"
    part = saved.manifest.tensors["exp_avg/embed.weight"].pieces[-1]
    if run.rank == 0:
        with (saved.path / part.file).open("r+b") as file:
            file.seek(part.at)
            bit = bytes([file.read(1)[0] ^ 1])
            file.seek(part.at)
            file.write(bit)
    comm.barrier(group=run.world)
    trainer = Training(run.world)
    before = [param.detach().clone() for param in trainer.params]
    refusal = refused(lambda: trainer.load(saved))
    show.claim("load names the file", "1", 1, part.file in refusal)
    changed = sum(not torch.equal(a, b) for a, b in zip(before, trainer.params, strict=True))
    show.claim("parameters changed", "0", 0, changed)
    folder = saved.path.parent
    refusal = refused(lambda: find(folder, group=run.world, verify=True))
    show.claim("verify=True names it", "1", 1, part.file in refusal)
    fallen = find(folder, group=run.world, fallback=True)
    show.claim("fallback=True: step", f"{KILLED}", KILLED, fallen.step)
    if run.rank == 0:
        print(refusal, flush=True)


def refused(act: Callable[[], object]) -> str:
    """What is said when this is refused, "" if it is not."""
    try:
        act()
    except Stopped as refusal:
        return str(refusal)
    return ""


def main() -> int:
    """The demo, or one of the two commands."""
    if sys.argv[1:2] and sys.argv[1] in inspect.COMMANDS:
        return inspect.main(sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as folder:
        return demo.main(lambda run, show: work(run, show, Path(folder)), before=partial(lives, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
