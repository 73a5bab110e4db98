"""The training program on top of the library: settings, data, checkpoints, metrics, training loop."""
