"""The served pages and their browser."""

from test_browser import served, site

__all__ = ["served", "site"]
