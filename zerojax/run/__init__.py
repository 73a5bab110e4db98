"""A training program around the library: settings, data, checkpoints, metrics, and the loop."""
