"""Programs for the devices: losses, advantages, and log-probabilities of tokens."""
