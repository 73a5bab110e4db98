"""Communication, memory and time of a step: counted in programs, predicted, and measured in traces."""
