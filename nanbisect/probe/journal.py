"""JSON lines, one file a rank and process, opened at the first event, each line written at once.

A process that dies leaves every line it wrote. A process that only imported torch leaves one line in
`armed.jsonl` and no file of its own.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from typing import Any, Mapping


def plain(value: Any) -> Any:
    """JSON values; non-finite floats by name."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if value != value else "+inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def line(fields: Mapping[str, Any]) -> bytes:
    """One event as bytes, NaN disallowed."""
    return (json.dumps(plain(fields), allow_nan=False, default=str) + "\n").encode()


def append(path: str, data: bytes) -> None:
    """One write to the end of a file: lines of several processes never mix."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(handle, data)
    finally:
        os.close(handle)


class Journal:
    """The event file of this process. Forks get their own: the file is keyed by pid."""

    def __init__(self, folder: str, versions: Mapping[str, Any]) -> None:
        self.folder = folder
        self.versions = versions
        self.pid: int | None = None
        self.path = ""
        self.lines = 0

    def armed(self) -> None:
        """Leave the line that says: this process imported torch and has the probe."""
        append(os.path.join(self.folder, "armed.jsonl"), line({"pid": os.getpid(), "argv": sys.argv}))

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event; opens the file with an `awake` line first."""
        if self.pid != os.getpid():
            self.pid, self.lines = os.getpid(), 0
            self.path = os.path.join(self.folder, "events.%d.%d.jsonl" % (rank(), self.pid))
            self._append("awake", {"rank": rank(), "pid": self.pid, "argv": sys.argv, **self.versions})
        self._append(kind, fields)

    def _append(self, kind: str, fields: Mapping[str, Any]) -> None:
        number, self.lines = self.lines, self.lines + 1  # counted even if the write fails: a gap tells
        append(self.path, line({"kind": kind, "n": number, "time": time.time(), **fields}))


def group() -> Any:
    """torch.distributed, if this process is in a group."""
    distributed = sys.modules.get("torch.distributed")
    there = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed if there else None


def world() -> int:
    """How many processes train together: 1 without a process group."""
    distributed = group()
    return 1 if distributed is None else int(distributed.get_world_size())


def shared() -> bool:
    """Whether other processes train with this one: a value may come from them by reduction."""
    return world() > 1


def rank() -> int:
    """This process's rank: from the process group if there is one, else from the launcher's variable."""
    distributed = group()
    if distributed is not None:
        return int(distributed.get_rank())
    text = os.environ.get("RANK", "")
    return int(text) if text.isdigit() else 0
