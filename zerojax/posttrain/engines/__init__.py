"""Inference engines that generate for a run: clients, the requests they share, and their weights."""
