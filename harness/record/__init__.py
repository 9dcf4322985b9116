"""The record: reads and writes the files of runs and studies, the only truth about them."""
