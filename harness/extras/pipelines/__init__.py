"""Stages that learn otherwise than from rewards: on the correct ones of sampled answers, or a reward model."""
