"""A study: many runs, by workers that may die at any moment."""
