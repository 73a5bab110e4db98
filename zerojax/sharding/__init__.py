"""Where each element of each parameter lives, and in what format it travels."""
