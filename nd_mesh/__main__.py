"""The command line: `train CONFIG`, `sample` and `evaluate` of a checkpoint, alone or under torchrun; without ranks
`mesh CONFIG` and `plot RUN …`.
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from collectives import runtime
from collectives.agreement import Stopped
from nd_mesh import config, data, folder, loop, metrics, mistakes, picture, placement, use
from nd_mesh.mesh import Grid

MOST_RANKS = 2**17  # the groups of which are listed in a minute


class Parser(argparse.ArgumentParser):
    """Mistakes become one line, told on every rank."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse in place of its usage and exit."""
        raise config.ConfigError(message)


def parser() -> Parser:
    """Every setting of a configuration is an option by its dotted name."""
    whole = Parser(prog="nd_mesh", description=__doc__, allow_abbrev=False)
    commands = whole.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="train a GPT", allow_abbrev=False)
    training.set_defaults(prepare=prepare_training)
    _add_settings(training)
    sampling = commands.add_parser("sample", help="text from a checkpoint", allow_abbrev=False)
    sampling.set_defaults(prepare=use.sampling)
    use.arguments_of_sample(sampling)
    evaluating = commands.add_parser("evaluate", help="a checkpoint's validation loss", allow_abbrev=False)
    evaluating.set_defaults(prepare=use.evaluating)
    use.arguments(evaluating)
    placing = commands.add_parser("mesh", help="show where a mesh puts its ranks", allow_abbrev=False)
    placing.set_defaults(show=show_mesh)
    _add_settings(placing)
    placing.add_argument("--per-node", type=int, default=8, help="ranks of a node, default 8")
    placing.add_argument("--out", type=Path, help="a PNG to write")
    plotting = commands.add_parser("plot", help="overlay the loss curves of runs", allow_abbrev=False)
    plotting.set_defaults(show=show_curves)
    plotting.add_argument("runs", type=Path, nargs="+", help="folders that runs wrote")
    plotting.add_argument("--out", type=Path, required=True, help="the PNG to write")
    return whole


def _add_settings(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "config", type=Path, help="a TOML file; its tables are mesh, model, data, train, checkpoint, parallel, watch"
    )
    default = config.Config()
    for name in config.names():
        table, key = name.split(".")
        value = getattr(getattr(default, table), key)
        command.add_argument(f"--{name}", metavar="VALUE", help=f"default {value}", default=argparse.SUPPRESS)


def show_mesh(chosen: argparse.Namespace) -> None:
    """Print what placement.report tells of a mesh that could be trained on, and draw it where `out` is named."""
    settings, per_node = config.load(chosen.config, chosen.overrides), chosen.per_node
    if per_node < 1:
        raise config.ConfigError(f"--per-node={per_node} must be positive")
    grid = Grid(settings.mesh)
    if grid.size() > MOST_RANKS:
        raise config.ConfigError(f"a mesh of {grid.size()} ranks is more than can be shown: at most {MOST_RANKS}")
    mistakes.check(settings, grid.size())
    print(*placement.report(settings, per_node, placement.estimate(settings)), sep="\n")
    if chosen.out is not None:
        picture.draw(grid, per_node, chosen.out)


def show_curves(chosen: argparse.Namespace) -> None:
    """Draw the loss curves, and print how far each is from the first."""
    metrics.plot(chosen.runs, chosen.out)
    for line in metrics.distances(chosen.runs):
        print(line)


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The command and its options. Raises ConfigError for what is none of them, with what may have been meant."""
    chosen, unknown = parser().parse_known_args(arguments)
    if unknown and not unknown[0].startswith("--"):
        one = "checkpoint" if hasattr(chosen, "checkpoint") else "configuration"
        raise config.ConfigError(f"unexpected argument {unknown[0]!r}: one {one}, then options")
    for name in [option.removeprefix("--").split("=")[0] for option in unknown[:1]]:
        if name in config.names() and chosen.command == "plot":
            raise config.ConfigError(f"--{name}: plot has no settings of a run")
        if name in config.names():  # of train
            raise config.ConfigError(
                f"{name} is what it was in the run: only mesh, parallel and the data's place change"
            )
        raise config.ConfigError(config.unknown(name))
    chosen.overrides = {name: getattr(chosen, name) for name in config.names() if hasattr(chosen, name)}
    return chosen


def prepare_training(chosen: argparse.Namespace, world: int) -> tuple[config.Config, use.Job]:
    """The configuration and what `train` does on a started rank. Raises ValueError before there is any."""
    settings = config.load(chosen.config, chosen.overrides)
    mistakes.check(settings, world)
    folder.check(Path(settings.train.out))
    training, validation = data.load(settings.data, settings.model.vocab)
    return settings, functools.partial(loop.train, settings, training, validation)


def main(arguments: Sequence[str]) -> int:
    """Run a command; the exit status. A mistake of the user's is one line on every rank, before any group is made."""
    told_by = ""
    try:
        here = runtime.place()
        told_by = f"rank {here.rank}: " if here.size > 1 else ""
        chosen = parsed(arguments)
        if hasattr(chosen, "show"):
            chosen.show(chosen)
            return 0
        settings, job = chosen.prepare(chosen, here.size)
    except (ValueError, OSError) as mistake:
        print(f"{told_by}error: {mistake}", file=sys.stderr)
        return 2
    with runtime.start(timeout=settings.train.timeout) as run:
        try:
            job(run)
        except Stopped as stopped:  # on every rank, so all leave in good order
            print(f"{told_by}error: {stopped}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
