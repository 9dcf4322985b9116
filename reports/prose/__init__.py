"""Turns a report's numbers into sentences; they are plain text, which the writer of a page must escape."""
