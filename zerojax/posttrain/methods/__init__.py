"""The methods, one module each. A loop is rollout, score, advantages, update and log, in this order."""
