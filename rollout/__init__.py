"""Rollouts: episodes of a policy in an environment, in flight together, handed out as groups."""
