"""Text, tables and progress on a terminal; nothing below imports it."""
