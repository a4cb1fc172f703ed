"""A model whose sizes divide nothing, in units, and what its slots hold by arithmetic: for what a step costs."""

import contextlib
import math

from torch import nn

from fsdp import fully_shard

VOCAB, WIDTH, HIDDEN, BLOCKS = 211, 97, 331, 2
ROOT = ((VOCAB, WIDTH), (WIDTH,), (VOCAB, WIDTH), (VOCAB,))
BLOCK = ((), (WIDTH,), (HIDDEN, WIDTH), (WIDTH, HIDDEN))
SHAPES = (ROOT, *(BLOCK,) * BLOCKS)  # of the parameters, unit by unit
PARAMETERS, UNITS = sum(map(len, SHAPES)), len(SHAPES)


class Block(nn.Module):
    """A layer with four parameters, one of them a scalar."""

    def __init__(self, like):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.scale = nn.Parameter(like.new_ones(()))

    def forward(self, x):
        return x + self.scale * self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    """The next token from one token."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(self.embed.weight) for _ in range(BLOCKS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def wrap(run, shards, **settings):
    """The model over groups of this many neighbours, replicated over the others: (model, handle)."""
    ranks, model = range(run.size), Net()
    sharding = [run.new_group(ranks[first : first + shards]) for first in range(0, run.size, shards)]
    replicas = [run.new_group(ranks[first::shards]) for first in range(shards)]
    if shards < run.size:
        settings["replicate_group"] = replicas[run.rank % shards]
    group = sharding[run.rank // shards]
    for block in model.blocks:
        fully_shard(block, group, **settings)
    return model, fully_shard(model, group, **settings)


def backward(handle, model, ids, microbatches, sync=""):
    """The gradients of a step, reduced. sync: the method of the handle around all microbatches but the last."""
    waits = getattr(handle, sync) if sync else contextlib.nullcontext
    for number in range(1, microbatches + 1):
        with waits() if number < microbatches else contextlib.nullcontext():
            model(ids).float().square().sum().backward()
    handle.finish()


def slots(shapes, ranks, itemsize=4):
    """Elements that the ranks hold of a unit together: of each parameter every rank has as much as the longest piece.
    A rank by itself has the weights themselves, each at a multiple of 64 bytes.
    """
    align, end = 64 // itemsize if ranks == 1 else 1, 0
    for rows, *others in (shape or (1,) for shape in shapes):
        end = -(-end // align) * align + -(-rows // ranks) * math.prod(others)
    return ranks * end
