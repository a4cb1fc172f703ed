"""What a run was, for whoever finds its folder: config, rank map and groups, code, data, versions, in manifest.json."""

import hashlib
import importlib.metadata
import platform
import subprocess
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from collectives.runtime import Runtime
from nd_mesh.config import Config
from nd_mesh.data import Stream
from nd_mesh.mesh import Grid


def of(config: Config, run: Runtime, *streams: Stream) -> dict[str, Any]:
    """The content of manifest.json, and what a checkpoint tells of its run.

    ranks: where each stands on every axis. groups: by view, dense and where experts are shared expert, then by name
    (GROUPS and EXPERT_GROUPS of mesh.py), the ranks of every group.
    """
    grid = Grid(config.mesh)
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "world": run.size,
        "backend": run.backend,
        "device": run.device.type,
        "ranks": {rank: grid.coordinates(rank) for rank in range(run.size)},
        "groups": grid.views(),
        "commit": code_commit(Path(__file__).parent.parent),
        "data": data_hash(*streams),
        "versions": versions(),
        "config": asdict(config),
    }


def data_hash(*streams: Stream) -> str:
    """SHA-256 over tokens and document starts: equal for equal data, wherever it lies. Reads all of it, once."""
    digest = hashlib.sha256()
    for stream in streams:
        for array in (stream.tokens, stream.starts.astype(np.int64)):
            digest.update(f"{array.dtype} {len(array)};".encode())
            digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()


def code_commit(root: Path) -> str:
    """The commit of the repository whose root this is, with "-dirty" for changes since; "unknown" without one."""
    ours = _git(root, "rev-parse", "--show-toplevel")
    if ours is None or Path(ours) != root.resolve() or (head := _git(root, "rev-parse", "HEAD")) is None:
        return "unknown"
    return f"{head}-dirty" if _git(root, "status", "--porcelain") else head


def _git(root: Path, *command: str) -> str | None:
    try:
        ran = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return ran.stdout.strip()


def versions() -> dict[str, str]:
    """Of Python, torch, numpy and this project."""
    try:
        own = importlib.metadata.version("ndparallel")
    except importlib.metadata.PackageNotFoundError:
        own = "unknown"
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "ndparallel": own,
    }
