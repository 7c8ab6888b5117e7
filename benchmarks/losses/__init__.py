"""The loss over a split vocabulary, in all implementations that `loss.py` compares."""
