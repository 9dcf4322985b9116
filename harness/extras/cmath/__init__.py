"""The task CMATH: word problems of Chinese primary schools."""
