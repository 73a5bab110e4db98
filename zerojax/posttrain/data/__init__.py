"""The data of a run: prompts, and pairs of responses."""
