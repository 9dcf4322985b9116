"""Cohort under one import name. In a checkout the folders beside this one are its packages, by symbolic links."""
