"""From gradients to weights: sums over ranks, the global norm, and optimizers."""
