"""Benchmarks: tables, run by hand, never a timed test."""
