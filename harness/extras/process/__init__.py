"""A reward for every correct calculation in a text, which finds its steps."""
