"""What a run reads: prompts, and pairs of answers."""
