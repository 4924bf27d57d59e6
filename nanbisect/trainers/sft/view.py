"""The settings as the loop and as a recipe see them, and which of them the recipe read.

A recipe that never asks for a factor can't have applied it: what was read is part of the evidence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nanbisect.trainers.sft import settings as table
from nanbisect.trainers.sft.job import Job
from nanbisect.trainers.sft.problems import BadInput


def plan_of(job: Job) -> SimpleNamespace:
    """Every setting's value by name, and `recipe`, the recipe's short name.

    `attention` is eager, sdpa or flash; a forced SDPA kernel stands in `attention_kernel`. Raises BadInput.
    """
    try:
        values = table.parse(job.settings)
    except ValueError as error:
        raise BadInput(str(error)) from error
    attention, _, kernel = values.pop("attention").partition(":")
    values["seed"] = job.seed
    return SimpleNamespace(**values, attention=attention, attention_kernel=kernel or None, recipe=Path(job.recipe).name)


class Settings(Mapping[str, Any]):
    """What a recipe is given: values by attribute or key, `settings.batch_size`, `settings["model"]`.

    Beside the trainer's settings there are `model`, `data` and `trust_remote_code` from the matrix.
    """

    def __init__(self, job: Job, plan: SimpleNamespace) -> None:
        extra = {"model": job.model, "data": job.data, "trust_remote_code": job.trust_remote_code}
        self._values: dict[str, Any] = {**vars(plan), **extra}
        self._read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            known = ", ".join(sorted(self._values))
            raise AttributeError(f"no setting {name!r}; there are: {known}") from None

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        self._read.add(name)
        return value

    def peek(self, name: str) -> Any:
        """A value that nobody is told to have read; None if there is no such name."""
        return self._values.get(name)

    def unread(self) -> Settings:
        """The same values, as if nobody had read any."""
        fresh = object.__new__(Settings)
        fresh._values, fresh._read = self._values, set()
        return fresh

    def __contains__(self, name: object) -> bool:
        return name in self._values  # to ask whether there is one is not to read it

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def read_by(settings: Settings) -> frozenset[str]:
    """Names that the recipe has asked for so far."""
    return frozenset(settings._read)
