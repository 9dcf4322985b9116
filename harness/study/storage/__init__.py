"""Where a study's queue lives: files, or PostgreSQL."""
