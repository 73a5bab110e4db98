"""Weights for inference engines: patches of the changed elements, and the receiver beside the engine."""
