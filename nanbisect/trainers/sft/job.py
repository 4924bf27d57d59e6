"""What the driver tells a training process of the built-in trainer: one JSON file. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nanbisect.cells import Cells
from nanbisect.matrix import Matrix
from nanbisect.trainers.sft.settings import SETTINGS


@dataclass(frozen=True)
class Job:
    """One cell to train, or (with `levels`) one environment to check.

    `settings` is the text of every setting given; `size` the number of records every cell sees, in the
    same order; `seed` that of this attempt. Paths are absolute. `folder` takes what the process writes.
    """

    recipe: str
    settings: Mapping[str, str]
    folder: str
    size: int
    seed: int = 0
    model: str | None = None
    data: str | None = None
    device: str = "auto"
    records: tuple[str, ...] = ()
    skip_records: int = 0
    trust_remote_code: bool = False
    levels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write the file that the process reads."""
        path.write_text(json.dumps(asdict(self), indent=1, sort_keys=True), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Job:
        """The inverse of `write`."""
        data = json.loads(path.read_text(encoding="utf-8"))
        levels = {name: tuple(values) for name, values in data["levels"].items()}
        return cls(**{**data, "levels": levels, "records": tuple(data["records"])})


def size(matrix: Matrix) -> int:
    """Records that every cell sees: `steps` optimizer steps of the cell with the largest global batch."""
    return matrix.steps * largest_batch(matrix)


def largest_batch(matrix: Matrix) -> int:
    """The largest global batch of any cell."""
    splits = Cells(matrix).combinations(("batch_size", "gradient_accumulation"))
    return max(global_batch({**matrix.settings, **split}) for split in splits)


def global_batch(settings: Mapping[str, str]) -> int:
    """Records in an optimizer step."""
    return int(value_of(settings, "batch_size") * value_of(settings, "gradient_accumulation"))


def value_of(settings: Mapping[str, str], name: str) -> Any:
    """A setting's value, given or by default."""
    return SETTINGS[name].parse(settings.get(name, SETTINGS[name].default))
