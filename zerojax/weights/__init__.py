"""A weight at one of its levels, and the hops that bring it from one to the next."""
