"""Prints results on a terminal: one file per subject."""
