"""A job of several processes: joining it, agreeing, noticing who died or hangs, stopping."""
