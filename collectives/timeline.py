"""A timeline: what a rank computes, what is on its way, and when it waits, as lanes over time, in text and as PNG.

    compute             |--f0--|--f1--|--f2--|-----b2------|-----b1------|-----b0------|
    all_gather     |-0--|--1--|--2--|        |--1--|     |--0--|
    reduce_scatter                                         |---2---|     |---1---|     |---0---|
    waits          |-0--|                                                              |---0---|
    ms             0         10        20        30        40        50        60        70

`with watching(Slow(…), timeline := Timeline()):` records it. A collective is on the lane of its operation, under the
name that `about` gives it: with slowed links from when the link takes it up until its data is there; otherwise from its
launch until this rank has waited for it, since nobody sees it arrive. Times are seconds of time.monotonic, which all
processes of a machine share. Communication hides where its lane lies under computing, and is exposed where a rank
waits. PyTorch's counterpart: torch.profiler's trace. Left out: streams of a device, whose work Python does not see.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from collectives.call import Call
from collectives.slow import on_the_link
from collectives.watch import Watcher, watches

_FIRST_AND_LAST = MappingProxyType({"compute": 0, "waits": 2})  # of the lanes; the others lie between
_COLOURS = MappingProxyType(
    {
        **{"compute": "lightskyblue", "forward": "lightskyblue", "backward": "cornflowerblue", "waits": "salmon"},
        **{"input": "cornflowerblue", "weight": "palegreen"},  # the halves of a pipeline's backward
        **{"all_gather": "sandybrown", "reduce_scatter": "mediumseagreen", "all_reduce": "darkkhaki"},
    }
)


class Span(NamedTuple):
    """Something on a lane, from start to stop in seconds."""

    lane: str
    name: str
    start: float
    stop: float


class Timeline(Watcher):
    """Records `spans` of this rank, in the order of their ends, while it watches; otherwise nothing.

    Lanes are "compute", those of operations (all_gather for all_gather_single), and "waits": from when this rank begins
    to wait for a call, or makes one that is not asynchronous, until that has ended.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._open: dict[str, tuple[str, float]] = {}

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        """The block is a span."""
        start = time.monotonic()
        try:
            yield
        finally:
            if watches(self):
                self.spans.append(Span(lane, name, start, time.monotonic()))

    def begin(self, lane: str, name: str) -> object:
        """A span begins, and the one that is open on the lane ends. Returns what `end` can know it by."""
        now = time.monotonic()
        self._end(lane, now)
        if watches(self):
            self._open[lane] = name, now
        return self._open.get(lane)

    def end(self, lane: str, begun: object = None) -> None:
        """The open span of the lane ends, if there is one; given what `begin` returned, only if it still is that."""
        if begun is None or self._open.get(lane) is begun:
            self._end(lane, time.monotonic())

    def close(self) -> None:
        """All open spans end."""
        now = time.monotonic()
        for lane in list(self._open):
            self._end(lane, now)

    def _end(self, lane: str, now: float) -> None:
        if lane in self._open:
            self.spans.append(Span(lane, *self._open.pop(lane), now))

    def follow(self, name: str, module: nn.Module) -> None:
        """Record "forward NAME" and "backward NAME" on the lane compute whenever the module runs.

        Call it when a strategy has put its hooks on the module: what those do stays outside. A backward goes from the
        first gradient of the outputs until those of the inputs are there, or the next followed module's begins, or all
        of backward is over. Follow modules that run one after another: one inside of another ends the outer's span.
        """
        _Followed(self, name, module)

    def begins(self, call: Call) -> None:
        """Note when; not of a part, nor of a group of one, which sends nothing."""
        if call.outer is None and call.size > 1:
            call.notes[self] = 2 * (time.monotonic(),)  # who calls synchronously waits from here

    def waits(self, call: Call) -> None:
        """Note when this rank began to wait."""
        if self in call.notes:
            call.notes[self] = call.notes[self][0], time.monotonic()

    def ends(self, call: Call) -> None:
        """Record the call and the wait."""
        if self not in call.notes:
            return
        now, (began, waited) = time.monotonic(), call.notes[self]
        lane, times = call.op.removesuffix("_single"), _union(on_the_link(call)) or [(began, now)]
        self.spans += [Span(lane, call.about, *each) for each in times]
        # Slow sleeps until the link is free, before or after this is called.
        self.spans.append(Span("waits", call.about, waited, max(now, times[-1][1])))


