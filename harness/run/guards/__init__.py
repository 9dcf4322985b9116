"""Checks that make a run invalid: its weights, groups, answers and the agreement of its engine with its policy."""
