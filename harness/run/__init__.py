"""One run: the loop, its steps, and everything that they do."""
