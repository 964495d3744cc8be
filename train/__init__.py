"""The learner: groups of trajectories in, new weights out."""
