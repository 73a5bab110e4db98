"""What runs on the devices: losses, advantages, and what they read of a model."""
