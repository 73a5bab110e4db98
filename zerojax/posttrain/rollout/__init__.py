"""Completions of prompts, as rows of a batch."""
