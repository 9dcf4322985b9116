"""The task `reasoning_gym`: problems that the package of that name draws and grades."""
