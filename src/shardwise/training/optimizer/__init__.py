"""From gradients to weights: summing what ranks share, the global norm, optimizers and their schedule."""
