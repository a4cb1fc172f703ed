"""Timelines: pictures and lengths of given spans; what is recorded of computing, of calls and of waits."""

import itertools
import random
import time

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from collectives import comm, timeline
from collectives.call import Call
from collectives.slow import Slow
from collectives.timeline import Span, Timeline, busy, draw, overlap, text
from collectives.watch import about, watching


def spans_of(lane, *named):
    """(name, start, stop) in milliseconds."""
    return [Span(lane, name, 5 + start / 1000, 5 + stop / 1000) for name, start, stop in named]


STEP = [
    *spans_of("all_gather", ("blocks.0", 0, 5), ("blocks.1", 5, 11), ("blocks.2", 11, 17)),
    *spans_of("waits", ("blocks.0", 0, 5), ("blocks.0", 68, 76)),
    *spans_of("compute", *((f"forward blocks.{i}", 5 + 7 * i, 12 + 7 * i) for i in range(3))),
    *spans_of("compute", *((f"backward blocks.{i}", 54 - 14 * i, 68 - 14 * i) for i in range(3))),
    *spans_of("all_gather", ("blocks.1", 26, 32), ("blocks.0", 38, 44)),
    *spans_of("reduce_scatter", *((f"blocks.{i}", 68 - 14 * i, 76 - 14 * i) for i in range(3))),
]


# ---- pictures


def drawn(picture):
    return "\n".join(line[4:].rstrip() for line in picture.splitlines()[1:-1])


def test_a_step_of_fully_sharded_data_parallelism():
    picture = """
    compute             |--f0--|--f1--|--f2--|-----b2------|-----b1------|-----b0------|
    all_gather     |-0--|--1--|--2--|        |--1--|     |--0--|
    reduce_scatter                                         |---2---|     |---1---|     |---0---|
    waits          |-0--|                                                              |---0---|
    ms             0         10        20        30        40        50        60        70
    """
    assert text(STEP, width=92) == drawn(picture)
    assert drawn(picture) in drawn("\n" + timeline.__doc__), "the file shows the same"


def test_names_are_whole_or_short_or_left_out_and_gaps_are_blank():
    spans = spans_of(
        "compute", ("forward blocks.3", 0, 20), ("forward blocks.3", 25, 30), ("f3", 30, 31), ("f4", 40, 40)
    )
    spans += spans_of("all_reduce", ("", 0, 4))
    picture = """
    compute    |-forward blocks.3--|    |-f3-||        |
    all_reduce |---|
    ms         0         10        20        30
    """
    assert text(spans, width=52) == drawn(picture)


def test_spans_that_overlap_go_into_rows_of_their_own():
    spans = spans_of("all_gather", ("a", 0, 10), ("b", 4, 14), ("c", 10, 20), ("d", 12, 16), ("e", 14, 20))
    picture = """
    all_gather |----a----|----c----|
                   |----b----|--e--|
                           |-d-|
    ms         0         10
    """
    assert text(spans, width=32) == drawn(picture)


def test_ranks_stand_below_one_another_on_one_axis():
    one = spans_of("compute", ("f0", 0, 10), ("b0", 10, 20))
    two = spans_of("compute", ("f0", 20, 30), ("b0", 30, 40))
    picture = """
    rank 0
    compute |---f0----|---b0----|
    rank 1
    compute                     |---f0----|---b0----|
    ms      0         10        20        30
    """
    assert text(one, two, width=49) == drawn(picture)


def test_nothing_and_no_time_at_all():
    assert text() == text([]) == ""
    assert text(spans_of("compute", ("f", 3, 3)), width=20).splitlines()[0] == "compute |"


def test_the_axis_counts_in_round_numbers_and_lines_keep_the_width():
    for seconds in (3e-6, 0.0004, 0.013, 0.31, 2.7, 41.0):
        for width in (20, 47, 100, 161):
            lines = text([Span("compute", "f", 7.0, 7.0 + seconds)], width=width).splitlines()
            assert max(map(len, lines)) <= width
            assert len(lines[0]) == width, "the picture fills it"
            columns, axis = width - len("compute ") - 1, lines[-1][len("compute ") :]
            ticks = axis.split()
            assert ticks[0] == "0"
            for tick in ticks[1:]:
                assert f"{float(tick):.1e}"[0] in "123456789"
                at = axis.index(f" {tick}") + 1
                assert abs(at - float(tick) / 1000 / seconds * columns) <= 0.5 + 1e-6
            assert len(ticks) >= 2 or columns < 25


