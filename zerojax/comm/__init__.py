"""The collectives, through which every byte crosses the mesh."""
