"""Makes a study of scores that other programs measured."""

API = {"import_scores": "scores"}
