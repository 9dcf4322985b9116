"""Prompt samplers that order problems by difficulty, or draw those again that were not solved."""
