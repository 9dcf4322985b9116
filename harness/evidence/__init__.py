"""Whether a study's numbers follow again from what its runs have kept, and the capsule that carries all of that."""