def test_png(tmp_path):
    pytest.importorskip("matplotlib")
    for number, ranks in enumerate([[STEP], [STEP, STEP, []], [[]], [spans_of("compute", ("f", 3, 3))]]):
        path = tmp_path / f"{number}.png"
        draw(path, *ranks, title="a step")
        assert path.read_bytes().startswith(b"\x89PNG")
    draw(tmp_path / "named.png", STEP, [], names=["prefetch=0", "prefetch=1"])
    assert (tmp_path / "named.png").stat().st_size > 0


# ---- lengths


def test_lengths_of_lanes():
    assert busy(STEP, "compute") == pytest.approx(0.063)
    assert busy(STEP, "all_gather") == pytest.approx(0.029)
    assert overlap(STEP, "all_gather", "compute") == pytest.approx(0.024), "all but the first"
    assert overlap(STEP, "reduce_scatter", "compute") == pytest.approx(0.016), "all but the last"
    assert overlap(STEP, "compute", "waits") == pytest.approx(0)
    assert busy(STEP, "send") == overlap(STEP, "send", "compute") == 0


def test_lengths_count_what_overlaps_once():
    draws = random.Random(0)
    for _ in range(50):
        spans, cells = [], {"a": set(), "b": set()}
        for _ in range(draws.randrange(12)):
            lane, start, length = draws.choice("ab"), draws.randrange(40), draws.randrange(9)
            spans.append(Span(lane, "", start, start + length))
            cells[lane] |= set(range(start, start + length))
        assert (busy(spans, "a"), overlap(spans, "a", "b")) == (len(cells["a"]), len(cells["a"] & cells["b"]))


# ---- spans given by the program


def on_the_clock(monkeypatch):
    """A clock that goes on by a second with every look."""
    times = iter(range(100))
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    return Timeline()


def test_begin_ends_what_was_before_on_its_lane(monkeypatch):
    recorded = on_the_clock(monkeypatch)
    with watching(recorded):
        recorded.begin("compute", "f0")  # 0
        recorded.begin("link", "g1")  # 1
        first = recorded.begin("compute", "f1")  # 2
        recorded.begin("compute", "f2")  # 3
        recorded.end("compute", first)  # is over already
        with recorded.span("device", "copy"):  # 4, 5
            pass
        recorded.end("compute")  # 6
        recorded.end("compute")  # 7
        recorded.close()  # 8
    spans = [("compute", "f0", 0, 2), ("compute", "f1", 2, 3), ("device", "copy", 4, 5)]
    assert recorded.spans == [*spans, ("compute", "f2", 3, 6), ("link", "g1", 1, 8)]


def test_nothing_is_recorded_while_it_does_not_watch(monkeypatch):
    recorded = on_the_clock(monkeypatch)
    model = nn.Linear(3, 3)
    recorded.follow("0", model)
    with watching(Timeline()):
        model(torch.ones(2, 3, requires_grad=True)).sum().backward()
        with recorded.span("compute", "f"):
            recorded.begin("compute", "g")
    recorded.close()
    assert recorded.spans == []


def test_a_block_that_raises_is_a_span(monkeypatch):
    recorded = on_the_clock(monkeypatch)
    with watching(recorded), pytest.raises(KeyError), recorded.span("compute", "f"):
        raise KeyError
    assert recorded.spans == [("compute", "f", 0, 1)]


# ---- modules that are followed


