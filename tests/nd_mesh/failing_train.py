"""A training in which one rank fails on purpose: `failing_train.py MODE PLACE FOLDER`, under torchrun or alone."""

import os
import resource
import signal
import sys
from pathlib import Path

from nd_mesh import __main__ as command
from nd_mesh import data, loop, metrics, train
from nd_mesh.train import Trainer
from tests.jobs import FAILING_NOW

PLACES = {
    "build": (train, "parallelize"),
    "read": (data, "microbatches"),
    "gradients": (Trainer, "gradients"),
    "update": (Trainer, "update"),
    "evaluate": (Trainer, "evaluate"),
    "sample": (loop, "generate"),
    "report": (metrics.Report, "step"),
    "save": (Trainer, "save"),
}


def fail(mode: str) -> None:
    """End this rank in the given way."""
    print(FAILING_NOW, flush=True)
    match mode:
        case "raise":
            raise ArithmeticError("on purpose")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            sys.exit(0)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "full":  # as a disk without room
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))


def main() -> int:
    """Run a small training; the last rank fails when it comes to PLACE."""
    mode, place, folder = sys.argv[1:]
    world = int(os.environ.get("WORLD_SIZE", "1"))
    owner, name = PLACES[place]
    real = getattr(owner, name)

    def failing(*args, **kwargs):
        if int(os.environ.get("RANK", "0")) == world - 1:
            fail(mode)
        return real(*args, **kwargs)

    setattr(owner, name, failing)
    text = Path(folder, "text.txt")
    text.write_text("a small text, again and again\n" * 200)
    config = Path(folder, "run.toml")
    config.write_text("[model]\nlayers = 1\nwidth = 8\nheads = 2\nkv_heads = 1\nhidden = 8\n[data]\ncontext = 16\n")
    settings = {"mesh.dp": world, "data.path": text, "train.out": f"{folder}/out", "train.steps": 3, "train.timeout": 5}
    settings |= {"train.save_every": 1} if place == "save" else {}
    return command.main(["train", str(config), *(word for k, v in settings.items() for word in (f"--{k}", str(v)))])


if __name__ == "__main__":
    sys.exit(main())
