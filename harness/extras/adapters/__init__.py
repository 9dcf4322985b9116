"""Adapters that peft saved: a folder with one, which names its base, is the name of the two merged."""
