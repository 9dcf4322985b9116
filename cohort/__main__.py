"""`python -m cohort`: the command `cohort`, for launchers that start modules."""

from .harness.cli.app import main  # pyright: ignore[reportMissingImports]

main()
