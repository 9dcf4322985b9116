"""Tests whether a model already knows the problems of a benchmark; reports of studies that start from it show it."""
