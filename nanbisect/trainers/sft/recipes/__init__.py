"""Recipes: the user's model, data and per-channel loss for the built-in trainer."""
