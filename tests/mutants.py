"""Mutants: is the grid worth anything? Faults of one line each, and which run of the grid catches each.

make mutants    the tree unchanged first, then each mutant, a line each; 1 if one survives all runs

A mutant is a temporary copy of the tree in which one line is another. The ranks of its runs are new processes, which
import that line; the judge was imported before, and is the unchanged tree's. The runs are those of the tests, any two
options in all combinations on up to four ranks, in the grid's own order: nobody picks the one that fits. What the runs
should come to, the reference's steps and the initial weights, is known from the unchanged tree.

DeMillo, Lipton, Sayward 1978, "Hints on Test Data Selection".
"""

import compileall
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

from nd_mesh.config import Config
from nd_mesh.mesh import Grid
from tests.grid import subset
from tests.parity import Case, Judge, documents
from tests.pool import Pool, RankFailed, RankHung

PATIENCE = 30  # seconds of a run's half
WIDTH = 60  # of what is said of an error
IN_THE_COPY = "in-the-copy"  # the argument of the process that runs there


class Mutant(NamedTuple):
    """A fault: in this file `old`, a part of one line that is nowhere else in it, is `new`."""

    name: str
    file: str
    old: str
    new: str


# Those that are no faults are not here, since nothing could catch them: rotation by the slot in the row (it depends on
# differences alone), other ranges of a vocabulary or of ZeRO's row, if all that read them agree.
MUTANTS = [
    # the loss
    Mutant(
        "divided by the tokens of the own rank",
        "nd_mesh/train.py",
        'comm.all_reduce(counts, group=self.mesh.group("data"), async_op=True)',
        'comm.all_reduce(counts.clone(), group=self.mesh.group("data"), async_op=True)',
    ),
    Mutant(
        "a mean of the means of microbatches",
        "nd_mesh/train.py",
        "* scale / count.clamp(min=1)",
        "* scale / (labels != IGNORE).sum().clamp(min=1) / self.config.train.microbatches",
    ),
    Mutant(
        "uneven rows are lost in the deal",
        "nd_mesh/data.py",
        "start + least + (part < more)",
        "start + least",
    ),
    # gradients, and their norm
    Mutant(
        "no sum over tp, of norms under sequence parallelism",
        "nd_mesh/parallelize.py",
        'PARTIAL = ("kv", "tp", TIE)',
        'PARTIAL = ("kv", TIE)',
    ),
    Mutant(
        "no sum of shared keys and values",
        "nd_mesh/parallelize.py",
        'PARTIAL = ("kv", "tp", TIE)',
        'PARTIAL = ("tp", TIE)',
    ),
    Mutant(
        "no sum of the two ends of a tied weight",
        "nd_mesh/parallelize.py",
        'PARTIAL = ("kv", "tp", TIE)',
        'PARTIAL = ("kv", "tp")',
    ),
    Mutant(
        "copies count several times in the norm",
        "collectives/norm.py",
        "norm.square() / param.held.copies",
        "norm.square()",
    ),
    Mutant(
        "clipped by the norm of what the rank has",
        "nd_mesh/train.py",
        "clip(params, norm, self.config.train.clip)",
        "clip(params, sum(p.grad.square().sum() for p in params if p.grad is not None) ** 0.5, self.config.train.clip)",
    ),
    # data strategies
    Mutant(
        "ZeRO-1 takes means",
        "zero/stage1.py",
        "comm.reduce_scatter_single(own, full, self.op,",
        "comm.reduce_scatter_single(own, full, comm.AVG,",
    ),
    Mutant(
        "a ZeRO rank takes its neighbour's range",
        "zero/bucket.py",
        "part = group.rank() % parts",
        "part = (group.rank() + 1) % parts",
    ),
    Mutant(
        "ZeRO keeps the newest microbatch's gradient",
        "zero/bucket.py",
        "view.add_(param.grad) if param in self.arrived else view.copy_(param.grad)",
        "view.copy_(param.grad)",
    ),
    Mutant(
        "ZeRO cuts copies at different places",
        "zero/sharded.py",
        'param.held.holders if hasattr(param, "held") else ()',
        "()",
    ),
    Mutant(
        "FSDP's replicas are not summed",
        "fsdp/gradient.py",
        "comm.all_reduce(slot, self.op,",
        "comm.all_reduce(slot.clone(), self.op,",
    ),
    # tensor parallelism
    Mutant(
        "the input's gradient is not summed over tp",
        "tensor_parallel/entrance.py",
        "comm.all_reduce(dx, group=group, async_op=True)",
        "comm.all_reduce(dx.clone(), group=group, async_op=True)",
    ),
    Mutant(
        "keys and values are dealt to tp in turn",
        "tensor_parallel/cut.py",
        "row[rank * units // ranks]",
        "row[rank % units]",
    ),
    Mutant(
        "a shard of the vocabulary begins a row late",
        "tensor_parallel/cross_entropy.py",
        "(labels >= rows.start) & (labels < rows.stop)",
        "(labels > rows.start) & (labels < rows.stop)",
    ),
    Mutant(
        "ranks of tp draw the first one's dropout",
        "nd_mesh/parallelize.py",
        "where.stream.tensor_split(ranks)[group.rank()]",
        "where.stream.tensor_split(ranks)[0]",
    ),
    Mutant(
        "initial weights by the index in the own piece",
        "collectives/layout.py",
        "torch.arange(offset, offset + local)",
        "torch.arange(local)",
    ),
    # context parallelism
    Mutant(
        "labels are shifted after the cut",
        "nd_mesh/context.py",
        "cut(batch.labels, mine, fill=IGNORE)",
        "cut(batch.ids, mine).roll(-1, 1).where(cut(batch.labels, mine, fill=IGNORE) != IGNORE, IGNORE)",
    ),
    Mutant(
        "positions begin anew on each rank of cp",
        "nd_mesh/context.py",
        '"positions": cut(row.positions, mine)',
        '"positions": torch.arange(len(mine)).expand(len(batch.ids), -1)',
    ),
    Mutant(
        "documents see each other across ranks",
        "nd_mesh/context.py",
        "Places.of(row.documents, everyones)",
        "Places.of(row.documents.clamp(max=0), everyones)",
    ),
    Mutant(
        "dk and dv are not sent home",
        "context_parallel/ring.py",
        "terms += self.coming",
        "pass",
    ),
    Mutant(
        "blocks are merged by the larger lse",
        "context_parallel/online.py",
        "lse.copy_(torch.logaddexp(lse, its))",
        "lse.copy_(torch.maximum(lse, its))",
    ),
    Mutant(
        "Ulysses copies KV heads in turn",
        "context_parallel/ulysses.py",
        "x.repeat_interleave(max(1, size // x.shape[1]), 1)",
        "x.repeat(1, max(1, size // x.shape[1]), 1, 1)",
    ),
    # experts
    Mutant(
        "experts' gradients are divided by ep",
        "nd_mesh/train.py",
        "self.handle.finish()",
        "self.handle.finish(), [p.grad.div_(self.mesh.size('ep')) for p in self.handle.parameters()"
        " if p.held.family == 'expert']",
    ),
    Mutant(
        "balance by the choices of own slots",
        "expert_parallel/moe.py",
        "self._loss(routing, sequences, experts, ones.sum(1))",
        "self._loss(routing, sequences, experts, chosen(experts, self.count).sum(1))",
    ),
    Mutant(
        "capacity of own slots",
        "expert_parallel/moe.py",
        "self._fits(rows, ones, sequences)",
        "within(experts, chosen(experts, self.count), capacity(self.capacity, self.choices, x.size(1), self.count))",
    ),
    Mutant(
        "z-loss over own tokens",
        "expert_parallel/moe.py",
        "z_loss(routing.logits, routed) / sequences.tokens.clamp(min=1)",
        "z_loss(routing.logits, routed) / routed.sum().clamp(min=1)",
    ),
    Mutant(
        "each rank of cp counts a row",
        "nd_mesh/data.py",
        "place.counted.sum() * first",
        "place.counted.sum()",
    ),
    Mutant(
        "biases follow the loads of some ranks",
        "nd_mesh/experts.py",
        'else mesh.group("tokens")',
        'else mesh.group("batch")',
    ),
    Mutant(
        "biases move twice",
        "nd_mesh/experts.py",
        "observed[layer].tokens.to(self.device), self.rate)",
        "observed[layer].tokens.to(self.device), 2 * self.rate)",
    ),
    # pipelines, recomputation
    Mutant(
        "W of the second microbatch is left out",
        "pipeline/run.py",
        "self.live.pop((stage, m)).weights.run()",
        "(live := self.live.pop((stage, m))) and m != 1 and live.weights.run()",
    ),
    Mutant(
        "W replaces what others have added",
        "pipeline/backward.py",
        "weight.grad.add_(grad) if weight.grad.layout == torch.strided else weight.grad + grad",
        "weight.grad.copy_(grad)",
    ),
    Mutant(
        "a forward that runs again is recorded again",
        "expert_parallel/observe.py",
        "if in_backward():",
        "if False:",
    ),
    # checkpoints
    Mutant(
        "momentum is not restored",
        "checkpoint/state.py",
        "boxed.adopt(optimizer, loaded)",
        "boxed.adopt(optimizer, {})",
    ),
    Mutant(
        "routers' biases are not restored",
        "nd_mesh/train.py",
        "self.optimizer, self._biases())",
        "self.optimizer, {k: [(box, bias.clone()) for box, bias in v] for k, v in self._biases().items()})",
    ),
    Mutant(
        "resumed a global batch too early",
        "nd_mesh/train.py",
        "checkpoints.save)(step, state)",
        "checkpoints.save)(step - 1, state)",
    ),
]


