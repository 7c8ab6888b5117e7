"""Language models built from the transformer."""
