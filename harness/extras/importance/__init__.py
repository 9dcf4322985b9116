"""Which setting mattered: parallel coordinates and importances of all runs of one or several studies, as one page."""

API = {"importance": "page"}
