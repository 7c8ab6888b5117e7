"""How a collective travels."""
