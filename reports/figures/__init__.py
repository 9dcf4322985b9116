"""How a report's results are drawn: each figure answers one question, says so in its title and names its own lines."""
