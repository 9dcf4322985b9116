"""The processes of a trial and the devices that they use."""
