"""Rollout engines, one file each, behind `harness.interfaces.RolloutEngine`."""
