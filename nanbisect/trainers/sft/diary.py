"""What the training itself knows and the probe can't: records, channels, resolved settings, how it ended.

JSON lines in `trainer.jsonl`, each written at once, so that a process that dies leaves what it did.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from nanbisect.outcome import jsonable

FILE = "trainer.jsonl"


class Diary:
    """The training's own lines of this attempt."""

    def __init__(self, folder: Path) -> None:
        self.handle = os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.began = time.perf_counter()

    def write(self, kind: str, **fields: Any) -> None:
        """Append one line; non-finite numbers by name. `at` is seconds since the process began its work."""
        entry = {"kind": kind, "at": time.perf_counter() - self.began, **jsonable(fields)}
        os.write(self.handle, (json.dumps(entry, allow_nan=False) + "\n").encode())

    def close(self) -> None:
        """Nothing more will be written."""
        os.close(self.handle)
