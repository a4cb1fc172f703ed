"""Data parallelism: the whole model on every rank, the rows of the batch dealt out, gradients summed."""

from ddp import bucketed, naive, overlapped, sampler

__all__ = ["bucketed", "naive", "overlapped", "sampler"]
