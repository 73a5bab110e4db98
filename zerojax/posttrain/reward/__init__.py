"""Scorers of completions: the user's functions and environments, in separate processes, or a reward model."""
