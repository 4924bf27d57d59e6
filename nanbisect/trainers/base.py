"""The trainers by name, and what each understands."""

from __future__ import annotations

from collections.abc import Mapping

from nanbisect.matrix import Vocabulary
from nanbisect.trainers.sft import settings as sft

VOCABULARIES: Mapping[str, Vocabulary] = {"sft": sft.VOCABULARY}
