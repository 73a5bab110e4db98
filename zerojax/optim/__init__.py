"""Optimizers that are correct on shards, and the check that finds those that are not."""
