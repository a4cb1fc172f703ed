"""What crosses a boundary: B·T·D elements a microbatch and direction, and nothing else but two numbers a rank and step;
descriptions in the first step only.
"""

from collections import Counter
from unittest import mock

import pytest
import torch
from torch import nn

from collectives import comm, demo
from collectives.ledger import Ledger
from collectives.watch import watching
from pipeline import Microbatch, Pipeline, connect, executor, schedule
from tests.recorder import recording

B, T, D = 3, 40, 32
MESSAGE = B * T * D  # elements
WAYS = [("layer_wise", 2), ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb_h1", 1), ("zbv", 2), ("dualpipe_v", 2)]


def pipeline(run, name, virtual, microbatches):
    plan = schedule(name, run.size, microbatches, virtual)
    torch.manual_seed(0)
    stages = {stage: nn.Linear(D, D).double() for stage in plan.stages_of(run.rank)}
    return Pipeline(plan, stages, connect(plan, [range(run.size)], run.new_group), run.world, loss=total)


def total(output, target):
    return output.sum()


def batches(microbatches, rows=B):
    return [Microbatch((torch.randn(rows, T, D, dtype=torch.float64),)) for _ in range(microbatches)]


def crossings(run, name, virtual, microbatches):
    """Of steps and evaluations each: {(group, op, about, elements): calls}, the ledger's bytes, those of sockets."""
    pipe, found = pipeline(run, name, virtual, microbatches), []
    names = {group: f"{kind} {stage}" for (kind, stage), group in pipe.links.items()} | {run.world: "all"}
    for step in (pipe.step, pipe.step, pipe.evaluate, pipe.evaluate):
        given = batches(microbatches)
        comm.barrier(group=run.world)
        with recording() as recorder, watching(book := Ledger()):
            before = demo.bytes_written()
            step(given)
            sent = demo.bytes_since(before)
        calls = Counter()
        for call in recorder.calls:
            direction = "sends" if call.sends else "receives" if call.receives else call.op
            told = call.about.partition(" of ")[0]  # whatever the microbatch
            calls[names[call.group], direction, told, call.elements] += 1
        found.append((calls, sum(row.algorithm for row in book.rows()), sent))
    return found


def boundaries(name, virtual, ranks):
    """[(stage before, its rank, the rank of the one behind)] of those between ranks."""
    plan = schedule(name, ranks, 1, virtual)
    pairs = [(s, plan.rank_of[s], plan.rank_of[s + 1]) for s in range(plan.stages - 1)]
    return [(s, one, other) for s, one, other in pairs if one != other]


def expected(name, virtual, ranks, microbatches, *, trains):
    """By rank, the same for a step that is not the first: messages, and one all_gather of two numbers a rank."""
    calls = [Counter({("all", "all_gather_single", "", 2 * ranks): 1}) for _ in range(ranks)]
    for s, one, other in boundaries(name, virtual, ranks):
        calls[one][f"activation {s}", "sends", "the activation", MESSAGE] = microbatches
        calls[other][f"activation {s}", "receives", "the activation", MESSAGE] = microbatches
        if trains:
            calls[other][f"gradient {s}", "sends", "the gradient", MESSAGE] = microbatches
            calls[one][f"gradient {s}", "receives", "the gradient", MESSAGE] = microbatches
    return calls


@pytest.mark.parametrize("microbatches", [3, pytest.param(8, marks=pytest.mark.drill)])
@pytest.mark.parametrize("ranks", [2, 4, pytest.param(3, marks=pytest.mark.drill)])
@pytest.mark.parametrize(("name", "virtual"), WAYS, ids=[name for name, _ in WAYS])
def test_what_crosses_a_boundary(pool, name, virtual, ranks, microbatches):
    results = pool.run(ranks, crossings, name, virtual, microbatches)
    for rank, (first, second, evaluated, again) in enumerate(results):
        for (calls, formula, sent), trains in ((second, True), (again, False)):
            mine = expected(name, virtual, ranks, microbatches, trains=trains)[rank]
            assert calls == mine
            messages = sum(n for (_, direction, _, _), n in calls.items() if direction == "sends")
            assert formula == 8 * (MESSAGE * messages + 2 * (ranks - 1))
            assert sent is None or abs(sent - formula) <= 0.01 * formula + 4096 * (messages + 1)
        for (calls, *_), (later, *_) in ((first, second), (evaluated, again)):
            described = {key: n for key, n in calls.items() if key[2] == "description"}
            assert calls - Counter(described) == later
            assert all("activation" in group for group, *_ in described)
            lines = {(group, way): n for (group, way, about, _), n in later.items() if group.startswith("activation")}
            for line, n in lines.items():  # a length and a text a message, none of them long
                sizes = [(size, k) for (group, way, _, size), k in described.items() if (group, way) == line]
                assert sum(k for _, k in sizes) == 2 * n and all(size < 100 for size, _ in sizes)


def changing(run):
    """Descriptions in each of several steps, by the rows of their microbatches."""
    pipe, told = pipeline(run, "1f1b", 1, 2), []
    for rows in (3, 3, 2, 3, 2, 0, 0):
        with recording() as recorder:
            pipe.step(batches(2, rows))
        told.append(sum(call.about == "description" for call in recorder.calls))
    return told


def test_descriptions_come_once_for_each_kind_of_step(pool):
    assert pool.run(2, changing) == [[4, 0, 4, 0, 0, 4, 0]] * 2


def forgetting(run):
    """The same, where two kinds of steps are remembered."""
    pipe, told = pipeline(run, "1f1b", 1, 2), []
    with mock.patch.object(executor, "REMEMBERED", 2):
        for rows in (3, 2, 1, 3, 3):
            with recording() as recorder:
                pipe.step(batches(2, rows))
            told.append(sum(call.about == "description" for call in recorder.calls))
    return told, len(pipe.known)


def test_only_so_many_kinds_of_steps_are_remembered(pool):
    assert pool.run(2, forgetting) == [([4, 4, 4, 4, 0], 2)] * 2


def by_itself(run, name, virtual):
    """Calls that send anything, bytes by the ledger, bytes on sockets, of a second step."""
    pipe = pipeline(run, name, virtual, 3)
    pipe.step(batches(3))
    with recording() as recorder, watching(book := Ledger()):
        before = demo.bytes_written()
        pipe.step(batches(3))
        pipe.evaluate(batches(2))
        sent = demo.bytes_since(before)
    return [call.op for call in recorder.calls if call.size > 1], sum(row.algorithm for row in book.rows()), sent or 0


@pytest.mark.parametrize(("name", "virtual"), WAYS, ids=[name for name, _ in WAYS])
def test_one_rank_sends_nothing(pool, name, virtual):
    assert pool.run(1, by_itself, name, virtual) == [([], 0, 0)]
