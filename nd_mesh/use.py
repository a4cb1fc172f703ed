"""A checkpoint put to use, on any mesh: text that goes on from a prompt, and the loss on the validation data.

    python -m nd_mesh sample runs/stdlib --prompt "class " --length 200
    torchrun --standalone --nproc-per-node 2 -m nd_mesh evaluate runs/stdlib/step-000440 --mesh.tp 2

What was computed, model, data and seed, the checkpoint tells; where it is computed now is a new choice, by default on
one device, or the same on all ranks. Only weights are read, by each rank its own boxes, and nothing is written.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from checkpoint import Saved, find
from checkpoint.folder import candidates, complete, is_checkpoint
from collectives.agreement import together
from collectives.runtime import Runtime
from nd_mesh import data, mistakes
from nd_mesh.config import Config, ConfigError, names, overridden
from nd_mesh.mesh import Grid
from nd_mesh.sample import TEMPERATURE, generate
from nd_mesh.train import Trainer

# What may be other than in the run: where it is computed, and where its data lie now.
FREE = (*(name for name in names() if name.startswith(("mesh.", "parallel."))), "data.path", "data.glob")

MOST = 2**31  # tokens of a sample, as of train.sample

Job = Callable[[Runtime], None]


def arguments(command: argparse.ArgumentParser) -> None:
    """Those that `sample` and `evaluate` share."""
    command.add_argument("checkpoint", type=Path, help="a checkpoint, or the folder of a run: its newest")
    for name in FREE:
        command.add_argument(f"--{name}", metavar="VALUE", default=argparse.SUPPRESS)


def arguments_of_sample(command: argparse.ArgumentParser) -> None:
    """Those of `sample`. What is not given is as in the run."""
    arguments(command)
    command.add_argument("--prompt", help="text, or for a run of token ids numbers")
    command.add_argument("--length", type=int, help="how many tokens more")
    command.add_argument("--temperature", type=float, default=TEMPERATURE, help=f"default {TEMPERATURE}")
    command.add_argument("--seed", type=int, help="another one, another text")


def configured(path: Path, overrides: Mapping[str, str], world: int) -> tuple[Path, Config]:
    """The checkpoint `path`, or the newest of the folder `path`, and its run's configuration for this many ranks.

    Every rank looks for itself, before any group is made. Raises ValueError for a checkpoint that is not there, is
    damaged or is not of a run, and for a mesh on which its model cannot run.
    """
    path = path.absolute()
    if not is_checkpoint(path):
        newest = next((found for _, found in candidates(path)), None)
        if newest is None:
            raise ConfigError(f"{path} has no complete checkpoint: name another folder")
        path = newest
    about = complete(path)[0].about
    if "config" not in about:
        raise ConfigError(f"the checkpoint {path} is not of a run: it does not tell its config")
    config = overridden({**about["config"], "mesh": {}, "parallel": {}}, overrides, path)
    if "mesh.dp" not in overrides:  # the ranks that nobody asks for another use of
        others = max(1, Grid(replace(config.mesh, dp=1)).size())
        config = replace(config, mesh=replace(config.mesh, dp=max(1, world // others)))
    mistakes.check(config, world)
    return path, config


def sampling(chosen: argparse.Namespace, world: int) -> tuple[Config, Job]:
    """The run's configuration and what `sample` does on a started rank. Raises ValueError before there is any."""
    path, config = configured(chosen.checkpoint, chosen.overrides, world)
    prompt = tokens_of(config.train.prompt if chosen.prompt is None else chosen.prompt, config)
    length = config.train.sample if chosen.length is None else chosen.length
    seed = config.train.seed if chosen.seed is None else chosen.seed
    if not 0 <= length < MOST:
        raise ConfigError(f"--length={length} must be 0 or more, and less than {MOST}")
    if not 0 < chosen.temperature < float("inf"):
        raise ConfigError(f"--temperature={chosen.temperature} must be positive; use 0.01 for the likeliest text")
    settings = {"length": length, "temperature": chosen.temperature, "seed": seed}
    return config, lambda run: _sample(path, config, prompt, settings, run)


def evaluating(chosen: argparse.Namespace, world: int) -> tuple[Config, Job]:
    """The run's configuration and what `evaluate` does on a started rank. Raises ValueError before there is any."""
    path, config = configured(chosen.checkpoint, chosen.overrides, world)
    streams = data.load(config.data, config.model.vocab)
    return config, lambda run: _evaluate(path, config, streams, run)


def tokens_of(prompt: str, config: Config) -> list[int]:
    """The tokens of a prompt: its bytes, or in a run of token ids the numbers that it lists.

    Raises ConfigError for one that is empty, has what the vocabulary has not, or does not fit the context.
    """
    vocab, context = config.model.vocab, config.data.context
    try:
        tokens = list(prompt.encode()) if config.data.format == "text" else [int(word) for word in prompt.split()]
    except ValueError:
        raise ConfigError(f"--prompt={prompt!r} must be token ids, as '5 17': the run has no text") from None
    if not tokens:
        raise ConfigError("--prompt is empty: give one token at least")
    if wrong := [token for token in tokens if not 0 <= token < vocab]:
        raise ConfigError(f"--prompt={prompt!r} has token {wrong[0]}: all must be less than model.vocab={vocab}")
    if len(tokens) > context:
        raise ConfigError(
            f"--prompt has {len(tokens)} tokens, and the model sees data.context={context}: use the last {context}"
        )
    return tokens


def text_of(tokens: list[int], config: Config) -> str:
    """Tokens for people: the inverse of `tokens_of`."""
    if config.data.format == "text":
        return bytes(tokens).decode(errors="replace")
    return " ".join(map(str, tokens))


def loaded(found: Saved, config: Config, streams: tuple[data.Stream, data.Stream], run: Runtime) -> Trainer:
    """A trainer on this mesh with the weights of a checkpoint. Collective."""
    trainer = Trainer(config, *streams, run)
    trainer.load_weights(found)
    return trainer


def _sample(path: Path, config: Config, prompt: list[int], settings: dict, run: Runtime) -> None:
    found = find(path, group=run.world)
    nothing = data.Stream(np.zeros(0, np.uint8), np.zeros(1, np.int64), config.data.context)  # text needs no data
    trainer = loaded(found, config, (nothing, nothing), run)
    vocab = 256 if config.data.format == "text" else config.model.vocab
    where = {"context": config.data.context, "vocab": vocab, "rows": trainer.rows, "device": run.device}
    tokens = generate(trainer.model, prompt, **settings, **where)
    if run.rank == 0:
        print(_told(found, config, run), file=sys.stderr)
        print(text_of(tokens, config))


def _evaluate(path: Path, config: Config, streams: tuple[data.Stream, data.Stream], run: Runtime) -> None:
    found = find(path, group=run.world)
    trainer = loaded(found, config, streams, run)
    together(lambda: trainer.check_same_run(found) if run.rank == 0 else None, group=run.world)
    loss = trainer.evaluate()
    if run.rank == 0:
        print(_told(found, config, run), file=sys.stderr)
        print(f"validation loss {loss:.6f} nats a token, of {streams[1].samples:,} samples")


def _told(found: Saved, config: Config, run: Runtime) -> str:
    mesh = " × ".join(f"{axis} {size}" for axis, size in vars(config.mesh).items())
    return f"{found.path}, step {found.step}; {run.size} ranks, {config.train.dtype}, mesh {mesh}"
