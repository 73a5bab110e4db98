"""What scores completions: functions and environments of the user's in processes of their own, or a model."""
