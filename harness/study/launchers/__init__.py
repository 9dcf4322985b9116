"""Starts the workers of a study: on this machine, or by an extra's launcher."""
