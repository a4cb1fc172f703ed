"""ZeRO: data parallelism without the copies, stage by stage: optimizer state, gradients, weights live as shards."""

from zero import stage0, stage1, stage2, stage3
from zero.mixed import Mixed

__all__ = ["Mixed", "stage0", "stage1", "stage2", "stage3"]
