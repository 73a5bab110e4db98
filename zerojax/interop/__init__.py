"""Other projects' files: Hugging Face's weights, DeepSpeed's configs."""
