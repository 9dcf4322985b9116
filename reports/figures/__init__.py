"""Draws a report's results: each figure answers one question, states it in its title and names its own lines."""
