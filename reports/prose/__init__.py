"""How a report's numbers become words; sentences are plain text, and whoever writes a page escapes them."""
