"""Whether a run can be gone on with: the same matrix, inputs and kind of machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanbisect.errors import StoreError
from nanbisect.machine import changed_inputs
from nanbisect.matrix import Matrix
from nanbisect.matrix_file import matrix_to_json
from nanbisect.store import Store
from nanbisect.trainers.registry import TRAINERS


def to_resume(matrix: Matrix, out: Path | None, reports: Path) -> Store:
    """The run to go on with. Raises StoreError when there is none, or when its matrix was another one."""
    folder = out or _latest_of(matrix, reports)
    store = Store.open(folder)
    kept, now = store.run()["matrix"], matrix_to_json(matrix)
    changed = sorted(name for name in kept if kept[name] != now.get(name) and name not in ("timeout", "folder"))
    if changed:
        raise StoreError(
            f"{folder} was run with another matrix: {', '.join(changed)} changed\n"
            "try: a new run, or the matrix and flags of that run (its run.json has them)"
        )
    edited = changed_inputs(store.run(), TRAINERS[matrix.trainer], matrix)
    if edited:
        raise StoreError(
            f"{folder} was run with another {', '.join(edited)}: cells must be of one experiment\ntry: a new run"
        )
    return store


def same_machine(store: Store, now: Mapping[str, Any]) -> None:
    """Cells of one run must come from one kind of machine. Raises StoreError."""
    before = store.run()["environment"]
    moved = [name for name in ("device", "torch", "gpus", "packages") if before.get(name) != now.get(name)]
    if moved:
        raise StoreError(
            f"{store} was run with another {', '.join(moved)} ({', '.join(str(before.get(name)) for name in moved)}): "
            "cells must be of one experiment\ntry: a new run, or the machine and environment of that run"
        )


def _latest_of(matrix: Matrix, reports: Path) -> Path:
    name = re.compile(rf"^{re.escape(matrix.name)}-\d{{8}}-\d{{6}}(-\d+)?$")
    runs = (
        sorted(path for path in reports.glob(f"{matrix.name}-*") if name.match(path.name)) if reports.is_dir() else []
    )
    if not runs:
        raise StoreError(f"there is no run of {matrix.name} below {reports} to go on with\ntry: --out with its folder")
    return runs[-1]
