"""Estimates and measures the memory of a run."""
