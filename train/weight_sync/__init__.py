"""Weights from the learner to servers: cut into buckets, and sent by one of several transports."""
