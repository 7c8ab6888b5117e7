"""From gradients to weights: summing what ranks share, the global norm, AdamW and its schedule."""
