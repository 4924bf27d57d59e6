"""Why a training process may end early, as exceptions; `__main__` turns each into an `end` line."""

from __future__ import annotations


class BadInput(Exception):
    """The model, data or recipe can't be used as given: what, where, what to try."""


class Unsupported(Exception):
    """This machine or model can't run these levels; `levels` maps setting to level."""

    def __init__(self, reason: str, levels: dict[str, str] | None = None) -> None:
        super().__init__(reason)
        self.levels = levels or {}
