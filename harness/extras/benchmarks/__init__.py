"""Tasks of data sets that test models: SVAMP, AIME, AMC, Minerva and OlympiadBench."""
