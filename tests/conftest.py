"""Two test workers share two cores: one thread a training, or they wait for each other."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
