"""All that is refused before a model loads: settings against machine, data, disk, memory."""
