"""Runs one thing: a run, an evaluation, a pipeline of stages."""
