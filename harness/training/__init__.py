"""One run: the training loop and everything that a step calls."""
