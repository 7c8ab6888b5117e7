"""Models in front of evaluation harnesses."""
