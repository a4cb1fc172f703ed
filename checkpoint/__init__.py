"""Checkpoints: a protocol on boxes. Atomic, verified, read by any mesh, written behind training."""

from checkpoint.checkpoints import Checkpoints
from checkpoint.folder import Keep
from checkpoint.pace import Storm
from checkpoint.saved import Saved, find
from checkpoint.state import State, restore, training

__all__ = ["Checkpoints", "Keep", "Saved", "State", "Storm", "find", "restore", "training"]
