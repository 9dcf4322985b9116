"""What a terminal shows; nothing below imports it."""
