"""nanbisect: which setting brings back the NaN, and where it starts."""

__version__ = "0.1.0"
