"""The trainers by name."""

from __future__ import annotations

from collections.abc import Mapping

from nanbisect.matrix import Vocabulary
from nanbisect.trainers.base import Trainer
from nanbisect.trainers.sft.launch import SftTrainer

TRAINERS: Mapping[str, Trainer] = {"sft": SftTrainer()}
VOCABULARIES: Mapping[str, Vocabulary] = {name: trainer.vocabulary for name, trainer in TRAINERS.items()}
