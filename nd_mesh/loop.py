"""The run around the trainer: it is built or resumed, steps, evaluates, saves, and writes a sample; rank 0 reports.

What one rank finds out, a folder that cannot be opened or a disk that is full, every rank acts on together.
"""

import shutil
import time
from pathlib import Path

from checkpoint import Checkpoints, Saved
from collectives.agreement import Stopped, agree, together
from collectives.checked import Checked
from collectives.journal import Journal
from collectives.ledger import Ledger
from collectives.runtime import Runtime, place
from collectives.watch import Watcher, watching
from nd_mesh import data, folder, metrics, mistakes, placement, traffic
from nd_mesh.config import Config, layers_of_stages
from nd_mesh.mesh import AXES, EXPERT_AXES
from nd_mesh.precision import Precision, supported
from nd_mesh.sample import generate
from nd_mesh.stages import Stages
from nd_mesh.train import Trainer


def train(config: Config, training: data.Stream, validation: data.Stream, run: Runtime) -> None:
    """The whole run: build or resume, step, evaluate, save, write a sample. Collective over the world; rank 0 reports.

    Raises Stopped on every rank for a checkpoint that cannot be resumed, and when a write fails on any.
    """
    trainer = Trainer(config, training, validation, run)
    out, resumed = Path(config.train.out), None
    if config.train.resume:
        resumed = _resumed(trainer)
    # A run resumed from a checkpoint in its own folder goes on in it, any other has a new one.
    going_on = resumed is not None and resumed.path.parent.resolve() == out.resolve()
    first = resumed.step if resumed else 0
    report = metrics.Report(out, config.train.steps, first=first, shown=run.rank == 0)
    together(lambda: folder.begin(out) if run.rank == 0 and not going_on else None, group=run.world)
    with trainer.checkpoints(out, report.say) as checkpoints:
        checkpoints.take()
        together(lambda: report.open(trainer.about, going_on=going_on) if run.rank == 0 else None, group=run.world)
        for line in (*describe(trainer), *([f"resumed from {resumed.path}"] if resumed else []), metrics.COLUMNS):
            report.say(line)
        ledger = Ledger()
        with watching(*_watchers(config, run), *([ledger] if config.watch.ledger else [])):
            _steps(trainer, report, checkpoints, first)
    if config.watch.ledger:
        report.say(ledger.table())
    if trainer.recomputed.reruns:
        report.say(trainer.recomputed.report())
    if config.model.vocab <= 1024 and run.rank == 0:  # a table of vocab² counts
        baseline = metrics.bigram_loss(training, validation, config.model.vocab)
        report.say(f"bigram model of the same split {baseline:.4f}")
    if config.data.format == "text":
        prompt, settings = list(config.train.prompt.encode()), {"context": config.data.context, "vocab": 256}
        settings |= {"device": run.device, "rows": trainer.rows}
        tokens = generate(trainer.model, prompt, config.train.sample, seed=config.train.seed, **settings)
        report.sample(bytes(tokens).decode(errors="replace"))
    report.close()
    agree(report.failure, run.device, group=run.world)


def _resumed(trainer: Trainer) -> Saved:
    found, steps = trainer.resume(Path(trainer.config.train.resume)), trainer.config.train.steps
    if found.step >= steps:
        raise Stopped(f"{found.path} is at step {found.step} of train.steps={steps}: raise train.steps")
    return found


def _watchers(config: Config, run: Runtime) -> list[Watcher]:
    """Those that the config asks for, from the first step on."""
    journal = Path(config.train.out) / "journal"
    journals = []
    if config.watch.journal:
        together(lambda: shutil.rmtree(journal, ignore_errors=True) if run.rank == 0 else None, group=run.world)
        journals = [together(lambda: Journal(journal, run.rank), group=run.world)]
    checked = [Checked(run, min(30.0, config.train.timeout))] if config.watch.checked else []
    return [*journals, *checked]  # the journal first, so that it shows who waits in a check


