"""Where the workers of a study run: this machine, or what an extra brings."""
