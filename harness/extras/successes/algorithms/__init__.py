"""Found by their file names."""
