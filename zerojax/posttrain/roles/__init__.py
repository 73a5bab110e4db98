"""The models besides the policy, where their weights come from, and the memory of each."""
