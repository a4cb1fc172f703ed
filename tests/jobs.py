"""Start a job of several processes, watch how it ends, and how long its last process lives."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.demos import ROOT, environment, marked

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
FAILING_NOW = "failing now"  # what a rank prints that is about to fail on purpose: the clock starts


@dataclass(frozen=True)
class Ending:
    """How a job ended. Seconds count from the moment at which a rank failed, or from the start if none said so."""

    status: int
    output: str  # stdout and stderr, in order
    error_after: float  # seconds until the expected words stood in the output; infinite if they never did
    gone_after: float  # seconds until no process of the job was left


def run(command: Sequence[str], *, error: str = "", limit: float = 60.0) -> Ending:
    """Run a job to its end; `error` are the words to wait for. What is left after `limit` seconds is killed."""
    mark = uuid.uuid4().hex
    began = time.monotonic()
    failing = error_at = None
    with tempfile.NamedTemporaryFile() as log:
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        process = subprocess.Popen(command, cwd=ROOT, env=environment(mark), start_new_session=True, **streams)
        while (ended := process.poll()) is None or marked(mark):
            output = Path(log.name).read_text(errors="replace")
            if failing is None and FAILING_NOW in output:
                failing = time.monotonic()
            if error_at is None and error and error in output:
                error_at = time.monotonic()
            if time.monotonic() - began > limit:
                break
            time.sleep(0.05)
        gone = time.monotonic() if ended is not None and not marked(mark) else float("inf")
        for pid in marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        status = process.wait()
        output = Path(log.name).read_text(errors="replace")
    if error_at is None and error in output:
        error_at = gone
    start = failing or began
    return Ending(status, output, float("inf") if error_at is None else error_at - start, gone - start)