class _Followed:
    """The hooks of a followed module, in the order in which they fire.

    A strategy gathers and waits in hooks of its own, or in autograd functions that it puts around the module. Ours go
    on both sides of those, so whatever it does comes after the end of one span and before the begin of the next.
    """

    def __init__(self, timeline: Timeline, name: str, module: nn.Module):
        self.timeline, self.name = timeline, name
        self.forward: object = None  # the span of the forward under way
        self.backward: list[object] = []  # holds that of its backward, while that runs
        module.register_forward_pre_hook(self._take_inputs, prepend=True, with_kwargs=True)
        module.register_forward_pre_hook(self._begin_forward, with_kwargs=True)
        module.register_forward_hook(self._end_forward, prepend=True)

    def _take_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.backward = []
        self._end_with(args, kwargs)

    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._end_with(args, kwargs)
        self.forward = self.timeline.begin("compute", f"forward {self.name}")

    def _end_forward(self, module: nn.Module, args: Any, outputs: Any) -> None:
        self._end(self.forward)
        if tensors := self._with_gradients(outputs):  # the module behind this one is over, and then the strategy comes
            register_multi_grad_hook(tensors, lambda _: self.timeline.end("compute"), mode="any")
        for output in tensors:
            if output.grad_fn is not None:  # whose hooks fire after all of the tensor's
                output.grad_fn.register_prehook(functools.partial(self._begin_backward, self.backward))

    def _end_with(self, *inputs: Any) -> None:
        if tensors := self._with_gradients(inputs):
            register_multi_grad_hook(tensors, functools.partial(self._end_backward, self.backward), mode="all")

    def _begin_backward(self, backward: list[object], gradients: Any) -> None:
        if not backward:
            backward.append(self.timeline.begin("compute", f"backward {self.name}"))
            # Where no input needs a gradient, none tells the end.
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(backward.pop()))

    def _end_backward(self, backward: list[object], gradients: Any) -> None:
        if backward:
            self._end(backward[-1])

    def _end(self, begun: object) -> None:
        if begun is not None:
            self.timeline.end("compute", begun)

    def _with_gradients(self, tree: Any) -> list[torch.Tensor]:
        """The tensors on which to put hooks: none while the timeline does not watch."""
        leaves = tree_leaves(tree) if watches(self.timeline) else []
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


# -- how long ----------------------------------------------------------------------------------------------------------


def busy(spans: Sequence[Span], lane: str) -> float:
    """Seconds in which something is on the lane."""
    return _length([(span.start, span.stop) for span in spans if span.lane == lane])


def overlap(spans: Sequence[Span], a: str, b: str) -> float:
    """Seconds in which something is on lane a and on lane b as well."""
    return busy(spans, a) + busy(spans, b) - _length([(s.start, s.stop) for s in spans if s.lane in (a, b)])


def _length(times: Sequence[tuple[float, float]]) -> float:
    return sum(stop - start for start, stop in _union(times))


