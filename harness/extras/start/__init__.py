"""The first study: three questions, answered in a terminal or from a pipe, become a study file with comments."""
