"""Every collective is even: each rank sends the same number of bytes in it, whatever the sizes are."""

import contextlib

import pytest
import torch

from collectives import ledger
from tests.recorder import recording
from tests.training import SHARES, data, net
from tests.zero.versions import VERSIONS, drilled


def steps(run, wrap, members):
    """The collectives of two steps of two microbatches each: [(operation, elements, bytes that this rank sends)]."""
    group = run.new_group(members)
    if group is None:
        return None
    model, shares = net(0), SHARES[len(members)]
    handle = wrap(model, group, average=False)
    optimizer = torch.optim.SGD(handle.parameters(), lr=0.1)
    with recording() as recorder:
        for step in range(2):
            optimizer.zero_grad()
            ids, rows, cotangent = (part.split(shares)[group.rank()] for part in data(sum(shares), step))
            for micro in range(2):
                with handle.no_sync() if micro == 0 else contextlib.nullcontext():
                    (model(ids, rows) * cotangent).sum().backward()
            handle.finish()
            optimizer.step()
            handle.after_step()
    return [(call.op, call.elements, ledger.wire_bytes(call)) for call in recorder.calls]


def uneven(pool, wrap, members):
    """The calls in which not all members sent as much."""
    results = [result for result in pool.run(max(members) + 1, steps, wrap, members) if result is not None]
    assert len(results[0]) >= 4 and sum(sent for *_, sent in results[0]) > 0
    return [same_call for same_call in zip(*results, strict=True) if len(set(same_call)) > 1]


@pytest.mark.parametrize("members", [[0, 1, 2], drilled([0, 1, 2, 3]), [1, 3]])
@pytest.mark.parametrize("version", [name for name in VERSIONS if not name.startswith("stage 0")])
def test_every_rank_sends_the_same_number_of_bytes_in_every_call(pool, version, members):
    """Parameters of 1, 3, 7 and 5 elements, scalars: nothing divides. No collective has a root or an owner."""
    assert uneven(pool, VERSIONS[version], members) == []
