"""Prompt samplers, one file each, behind `harness.interfaces.Sampler`."""
