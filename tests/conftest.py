"""One thread a training, and the same examples every time.

Two test workers share two cores: with more threads they wait for each other. Hypothesis draws the same
examples in every run, so that a change fails for what it changed; HYPOTHESIS_PROFILE=search draws new ones.
"""

from __future__ import annotations

import os

from hypothesis import settings

os.environ["OMP_NUM_THREADS"] = "1"
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("search", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