class Impatient(Judge):
    """One that does not wait long for ranks that hang, and knows what is right."""

    def __init__(self, pool: Pool, known: dict[Any, Any]):
        super().__init__(pool, documents())
        self.known = known

    def _run(self, job: Callable[..., Any], cfg: Config, steps: int, folder: Path) -> list[Any]:
        return self.pool.run(Grid(cfg.mesh).size(), job, cfg, self.texts, steps, folder, timeout=PATIENCE)


def caught(cases: Sequence[Case], known: dict[Any, Any]) -> tuple[int, str, str]:
    """How many runs of the tree as it is now see nothing; what the one after them sees, and its name, or nothing."""
    pool = Pool()  # workers that have imported nothing of the tree but tests/pool.py and collectives/runtime.py
    try:
        judge = Impatient(pool, known)
        for survived, case in enumerate(cases):
            if seen := missed(judge, case):
                return survived, seen, case.name
    finally:
        pool.close()
    return len(cases), "", ""


def missed(judge: Judge, case: Case) -> str:
    """What is wrong in a run: of the kinds of error that are too large the first, in the order in which they are
    judged, and how many times what is allowed it is; or what was raised. Nothing if all is right.
    """
    try:
        worst = judge.judge(case)
    except RankHung:
        return f"hangs for {PATIENCE} s"
    except RankFailed as failure:
        return shorten(str(failure).strip().splitlines()[-1], WIDTH)
    except AssertionError as failure:
        return shorten(str(failure), WIDTH) or "an assertion without words"
    return next((f"{kind} {share:.0e}" for kind, share in worst.items() if share > 1), "")


