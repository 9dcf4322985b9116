"""Models in GGUF, the format of llama.cpp: a file, or a folder with one, is the name of a model."""
