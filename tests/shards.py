"""What a test sees of shards: the pieces that a rank holds, and the whole tensors that all ranks' pieces make."""

from collections import defaultdict

import torch


def pieces(handle):
    """What this rank holds: (name and boxes of each parameter, their gradients and values packed)."""
    shards = handle.parameters()
    return [(shard.held.name, shard.held.boxes) for shard in shards], packed([s.grad for s in shards] + shards)


def packed(tensors):
    """Tensors as one row a dtype, because a pipe carries one large tensor faster than many small ones; None stays."""
    kinds = [None if tensor is None else (tensor.dtype, tensor.shape) for tensor in tensors]
    rows = defaultdict(list)
    for tensor in tensors:
        if tensor is not None:
            rows[tensor.dtype].append(tensor.detach().flatten())
    return kinds, {dtype: torch.cat(row) for dtype, row in rows.items()}


def unpacked(kinds, rows):
    """The tensors again."""
    sizes = {dtype: [kind[1].numel() for kind in kinds if kind and kind[0] == dtype] for dtype in rows}
    parts = {dtype: iter(row.split(sizes[dtype])) for dtype, row in rows.items()}
    return [None if kind is None else next(parts[kind[0]]).view(kind[1]) for kind in kinds]


def assembled(ranks):
    """(gradients, values) by name of whole tensors, from the pieces of all ranks. Every rank has a gradient of a
    tensor, or none has; elements that two ranks hold have the same bits.
    """
    held, tensors = zip(*((held, unpacked(*packs)) for held, packs in ranks), strict=True)
    grads, values = {}, {}
    for i, of_one_tensor in enumerate(zip(*held, strict=True)):
        [name] = {name for name, _ in of_one_tensor}
        boxes = [boxes for _, boxes in of_one_tensor]
        values[name] = joined(boxes, [mine[len(held[0]) + i] for mine in tensors])
        parts = [mine[i] for mine in tensors]
        assert len({part is None for part in parts}) == 1, f"{name}: a gradient on some ranks only"
        grads[name] = None if parts[0] is None else joined(boxes, parts)
    return grads, values


def joined(boxes, parts):
    """A whole tensor of its parts, each one box after the other."""
    shape = next((box.shape for some in boxes for box in some), (0,))
    whole, filled = torch.empty(shape, dtype=parts[0].dtype), torch.zeros(shape, dtype=torch.bool)
    for some, part in zip(boxes, parts, strict=True):
        assert part.numel() == sum(box.numel for box in some)
        for box, flat in zip(some, part.flatten().split([box.numel for box in some]), strict=True):
            where = tuple(slice(start, start + n) for start, n in zip(box.offset, box.local, strict=True))
            values = flat.view(box.local)
            assert not filled[where].any() or torch.equal(whole[where], values), "two ranks hold different values"
            whole[where] = values
            filled[where] = True
    assert filled.all(), "no rank holds some elements"
    return whole


def snapshot(model):
    """Copies of a module's parameters by name."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}
