"""Grades stored completions again, by several graders side by side."""

API = {"grade": "grade"}
