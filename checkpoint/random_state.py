"""The random state of one rank's process: Python's, NumPy's and torch's generators, and those of its accelerator.

It belongs to a rank, not to the run: each rank must have its own again, and another number of ranks has no use for it.
A run whose draws are functions of seed, step and place (collectives/rng.py) needs none of this.
"""

import random
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """The state of all generators, as small state for a checkpoint (`State.own`)."""
    # IDEA: all generators a step may draw from, or the resumed run differs as soon as one is used.
    found = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def restore(state: dict[str, Any]) -> None:
    """Set all generators to what they were. Raises ValueError, and sets none, where accelerators are missing."""
    accelerators = state.get("cuda", [])
    if len(accelerators) > torch.cuda.device_count():
        raise ValueError(
            f"the random state of {len(accelerators)} accelerators was saved, this process sees "
            f"{torch.cuda.device_count()}: resume on as many"
        )
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if accelerators:
        torch.cuda.set_rng_state_all(accelerators)