def _steps(trainer: Trainer, report: metrics.Report, checkpoints: Checkpoints, first: int) -> None:
    """Steps first+1 … of the run, each with what is due after it: a record, an evaluation, a checkpoint."""
    train, began, sent = trainer.config.train, time.perf_counter(), Ledger()
    for step in range(first, train.steps):
        with watching(*([sent] if step == first else [])):  # to count takes time
            report.step(record := trainer.step(step))
        if step == first and trainer.run.size > 1:
            report.say(traffic.told(sent, trainer.config, trainer.run))
        if _due(train.evaluate_every, record.step) or record.step == train.steps:
            report.evaluation(record.step, trainer.evaluate())
        agree(report.failure, trainer.run.device, group=trainer.run.world)
        if train.save_every and (_due(train.save_every, record.step) or record.step == train.steps):
            trainer.save(checkpoints, record.step)
    checkpoints.wait()  # here, where those who watch communication watch all of it
    report.say(f"trained for {time.perf_counter() - began:.0f} s, evaluation included")


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def _placed(trainer: Trainer) -> list[str]:
    """Which rank stands where, who is together, and what of it leaves a node."""
    config, grid = trainer.config, trainer.mesh.grid
    here = place()
    views = AXES if config.mesh.ep == 1 else (*AXES, *EXPERT_AXES)
    per_node = here.local_size if here.size > 1 else grid.size()  # ranks that no launcher placed are on one machine
    sent = placement.estimate(config) if grid.size() > per_node else {}
    warnings = placement.warnings(config, per_node, sent)
    return [grid.rank_map(), *grid.listing(dict.fromkeys(views)), *warnings]


def describe(trainer: Trainer) -> list[str]:
    """What a run is, before its first step: mesh and groups, model, data, padding, and an uneven deal of rows."""
    config, run = trainer.config, trainer.run
    axes = " × ".join(f"{axis} {getattr(config.mesh, axis)}" for axis in AXES)
    owned = sum(param.numel() for param in trainer.handle.parameters())
    stream, held_out = trainer.train_stream, trainer.validation_stream
    lines = [
        f"{run.size} ranks, {run.backend} on {run.device.type}, {Precision.of(config.train.dtype)}, mesh {axes}",
        supported(run.device),
        *(_placed(trainer) if run.size > 1 else []),
        f"{owned / 1e6:.2f} M parameters on this rank{f' ({cut})' if (cut := trainer.handle.padding()) else ''}",
        f"{len(stream.tokens):,} training tokens in {len(stream.starts):,} documents, "
        f"{len(held_out.tokens):,} for validation",
        f"{config.train.batch} rows of {config.data.context} tokens a step, {config.train.steps} steps: "
        f"{config.train.steps * config.train.batch / stream.samples:.2f} epochs",
    ]
    if isinstance(trainer.model, Stages):
        plan, blocks = trainer.model.plan, [len(layers) for layers in layers_of_stages(config, trainer.model.plan)]
        lines.append(f"pipeline {plan.name}: {plan.stages} stages of {blocks} blocks, {plan.microbatches} microbatches")
    if config.model.experts:
        mixed = [layer for layer in range(config.model.layers) if config.model.mixture(layer)]
        folded = config.mesh.ep * (config.mesh.tp if config.parallel.sequence else 1)
        lines.append(
            f"layers {mixed} are mixtures of {config.model.experts} experts, {config.model.experts // folded} a rank"
        )
    if (padded := trainer.rows.slots(config.data.context).numel()) > config.data.context:
        lines.append(f"rows of {config.data.context} tokens are padded to {padded}")
    if waiting := mistakes.without_effect(config):
        lines.append(f"without effect on this mesh: {', '.join(waiting)}")
    parts = trainer.mesh.size("batch")
    if config.train.batch % (parts * config.train.microbatches):
        shares = [len(data.deal(range(config.train.batch), parts, part)) for part in range(parts)]
        lines.append(f"rows are dealt unevenly: {shares} a rank, each over {config.train.microbatches} microbatches")
    return lines
