"""Training: settings, data preparation, the loop, what is measured and what is drawn."""
