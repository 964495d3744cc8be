"""Sandboxes: where what a model wrote is run, apart from everything else."""