class Twice(nn.Module):
    """The same layer two times."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(self.layer(x))


def followed(model, x, backward=True, **names):
    recorded = Timeline()
    for name, module in names.items():
        recorded.follow(name, module)
    with watching(recorded):
        y = model(x).sum()
        if backward:
            y.backward()
        over = time.monotonic()
        recorded.close()
    assert all(span.start <= span.stop <= over for span in recorded.spans)
    return sorted(recorded.spans, key=lambda span: span.start)


def order(spans):
    return [span.name for span in spans if span.lane == "compute"]


@pytest.mark.parametrize("wants", [False, True])
def test_forwards_and_backwards_come_in_order_and_end_with_backward(wants):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    spans = followed(model, torch.ones(2, 4, requires_grad=wants), a=model[0], b=model[2])
    assert order(spans) == ["forward a", "forward b", "backward b", "backward a"]
    assert all(one.stop <= other.start for one, other in itertools.pairwise(spans))


def test_a_backward_ends_when_the_gradients_of_its_inputs_are_there():
    """What runs before the followed module, and takes long, is not its own."""
    slept = []

    class Slowly(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dout):
            slept.append(time.monotonic())
            time.sleep(0.01)
            return dout

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(4, 4)

        def forward(self, x):
            return self.last(Slowly.apply(x))

    model = Model()
    _, backward = followed(model, torch.ones(2, 4, requires_grad=True), last=model.last)
    assert backward.stop <= slept[0]


def test_a_module_that_runs_twice_has_two_of_each():
    model = Twice()
    spans = followed(model, torch.ones(2, 4), layer=model.layer)
    assert order(spans) == 2 * ["forward layer"] + 2 * ["backward layer"]
    assert all(span.stop > span.start for span in spans)
    [first, second] = spans[2:]
    assert first.stop <= second.start
    assert second.stop - second.start > 0.1 * (first.stop - first.start), "it is not cut off by the end of the first"


def test_a_backward_begins_with_the_first_of_several_outputs():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, number, *, x):
            return {"one": self.one(x), "other": [self.other(x), None], "number": number}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.both = Both()

        def forward(self, x):
            out = self.both(3, x=2 * x)
            return out["one"] + out["other"][0].exp().exp()

    model = Model()
    spans = followed(model, torch.ones(2, 4, requires_grad=True), both=model.both)
    assert order(spans) == ["forward both", "backward both"]


def test_a_graph_that_is_kept_has_a_backward_each_time():
    layer, recorded = nn.Linear(4, 4), Timeline()
    recorded.follow("0", layer)
    with watching(recorded):
        loss = layer(torch.ones(2, 4)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert order(recorded.spans) == ["forward 0", "backward 0", "backward 0"]


def test_a_forward_without_gradients_has_no_backward():
    model = nn.Sequential(nn.Linear(4, 4))
    with torch.no_grad():
        assert order(followed(model, torch.ones(2, 4), backward=False, only=model[0])) == ["forward only"]


# ---- ranks

LATENCY, BANDWIDTH = 0.02, 2e6  # seconds, bytes a second


def gathered_beside_computing(run, order):
    """A gather of 40 ms beside 25 ms of computing, a reduction waited for at once, a broadcast without a handle."""
    recorded = Timeline()
    watchers = {
        "slow first": (Slow(LATENCY, 1 / BANDWIDTH), recorded),
        "slow last": (recorded, Slow(LATENCY, 1 / BANDWIDTH)),
    }
    comm.barrier(group=run.world)
    with watching(*watchers[order]):
        output, own = torch.empty(run.size * 5000, dtype=torch.float64), torch.ones(5000, dtype=torch.float64)
        with about("blocks.1"):
            work = comm.all_gather_single(output, own, group=run.world, async_op=True)
        with recorded.span("compute", "forward blocks.0"):
            time.sleep(0.025)
        work.wait()
        with about("norm"):
            comm.reduce_scatter_single(own[:2500].clone(), own, group=run.world, async_op=True).wait()
        comm.broadcast(own, 0, group=run.world)
    return recorded.spans


@pytest.mark.parametrize("order", ["slow first", "slow last"])
def test_calls_on_slow_links_lie_on_their_lanes_and_waiting_is_what_is_exposed(pool, order):
    for rank, spans in enumerate(pool.run(2, gathered_beside_computing, order)):
        lanes = {lane: [span for span in spans if span.lane == lane] for lane in (span.lane for span in spans)}
        assert set(lanes) == {"all_gather", "compute", "waits", "reduce_scatter", "broadcast"}
        [gather], [compute] = lanes["all_gather"], lanes["compute"]
        assert gather.name == "blocks.1"
        assert gather.stop - gather.start == pytest.approx(LATENCY + 40_000 / BANDWIDTH)
        assert overlap(spans, "all_gather", "compute") == pytest.approx(compute.stop - max(gather.start, compute.start))
        assert busy(spans, "compute") >= 0.025

        waits = lanes["waits"]
        assert [wait.name for wait in waits] == ["blocks.1", "norm", ""]
        assert compute.stop <= waits[0].start
        assert waits[0].stop >= gather.stop, "the rest of it is exposed"
        rest = max(0.0, gather.stop - waits[0].start)
        assert overlap(spans, "all_gather", "waits") == pytest.approx(rest, abs=1e-6)

        [scatter] = lanes["reduce_scatter"]
        assert scatter.name == "norm", "its exchange is a part of it"
        assert scatter.stop - scatter.start == pytest.approx(LATENCY + 20_000 / BANDWIDTH)
        [broadcast] = lanes["broadcast"]
        assert broadcast.stop - broadcast.start == pytest.approx(LATENCY + (40_000 / BANDWIDTH if rank == 0 else 0))
        assert waits[2].stop - waits[2].start >= broadcast.stop - broadcast.start - 1e-3


def test_of_a_call_of_several_each_time_on_the_link_is_a_span(monkeypatch):
    """Two that follow at once are one. The rank begins to wait at 1 and is told of the end at 2."""
    recorded, slow = on_the_clock(monkeypatch), Slow(1, 1)
    whole = Call("all_reduce", None, ranks=(0, 1), about="norm")
    whole.parts = [Call("exchange", None, ranks=(0, 1), outer=whole) for _ in range(3)]
    for part, times in zip(whole.parts, [(1, 2), (2, 4), (7, 9)], strict=True):
        part.notes[slow] = times
    recorded.begins(whole)
    for event in (recorded.begins, recorded.waits, recorded.ends):
        event(whole.parts[0])
    recorded.waits(whole)
    recorded.ends(whole)
    assert recorded.spans == [("all_reduce", "norm", 1, 4), ("all_reduce", "norm", 7, 9), ("waits", "norm", 1, 9)]


def without_slow_links(run):
    with watching(recorded := Timeline()):
        own = torch.ones(6)
        work = comm.reduce_scatter_single(torch.empty(6 // run.size), own, group=run.world, async_op=True)
        with recorded.span("compute", "f"):
            time.sleep(0.01)
        work.wait()
        work.wait()
        comm.all_reduce(own, group=run.new_group([run.rank], "alone"))
    return recorded.spans


def test_without_slow_links_a_call_lasts_until_it_has_been_waited_for(pool):
    for spans in pool.run(2, without_slow_links):
        compute, scatter, wait = spans
        assert (scatter.lane, wait.lane) == ("reduce_scatter", "waits")
        assert scatter.start <= compute.start <= compute.stop <= wait.start <= wait.stop == scatter.stop


class Hooks:
    """A strategy that gathers before forward and backward and reduces after backward, all of it in sight."""

    def __init__(self, module, name, group):
        self.name, self.group = name, group
        module.register_forward_pre_hook(self.pre_forward, prepend=True)
        module.register_forward_hook(self.post_forward)

    def gather(self):
        with about(self.name):
            comm.all_gather_single(torch.empty(2 * 100), torch.ones(100), group=self.group)

    def reduce(self):
        with about(self.name):
            comm.reduce_scatter_single(torch.empty(100), torch.ones(2 * 100), group=self.group)

    def pre_forward(self, module, args):
        self.gather()
        register_multi_grad_hook(args, lambda _: self.reduce(), mode="all")

    def post_forward(self, module, args, output):
        register_multi_grad_hook([output], lambda _: self.gather(), mode="any")


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, body):
        ctx.body = body
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dout):
        ctx.body()
        return dout, None


class Functions(Hooks):
    """The same with autograd functions around the module."""

    def pre_forward(self, module, args):
        self.gather()
        return InBackward.apply(*args, self.reduce)

    def post_forward(self, module, args, output):
        return InBackward.apply(output, self.gather)


def under_a_strategy(run, strategy, before=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    recorded = Timeline()

    def follow():
        for name, layer in model.named_children():
            recorded.follow(name, layer)

    if before:
        follow()
    for name, layer in model.named_children():
        strategy(layer, name, run.world)
    if not before:
        follow()
    with watching(Slow(0.005, 0.0), recorded):
        model(torch.ones(3, 4, requires_grad=True)).sum().backward()
        recorded.close()
    return recorded.spans


@pytest.mark.parametrize(
    "strategy, backward",
    [
        (Hooks, "gather 1, backward 1, gather 0, reduce 1, backward 0, reduce 0"),  # two hooks of one tensor
        (Functions, "gather 1, backward 1, reduce 1, gather 0, backward 0, reduce 0"),
    ],
)
def test_what_a_strategy_waits_for_lies_outside_of_computing(pool, strategy, backward):
    expected = f"gather 0, forward 0, gather 1, forward 1, {backward}"
    for spans in pool.run(2, under_a_strategy, strategy):
        calls = {"all_gather": "gather ", "reduce_scatter": "reduce ", "compute": ""}
        shown = sorted((span for span in spans if span.lane != "waits"), key=lambda span: span.start)
        assert ", ".join(calls[span.lane] + span.name for span in shown) == expected
        assert busy(spans, "waits") >= 6 * 0.005 - 1e-6
        assert overlap(spans, "compute", "waits") < 1e-6


def test_followed_before_the_strategy_a_module_seems_to_compute_while_it_waits(pool):
    """The fault that the test before is there to see."""
    for spans in pool.run(2, under_a_strategy, Hooks, True):
        assert overlap(spans, "compute", "waits") > 0.004