def _union(times: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times in order, those that touch made one."""
    union: list[tuple[float, float]] = []
    for start, stop in sorted(times):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], stop)
        else:
            union.append((start, stop))
    return union


# -- pictures ----------------------------------------------------------------------------------------------------------


def text(*ranks: Sequence[Span], width: int = 100) -> str:
    """The lanes of one rank, or of several one under the other, as lines of at most `width` characters.

    A span is |--name--|, "forward blocks.3" as f3 where there is no room for all of it; one too short for that, |. The
    last line counts milliseconds from the first span's start.
    """
    spans = [span for rank in ranks for span in rank]
    if not spans:
        return ""
    first, last = min(span.start for span in spans), max(span.stop for span in spans)
    margin = max(len(span.lane) for span in spans) + 1
    columns = width - margin - 1
    column = functools.partial(_column, first, columns / ((last - first) or 1.0))
    lines = []
    for rank, own in enumerate(ranks):
        lines += [f"rank {rank}"] * (len(ranks) > 1)
        lines += [f"{lane:{margin}}{_line(row, columns, column)}" for lane, row in _rows(own)]
    lines.append(f"{'ms':{margin}}{_axis(last - first, columns)}")
    return "\n".join(line.rstrip() for line in lines)


def _column(first: float, columns_per_second: float, at: float) -> int:
    return round((at - first) * columns_per_second)


def _rows(spans: Sequence[Span]) -> Iterator[tuple[str, list[Span]]]:
    """The lanes from top to bottom; spans that overlap go into further rows, without the lane's name."""
    lanes: dict[str, list[list[Span]]] = {}
    for span in sorted(spans, key=lambda span: span.start):
        rows = lanes.setdefault(span.lane, [])
        row = next((row for row in rows if row[-1].stop <= span.start), None)
        if row is None:
            rows.append(row := [])
        row.append(span)
    for lane in sorted(lanes, key=lambda lane: (_FIRST_AND_LAST.get(lane, 1), lane)):
        yield from zip([lane, *[""] * len(lanes[lane])], lanes[lane], strict=False)


def _line(row: Sequence[Span], columns: int, column: Callable[[float], int]) -> str:
    cells = [" "] * (columns + 1)
    for span in row:
        start, stop = column(span.start), column(span.stop)
        room = max(0, stop - start - 1)
        cells[start : stop + 1] = f"|{_label(span.name, room):-^{room}}" + "|" * (stop > start)
    return "".join(cells)


def _label(name: str, room: int) -> str:
    """The name, or short, or nothing, as there is room: forward blocks.3, f3."""
    *before, last = name.split() or [""]
    short = "".join(word[0] for word in before) + last.rpartition(".")[2]
    return next((label for label in (name, short) if len(label) <= room), "")


def _axis(seconds: float, columns: int) -> str:
    """Round numbers of milliseconds, each from its column on, ten columns apart or more."""
    per_column = (1e3 * seconds / columns) or 1.0
    power = 10 ** math.floor(math.log10(10 * per_column))
    step = next(times * power for times in (1, 2, 5, 10) if times * power >= 10 * per_column * (1 - 1e-9))
    axis = ""
    for tick in range(int(columns * per_column / step + 1e-9) + 1):
        longer = axis.ljust(round(tick * step / per_column)) + f"{tick * step:g}"
        axis = longer if len(longer) <= columns + 1 else axis
    return axis


def draw(path: Path, *ranks: Sequence[Span], title: str = "", names: Sequence[str] = ()) -> None:
    """The same as a picture, .png, .svg or .pdf; needs matplotlib. names: of the panels, if they are no ranks."""
    import matplotlib  # noqa: PLC0415, an extra

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    names = names or [f"rank {rank}" if len(ranks) > 1 else "" for rank in range(len(ranks))]
    rows = [list(_rows(spans)) for spans in ranks]
    heights = [max(1, len(each)) for each in rows]
    shape = {"figsize": (10, 0.7 + 0.35 * sum(heights) + 0.3 * len(ranks)), "layout": "constrained"}
    figure, panels = plt.subplots(len(ranks), squeeze=False, sharex=True, height_ratios=heights, **shape)
    first = min((span.start for spans in ranks for span in spans), default=0.0)
    last = max((span.stop for spans in ranks for span in spans), default=1.0)
    for rank, (panel, own) in enumerate(zip(panels[:, 0], rows, strict=True)):
        _draw_panel(panel, own, first, last)
        panel.set_title(names[rank], loc="left", fontsize=9)
    figure.suptitle(title)
    panels[-1, 0].set_xlabel("ms")
    figure.savefig(path, dpi=100)
    plt.close(figure)


_LETTERS = 105  # of a bar's label, over the whole width of a picture


def _draw_panel(panel: Any, rows: Sequence[tuple[str, Sequence[Span]]], first: float, last: float) -> None:
    for y, (_, row) in enumerate(rows):
        for span in row:
            left, length = 1e3 * (span.start - first), 1e3 * (span.stop - span.start)
            panel.barh(y, length, left=left, height=0.85, color=_colour(span), edgecolor="white", linewidth=0.5)
            label = _label(span.name, int(_LETTERS * (span.stop - span.start) / ((last - first) or 1.0)))
            panel.text(left + length / 2, y, label, ha="center", va="center", fontsize=9)
    panel.set_yticks(range(len(rows)), [lane for lane, _ in rows])
    panel.set_xlim(0, 1e3 * (last - first) or 1.0)
    panel.invert_yaxis()


def _colour(span: Span) -> str:
    """That of the name's first word, as forward and backward have, or the lane's."""
    return _COLOURS.get(span.name.partition(" ")[0], _COLOURS.get(span.lane, "plum"))
