"""Fully sharded data parallelism: weights live as shards, and are whole while the module they belong to computes."""

from fsdp import simple
from fsdp.mixed import MixedPrecision
from fsdp.wrap import fully_shard

__all__ = ["MixedPrecision", "fully_shard", "simple"]
