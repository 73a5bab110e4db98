"""Text, tokens and batches."""
