"""The task `word_problems`: stories with several steps, drawn without end."""
