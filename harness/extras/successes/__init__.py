"""Algorithms that learn from a run's own right completions once more."""
