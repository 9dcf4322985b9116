"""Rewards for how sure the policy is: little entropy of the answers of a group, or tokens far from chance."""
