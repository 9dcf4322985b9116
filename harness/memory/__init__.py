"""How much memory a run needs and uses."""
