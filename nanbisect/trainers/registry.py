"""The trainers by name: the built-in one, any command, and one a preset. Each is made when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import TypeVar

from nanbisect.matrix import Vocabulary
from nanbisect.trainers import presets
from nanbisect.trainers.base import Trainer
from nanbisect.trainers.command import CommandTrainer
from nanbisect.trainers.sft.launch import SftTrainer

Made = TypeVar("Made")


class ByName(Mapping[str, Made]):
    """What `make` gives for a trainer's name, made once."""

    def __init__(self, make: Callable[[str], Made]) -> None:
        self._make = cache(make)

    def __getitem__(self, name: str) -> Made:
        if name not in _names():
            raise KeyError(name)
        return self._make(name)

    def __contains__(self, name: object) -> bool:
        return name in _names()

    def __iter__(self) -> Iterator[str]:
        return iter(_names())

    def __len__(self) -> int:
        return len(_names())


@cache
def _names() -> tuple[str, ...]:
    return ("sft", presets.PLAIN, *presets.names())


def _trainer(name: str) -> Trainer:
    return SftTrainer() if name == "sft" else CommandTrainer(presets.load(name))


TRAINERS: Mapping[str, Trainer] = ByName(_trainer)
VOCABULARIES: Mapping[str, Vocabulary] = ByName(lambda name: TRAINERS[name].vocabulary)
