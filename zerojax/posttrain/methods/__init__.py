"""The methods, a module each: rollout, score, advantages, update and log, in this order."""
