"""Where a weight meets a matmul: weights that products read in another form than that of an array."""
