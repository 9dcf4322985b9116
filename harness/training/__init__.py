"""One run: the loop and all that a step calls."""
