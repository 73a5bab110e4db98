"""Post-training: losses, advantages, rewards, and the loop of ``zerojax posttrain``."""
