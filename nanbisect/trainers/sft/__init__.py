"""The built-in trainer: a real training loop and its recipes."""
