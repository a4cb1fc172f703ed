"""How much memory a call takes at its peak, and how much a build leaves: from the allocator's own events.

The resident set of a process is mostly torch itself and hardly shrinks, so it tells nothing about a strategy. On the
CPU torch's profiler records every block that the allocator hands out or takes back; on a GPU the allocator counts for
itself. What others allocate is not in it: gloo's buffers, numpy, Python.

The profiler ignores blocks older than itself, so it would not see a step free the gradients of the step before.
Therefore `peak_bytes` records two calls, of which the second counts. Blocks that another thread takes or frees stay
unseen. PyTorch's counterpart: torch.cuda.max_memory_allocated, and for the CPU the profiler's memory view.
"""

import contextlib
import gc
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_SPAN = "the call that counts"


def peak_bytes(
    call: Callable[[], object], device: torch.device, *, prepare: Callable[[], object] = lambda: None
) -> int:
    """The most bytes on `device` that live at once during `call`, beyond those that live at its start.

    `call` runs twice, each time after `prepare`, which is not counted. Scalars that torch wraps, 8 bytes each, count.
    Cycles that only Python's garbage collector could free live on: when it comes along is chance.
    """

    def ready() -> None:
        prepare()
        call()
        prepare()

    collecting = gc.isenabled()
    gc.disable()
    try:
        return _gpu_peak(ready, call, device) if device.type == "cuda" else _cpu_peak(ready, call)
    finally:
        if collecting:
            gc.enable()


def _gpu_peak(ready: Callable[[], object], call: Callable[[], object], device: torch.device) -> int:
    ready()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    return torch.cuda.max_memory_allocated(device) - before


def _cpu_peak(ready: Callable[[], object], call: Callable[[], object]) -> int:
    def both() -> None:
        ready()
        with record_function(_SPAN):
            call()

    events = _recorded(both)
    begin = next(event["ts"] for event in events if event["name"] == _SPAN)
    before = [level for when, level in _levels(events) if when < begin]
    during = [level for when, level in _levels(events) if when >= begin]
    start = before[-1] if before else 0
    return max([start, *during]) - start


def built_bytes(build: Callable[[], Any], device: torch.device) -> tuple[Any, int]:
    """What `build` returns, and how many more bytes on `device` are allocated after it than before.

    On the CPU it does not see what `build` frees of older blocks.
    """
    built = []

    def once() -> None:
        built.append(build())
        gc.collect()

    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        once()
        return built[0], torch.cuda.memory_allocated(device) - before
    levels = list(_levels(_recorded(once)))
    return built[0], levels[-1][1] if levels else 0


def _recorded(work: Callable[[], object]) -> list[dict]:
    """The events of the profiler's trace while `work` runs, in order of time; `ts` is in microseconds."""
    with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorder:
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        recorder.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return sorted((event for event in events if "ts" in event), key=lambda event: event["ts"])


def _levels(events: list[dict]) -> Iterator[tuple[float, int]]:
    """(time, bytes that live) after each change, of blocks in the CPU's memory that were allocated under the record."""
    living: dict[int, int] = {}
    total = 0
    for event in events:
        if event["name"] != "[memory]" or event["args"]["Device Type"] != 0:
            continue
        address, change = event["args"]["Addr"], event["args"]["Bytes"]
        if change > 0:
            living[address] = change
        else:
            change = -living.pop(address, 0)
        total += change
        yield event["ts"], total


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The profiler's C++ part writes notes to file descriptor 2, whatever level is asked for."""
    saved = os.dup(2)
    with Path(os.devnull).open("wb") as sink:
        os.dup2(sink.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
