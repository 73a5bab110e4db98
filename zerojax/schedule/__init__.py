"""When weights are gathered and gradients reduced: the ZeRO stage, units, the prefetching scan."""
