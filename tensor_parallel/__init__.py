"""Tensor, sequence and vocabulary parallelism: see README.md."""

from tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from tensor_parallel.embedding import VocabParallelEmbedding
from tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from tensor_parallel.parallelize import parallelize
from tensor_parallel.plan import Column, Heads, KeyValue, Role, Row, Stream, Vocabulary, Whole
from tensor_parallel.region import Region

__all__ = [
    "Column",
    "ColumnParallelLinear",
    "Heads",
    "KeyValue",
    "Region",
    "Role",
    "Row",
    "RowParallelLinear",
    "Stream",
    "VocabParallelEmbedding",
    "Vocabulary",
    "Whole",
    "parallelize",
    "vocab_parallel_cross_entropy",
]
