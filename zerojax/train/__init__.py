"""The train state and the compiled training step."""
