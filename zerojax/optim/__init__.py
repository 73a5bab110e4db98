"""Optimizers that are right on shards, and the check that finds those that are not."""
