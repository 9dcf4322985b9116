"""Fitted curves of accuracy against compute, with ceiling and speed: a section of the report."""
