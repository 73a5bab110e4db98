"""Jobs of several processes: joining, agreement, detection of dead and hung processes, stopping."""
