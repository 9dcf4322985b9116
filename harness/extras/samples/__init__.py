"""All stored completions: searched, graded again by several graders, exported, and two arms compared by problem."""

API = {"grade": "grade", "samples": "reading"}