def table() -> int:
    """In the copy: the unchanged tree, then each mutant; 1 if it is not passed by the one, or is by another."""
    cases, known, survivors = subset(4, together=2), {}, 0
    began = time.perf_counter()
    print(f"{'survived':>8}  {'fault':<52}  caught by")
    runs, seen, by = caught(cases, known)
    print(f"{runs:>8}  {'none: the tree as it is':<52}  {seen} {by}", flush=True)
    if seen:
        return 1
    for mutant in MUTANTS:
        path = Path(mutant.file)
        right = path.read_text()
        path.write_text(right.replace(mutant.old, mutant.new))
        runs, seen, by = caught(cases, known)
        path.write_text(right)
        survivors += not seen
        print(f"{runs:>8}  {mutant.name:<52}  {seen or 'SURVIVES'}  {mutant.file}  {by}", flush=True)
    minutes = (time.perf_counter() - began) / 60
    print(f"{len(MUTANTS) - survivors} of {len(MUTANTS)} caught, {survivors} survive, in {minutes:.0f} minutes")
    return 1 if survivors else 0


def main() -> int:
    """Copy the tree, and make the table there."""
    root = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        for package in root.glob("*/__init__.py"):
            shutil.copytree(package.parent, Path(folder, package.parent.name))
        compileall.compile_dir(folder, quiet=1)  # once, not by each rank
        return subprocess.run([sys.executable, "-m", "tests.mutants", IN_THE_COPY], cwd=folder, check=False).returncode


if __name__ == "__main__":
    sys.exit(table() if IN_THE_COPY in sys.argv else main())
