"""The trainers by name: the built-in one, any command, and one a preset."""

from __future__ import annotations

from collections.abc import Mapping

from nanbisect.matrix import Vocabulary
from nanbisect.trainers import presets
from nanbisect.trainers.base import Trainer
from nanbisect.trainers.command import CommandTrainer
from nanbisect.trainers.sft.launch import SftTrainer

TRAINERS: Mapping[str, Trainer] = {
    "sft": SftTrainer(),
    **{name: CommandTrainer(presets.load(name)) for name in (presets.PLAIN, *presets.names())},
}
VOCABULARIES: Mapping[str, Vocabulary] = {name: trainer.vocabulary for name, trainer in TRAINERS.items()}
