"""The commands of `python -m envs`."""
