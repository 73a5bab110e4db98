"""When weights are gathered and gradients reduced: units, the prefetching scan, breadth-first order."""
