"""Every collective on weights and gradients, coalescing, and XLA's options for them."""
